"""pfl-research: `FederatedAveraging` on a `SimulatedBackend` with a PyTorch model, on the CPU.

Started by torchrun, pfl shares the cohort out to its processes; that of rank 0 takes the turns for all.
"""

import os
import sys
from importlib.metadata import version

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")

import torch
import torch_cnn
from job import Turns, load_job
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Network(torch.nn.Module):
    """What pfl asks of a module: a loss and metrics (which nobody evaluates here)."""

    def __init__(self):
        super().__init__()
        self.layers = torch_cnn.build()

    def loss(self, x, y):
        """Of one mini-batch."""
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, x, y):
        """None."""
        return {}


class InTurns(TrainingProcessCallback):
    """Lets a central iteration begin when the driver says so.

    Args:
        turns: None in a process that waits for that of rank 0.
    """

    def __init__(self, turns):
        self.turns = turns

    def begin(self) -> bool:
        """The next round may begin, in all processes; False if there is none."""
        go = torch.tensor(int(self.turns.begin()) if self.turns else 0)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(go, 0)
        return bool(go)

    def on_train_begin(self, *, model):
        """Before round 1."""
        self.begin() or sys.exit()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """After every round; at the end, waits to be asked for the weights."""
        if self.turns:
            self.turns.end()
        return not self.begin(), Metrics()


def main():
    """Runs rounds when told."""
    job = load_job(sys.argv[1])
    network = Network()
    torch_cnn.load(network, torch_cnn.from_keras(job.weights))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    rounds, cohort = job.cohorts.shape
    visits = iter([(t, place) for t in range(1, rounds + 1) for place in range(cohort)])

    def dataset(visit):
        """A client's examples; pfl takes them in the order given."""
        x, y = job.visit(*visit)
        return Dataset([torch_cnn.images(x, job.scale, job.shift), torch_cnn.labels(y)], user_id=str(visit))

    federated = FederatedDataset(dataset, lambda: next(visits))
    backend = SimulatedBackend(federated, federated, postprocessors=[WeightByDatapoints()])
    turns, world = None, int(os.environ.get("WORLD_SIZE", 1))
    if int(os.environ.get("RANK", 0)) == 0:
        turns = Turns(lambda: torch_cnn.to_keras(torch_cnn.dump(network)))
        note = f"processes: {world}, threads of each: {torch.get_num_threads()}"
        turns.ready({"pfl": version("pfl"), "torch": torch.__version__}, note)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 1,  # the last one never begins: the driver ends the process
            evaluation_frequency=rounds + 2,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=job.rate, local_batch_size=job.batch_size
        ),
        callbacks=[InTurns(turns)],
    )


if __name__ == "__main__":
    main()
