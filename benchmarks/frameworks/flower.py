"""Flower: its simulation on Ray with two actors of one CPU each, a PyTorch client, its own `FedAvg`."""

import os
import sys
import time
from importlib.metadata import version

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import flower_client
import torch_cnn
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Turns, load_job

ACTORS = 2


class InTurns(FedAvg):
    """FedAvg whose rounds begin when the driver says so, with the clients that the job names.

    Flower's simulated nodes keep nothing, so any node can play any client: a message says whose examples to read.
    """

    def __init__(self, job, folder, turns, **settings):
        super().__init__(fraction_evaluate=0.0, **settings)
        self.job, self.folder, self.turns, self.arrays, self.over = job, folder, turns, None, False

    def configure_train(self, server_round, arrays, config, grid):
        """The messages of a round; none once the driver has said that there is no further round."""
        self.arrays = arrays
        self.over = self.over or not self.turns.begin()
        if self.over:
            return []
        nodes, messages = list(grid.get_node_ids()), []
        for place, i in enumerate(self.job.cohorts[server_round - 1]):
            config = ConfigRecord({"job": self.folder, "round": server_round, "place": place})
            content = RecordDict({"arrays": arrays, "config": config})
            messages.append(Message(content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[i]))
        return messages

    def aggregate_train(self, server_round, replies):
        """The weighted average, and the end of the turn."""
        if self.over:
            return None, None
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != self.job.cohorts.shape[1]:
            raise RuntimeError(f"round {server_round}: {len(replies)} replies, errors {failed[:1]}")
        out = super().aggregate_train(server_round, replies)
        self.turns.end()
        return out


def main():
    """Runs rounds when told."""
    folder = os.path.abspath(sys.argv[1])
    job, server = load_job(folder), ServerApp()
    strategy = InTurns(job, folder, None)
    turns = strategy.turns = Turns(lambda: torch_cnn.to_keras(strategy.arrays.to_numpy_ndarrays()))

    @server.main()
    def serve(grid, context):
        while len(list(grid.get_node_ids())) < job.clients:
            time.sleep(0.2)
        packages = {name: version(name) for name in ("flwr", "ray", "torch")}
        turns.ready(packages, f"Ray, {ACTORS} actors of 1 thread")
        initial = ArrayRecord(torch_cnn.from_keras(job.weights))
        strategy.start(grid, initial, num_rounds=len(job.cohorts) + 1)

    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=job.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": ACTORS}},
    )


if __name__ == "__main__":
    main()
