"""pfl-research: `FederatedAveraging` on a `SimulatedBackend` with a PyTorch model, on the CPU.

With torchrun, the cohort is shared out to its processes; the one of rank 0 takes the turns.
"""

import os
import sys
from importlib.metadata import version

import numpy as np
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
    """Lets a central iteration begin when the driver says so."""

    def __init__(self, turns):
        self.turns = turns

    def on_train_begin(self, *, model):
        """Before round 1."""
        self.turns.begin() or sys.exit()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """After every round; at the end, waits to be asked for the weights."""
        self.turns.end()
        return not self.turns.begin(), Metrics()


def main():
    """Runs rounds when told."""
    job = load_job(sys.argv[1])
    network = Network()
    torch_cnn.load(network, torch_cnn.from_keras(job.weights))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    rows = iter([(t, int(i)) for t, ids in enumerate(job.cohorts, start=1) for i in ids])

    def dataset(visit):
        """The client's examples, shuffled for this round: pfl itself takes them in the order given."""
        order = np.random.default_rng(job.shuffle_seed(*visit)).permutation(job.examples)
        x, y = job.x[visit[1]][order], job.y[visit[1]][order]
        return Dataset([torch_cnn.images(x), torch_cnn.labels(y)], user_id=visit[1])

    federated = FederatedDataset(dataset, lambda: next(rows))
    backend = SimulatedBackend(federated, federated, postprocessors=[WeightByDatapoints()])
    turns = Turns(lambda: torch_cnn.to_keras(torch_cnn.dump(network)))
    turns.ready(
        {"pfl": version("pfl"), "torch": torch.__version__},
        f"one process, {torch.get_num_threads()} threads; shuffled by the benchmark",
    )
    rounds, cohort = job.cohorts.shape
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
    os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")
    main()
