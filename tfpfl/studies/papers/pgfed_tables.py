"""PGFed's experiments as data (arXiv 2212.01448).

If the paper does not give a hyperparameter, a comment says what is used instead.
"""

from typing import Any

from tfpfl.studies.papers import published
from tfpfl.studies.papers.experiment import Cell, Experiment, Ordering, Size
from tfpfl.studies.papers.orderings import descending

_PGFED = {
    "source": {"pixels": "signed"},
    "partition": "dirichlet",
    "partition_args": {"alpha": 0.3},
    "validation": 0.0,
    "labels": "global",
    "network": "fedavg_cnn",
    "participation": 0.25,
    "evaluate_every": 1,
}
_PGFED_SGD: dict[str, Any] = {"eta": 0.005, "epochs": 5, "batch_size": 10}
# As in the authors' code: SGD with momentum 0.9 for these methods, without momentum for the others.
_PGFED_MOMENTUM = ("local", "fedavg", "feddyn", "fedper", "lg_fedavg", "fedbabu", "pgfed", "pgfedmo")
_PGFED_KEPT = ("feddyn", "fedper", "pgfed", "pgfedmo")  # and there a client keeps the momentum of its last visit
# pFedMe: lambda 1 is the default of PGFed's code (15 that of pFedMe's own). FedBABU: one epoch of fine-tuning; its rate
# is that of the authors' example command.
_PGFED_MORE: dict[str, dict[str, Any]] = {
    "pfedme": {"lam": 1.0, "inner_steps": 5, "eta_p": 0.01, "beta": 1.0},
    "fedbabu": {"epochs_ft": 1, "eta_ft": 0.001},
    "fedfomo": {"candidates": 8, "validation_fraction": 0.2, "own_model": "visited"},
    "apfl": {"mixing": 0.5},
    "feddyn": {"dyn": 0.1},
    "pgfed": {"mu": 0.1, "eta2": 0.01, "init": "w0"},
    "pgfedmo": {"mu": 0.1, "eta2": 0.01, "beta": 0.5, "init": "w0"},
}
_PGFED_OWN: dict[str, dict[str, Any]] = {  # methods whose hyperparameters have other names
    "fedrep": {"unit": "epochs", "tau_h": 5, "tau_b": 5, "eta_h": 0.005, "eta_b": 0.005, "batch_size": 10},
    "per_fedavg": {"eta_inner": 0.005, "beta": 0.005, "epochs": 5, "batch_size": 10},
}

_PGFED_NOTE = (
    "Dirichlet(0.3), 25 % a round, 5 epochs in batches of 10. The rates are those of the authors' example commands; "
    "the best ones of each setting are not published. In the authors' code, clients of Local and FedAvg keep their "
    "momentum too; here it starts at 0 in every visit."
)

# A round of the paper's size takes a laptop half a minute, and the paper has 300.
_PGFED_LAPTOP = Size(
    rounds=60,
    seeds=3,
    config=lambda config: {"clients": 5 * config["clients"], "new_clients": 4 * config["clients"]},
    said="the data are divided among five times as many clients, of which a fifth takes part: so each has a fifth of "
    "the examples; and 60 of 300 rounds",
)


def _pgfed(table, *more):
    titles = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
    columns = dict.fromkeys(column for _, column in table)
    for (method, column), value in [*table.items(), *(((m, c), None) for m in more for c in columns)]:
        title, clients = column.split(", ")
        momentum = {"momentum": 0.9} if method in _PGFED_MOMENTUM else {}
        momentum |= {"keep_momentum": True} if method in _PGFED_KEPT else {}
        hyper = _PGFED_OWN.get(method) or _PGFED_SGD | momentum | _PGFED_MORE.get(method, {})
        data = {"dataset": titles[title], "clients": int(clients)}
        # FedBABU's clients are fine-tuned and scored once, after the last round.
        own = {"protocol": "final"} if method == "fedbabu" else {}
        yield Cell(column, method, _PGFED | data | {"algorithm": method, "hyperparameters": hyper}, value, **own)


EXPERIMENTS = {
    "pgfed-table1": Experiment(
        title="Table 1: test accuracy in %, by data set and clients",
        source="arXiv 2212.01448",
        measures="accuracy",
        reference="pgfed",
        protocol="pgfed",
        cells=tuple(_pgfed(published.PGFED_TABLE1)),
        sizes={"smoke": Size(1, 1), "laptop": _PGFED_LAPTOP, "full": Size(300, 3)},
        orderings=(
            Ordering(
                "PGFed > FedRoD > FedPer > Local > FedAvg",
                ("CIFAR-10, 25",),
                descending(("pgfed",), ("fedrod",), ("fedper",), ("local",), ("fedavg",)),
            ),
        ),
        note=_PGFED_NOTE,
    ),
    "pgfed-table2": Experiment(
        title="Table 2: rounds to 70 %",
        source="arXiv 2212.01448",
        measures="rounds to 70 %",
        protocol="pgfed",
        cells=tuple(_pgfed(published.PGFED_TABLE2)),
        sizes={"smoke": Size(1, 1), "laptop": _PGFED_LAPTOP, "full": Size(300, 3)},
        note=_PGFED_NOTE,
    ),
    "pgfed-tables3-4": Experiment(
        title="Tables 3 and 4: individual gain over Local in points, mean ± std over clients",
        source="arXiv 2212.01448",
        measures="gain over Local",
        protocol="pgfed",
        cells=tuple(_pgfed(published.PGFED_TABLES3_4, "local")),
        sizes={"smoke": Size(1, 1), "laptop": _PGFED_LAPTOP, "full": Size(300, 3)},
        note=_PGFED_NOTE + " The paper's means are not the differences of its Table 1: compare order and sign.",
    ),
}
