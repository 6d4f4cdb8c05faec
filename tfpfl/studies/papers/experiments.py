"""The papers' experiments as data: what is run and measured, what the paper found, and which orders must hold.

A cell is one method in one column of a table. Its configuration has everything but rounds and seed. So two tables that
a paper made of the same runs have equal cells and share the runs here, too. If a paper does not give a hyperparameter,
a comment says what is used instead.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from tfpfl.studies.papers import published
from tfpfl.studies.papers.orderings import at_least, best_or_near, descending, highest, lowest
from tfpfl.studies.papers.published import Published

SCALES = ("smoke", "laptop", "full")


class Cell(NamedTuple):
    """One method in one column of a table, with the value that the paper printed."""

    column: str
    method: str  # a name in ALGORITHMS
    config: dict  # entries of `RunConfig`, without rounds and seed
    published: Published | None
    label: str = ""  # tells cells of one method apart that have other hyperparameters
    protocol: str = ""  # a name in PROTOCOLS, if this method is measured in another way than the rest of the table


class Size(NamedTuple):
    """How much of an experiment is run at a scale."""

    rounds: int
    seeds: int
    # The entries of every cell's configuration that are smaller than in the paper; or a function that makes them from
    # the cell's configuration.
    config: dict | Callable[[dict], dict] = {}
    said: str = ""  # the same in words


class Ordering(NamedTuple):
    """An order of methods in some columns that must hold, because the specification or the paper says so."""

    text: str
    columns: tuple
    holds: Callable  # ({label: (value, half interval)}) -> bool, or None if a value that it needs is missing
    methods: tuple = ()  # that it is about; (): all of the column


class Experiment(NamedTuple):
    """One table or figure of a paper."""

    title: str
    source: str
    measures: str  # 'accuracy', 'seconds', 'rounds to 70 %' or 'gain over Local'
    protocol: str  # how the paper measures, a name in PROTOCOLS
    cells: tuple
    sizes: dict  # scale -> Size
    orderings: tuple = ()
    note: str = ""
    reference: str = ""  # the method at whose cost the others are compared; '': none

    def at(self, size: Size) -> "Experiment":
        """The experiment with the configuration of every cell changed to this size."""

        def changed(config: dict) -> dict:
            return config | (size.config(config) if callable(size.config) else size.config)

        return self._replace(cells=tuple(cell._replace(config=changed(cell.config)) for cell in self.cells))


# ---- PFLEGO, arXiv 2202.09848v2

_PFLEGO = {"clients": 100, "partition": "round_robin", "participation": 0.2, "evaluate_every": 10}
# (beta, rho). MNIST and Fashion-MNIST: the best of a search on validation examples (docs/measured.md). CIFAR-10: where
# such a search would start.
_RATES = {
    ("mnist", 2): (0.1, 0.003),
    ("mnist", 5): (0.03, 0.001),
    ("mnist", 10): (0.03, 0.001),
    ("fashion_mnist", 2): (0.007, 0.001),
    ("fashion_mnist", 5): (0.03, 0.001),
    ("fashion_mnist", 10): (0.007, 0.001),
    ("cifar10", 2): (0.001, 0.001),
    ("cifar10", 5): (0.001, 0.001),
    ("cifar10", 10): (0.001, 0.001),
}
_DATASETS = {
    "MNIST": ("mnist", (2, 5, 10)),
    "Fashion-MNIST": ("fashion_mnist", (2, 5, 10)),
    "CIFAR-10": ("cifar10", (2, 5, 10)),
    "EMNIST": ("emnist/byclass", (2, 31, 62)),
}
_FEDREP = {"momentum": 0.999}  # the paper's appendix A.3; the authors' published command does not have it
_TABLE1_METHODS = ("pflego", "fedrep", "fedper", "fedavg", "fedprox", "fedbabu", "ditto")


def _table1():
    for title, (dataset, classes) in _DATASETS.items():
        for K, method in product(classes, _TABLE1_METHODS):
            beta, rho = _RATES.get((dataset, K), (0.007, 0.001))
            hyper = {"pflego": {"tau": 50, "beta": beta, "rho": rho}, "fedrep": _FEDREP}.get(method, {})
            config = _PFLEGO | {
                "algorithm": method,
                "dataset": dataset,
                "partition_args": {"K": K},
                "hyperparameters": hyper,
            }
            yield Cell(f"{title}, {K}", method, config, published.PFLEGO_TABLE1.get((method, f"{title}, {K}")))


_HIGH_AND_MEDIUM = tuple(f"{title}, {K}" for title, (_, classes) in _DATASETS.items() for K in classes[:2])

_OMNIGLOT = {
    "dataset": "omniglot",
    "source": {"augment": "before_split"},
    "partition": "natural",
    "clients": None,
    "network": "omniglot_4conv",
    "labels": "local",
    "participation": 0.2,
    "evaluate_every": 10,
}
# At the paper's size, a round of a method that trains the whole model takes a laptop minutes. Fewer rounds say nothing
# of accuracy: the loss is flat for the first 20 to 40, until Adam has grown theta's gradient out of a plateau.
_OMNIGLOT_LAPTOP = Size(
    rounds=200,
    seeds=2,
    config={"source": {"augment": "none"}, "new_clients": 40, "evaluate_every": 2},
    said="10 of the 50 alphabets, 2 of them a round, and drawings are not rotated",
)
_OMNIGLOT_SECONDS = Size(
    rounds=10,
    seeds=1,
    config={"source": {"augment": "none"}, "participation": 0.04, "validation": 0.1, "evaluate_every": 1},
    said="drawings are not rotated, and 2 alphabets a round instead of 10",
)
_OMNIGLOT_FEW = Size(
    rounds=10,
    seeds=1,
    config={"source": {"augment": "none"}, "sampling_range": (1, 3), "validation": 0.1, "evaluate_every": 1},
    said="drawings are not rotated, and 1 to 3 alphabets a round instead of 4 to 28",
)
_OMNIGLOT_METHODS = ("pflego", "fedrecon", "fedrep", "fedbabu", "fedper", "fedavg", "fedprox", "ditto")

_OMNIGLOT_RATES = {
    "pflego": {"beta": 0.007, "rho": 0.003},
    "fedrecon": {"beta": 0.007, "rho": 0.003},
    "fedrep": _FEDREP,
    "fedbabu": {"steps_ft": 0},  # as in the authors' code; fine-tuning all clients at each evaluation would take hours
}


def _omniglot(table, **more):
    for method in _OMNIGLOT_METHODS:
        if (method, "Omniglot") in table:
            config = _OMNIGLOT | more | {"algorithm": method, "hyperparameters": _OMNIGLOT_RATES.get(method, {})}
            yield Cell("Omniglot", method, config, table[method, "Omniglot"])


def _cifar_high(method, hyper, **more):
    config = _PFLEGO | {"algorithm": method, "dataset": "cifar10", "partition_args": {"K": 2}, "hyperparameters": hyper}
    return config | more


def _participation():
    for rate, (method, hyper) in product(
        (0.2, 0.4, 1.0), {"pflego": {"beta": 0.001, "rho": 0.001}, "fedper": {}, "fedavg": {}}.items()
    ):
        yield Cell(
            f"CIFAR-10, 2, {rate:.0%} of the clients", method, _cifar_high(method, hyper, participation=rate), None
        )


# On a laptop, a round takes over an hour if all 100 clients train the convolutional network tau times.
_PARTICIPATION_LAPTOP = Size(
    rounds=40,
    seeds=1,
    config={"network": "mlp200", "validation": 0.9, "evaluate_every": 2},
    said="a dense network (mlp200), and 50 training examples a client: nine tenths are for validation",
)


def _taus():
    for tau, method in product((5, 10, 25, 50, 75, 100), ("pflego", "fedrecon")):
        hyper = {"beta": 0.007, "rho": 0.001, "tau": tau}
        config = _PFLEGO | {
            "algorithm": method,
            "dataset": "fashion_mnist",
            "partition_args": {"K": 2},
            "hyperparameters": hyper,
        }
        yield Cell(f"Fashion-MNIST, 2, tau {tau}", method, config, None)


def _taus_of_omniglot():
    for tau, method in product((5, 10, 25, 50, 75, 100), ("pflego", "fedrecon")):
        hyper = {"beta": 0.007, "rho": 0.001, "tau": tau}
        drawn = {"participation": 1.0, "sampling": "range", "sampling_range": (4, 28)}
        config = _OMNIGLOT | drawn | {"algorithm": method, "hyperparameters": hyper}
        yield Cell(f"Omniglot, tau {tau}", method, config, None)


def _rates():
    for beta, rho in product((0.001, 0.007, 0.03, 0.1), (0.0005, 0.001, 0.003, 0.007)):
        hyper = {"beta": beta, "rho": rho, "tau": 50}
        config = _PFLEGO | {
            "algorithm": "pflego",
            "dataset": "fashion_mnist",
            "partition_args": {"K": 2},
            "hyperparameters": hyper,
        }
        yield Cell(f"Fashion-MNIST, 2, beta {beta:g}", "pflego", config, None, f"rho {rho:g}")


# ---- PGFed, arXiv 2212.01448

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
_PGFED_SGD = {"eta": 0.005, "epochs": 5, "batch_size": 10}
# As in the authors' code: SGD with momentum 0.9 for these methods, without momentum for the others.
_PGFED_MOMENTUM = ("local", "fedavg", "feddyn", "fedper", "lg_fedavg", "fedbabu", "pgfed", "pgfedmo")
_PGFED_KEPT = ("feddyn", "fedper", "pgfed", "pgfedmo")  # and there a client keeps the momentum of its last visit
# pFedMe: lambda 1 is the default of PGFed's code (15 that of pFedMe's own). FedBABU: one epoch of fine-tuning; its rate
# is that of the authors' example command.
_PGFED_MORE = {
    "pfedme": {"lam": 1.0, "inner_steps": 5, "eta_p": 0.01, "beta": 1.0},
    "fedbabu": {"epochs_ft": 1, "eta_ft": 0.001},
    "fedfomo": {"candidates": 8, "validation_fraction": 0.2, "own_model": "visited"},
    "apfl": {"mixing": 0.5},
    "feddyn": {"dyn": 0.1},
    "pgfed": {"mu": 0.1, "eta2": 0.01, "init": "w0"},
    "pgfedmo": {"mu": 0.1, "eta2": 0.01, "beta": 0.5, "init": "w0"},
}
_PGFED_OWN = {  # methods whose hyperparameters have other names
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


# ---- FedAMP, arXiv 2007.03797

_FEDAMP_DATASETS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion_mnist",
    "EMNIST": "emnist/byclass",
    "CIFAR-100": "cifar100",
}
# The paper's networks and rates are in an appendix that is lost. These are used instead. SCAFFOLD has no momentum,
# since its control variates are made for plain SGD; it is scored by the clients' own models, which best explains its
# 98.75 where FedAvg has 19.44.
_FEDAMP_SGD = {"eta": 0.01, "epochs": 1, "batch_size": 10, "momentum": 0.9}
_FEDAMP_OWN = {"scaffold": {"eta": 0.01, "epochs": 1, "batch_size": 10, "eval_model": "local"}}
_FEDAMP_PRACTICAL = {"MNIST": "mnist", "Fashion-MNIST": "fashion_mnist", "EMNIST": "emnist", "CIFAR-100": "cifar100"}


def _fedamp(split):
    for (method, title), value in published.FEDAMP[split].items():
        data = {
            "iid": {"partition": "iid", "clients": 62 if title == "EMNIST" else 100},
            "pathological": {
                "partition": "pathological",
                "partition_args": {"shards": 2},
                "clients": 62 if title == "EMNIST" else 100,
            },
            "practical": {
                "partition": "grouped_dominant",
                "partition_args": {"groups": _FEDAMP_PRACTICAL[title]},
                "clients": None,
            },
        }[split]
        config = data | {
            "algorithm": method,
            "dataset": _FEDAMP_DATASETS[title],
            "labels": "global",
            "participation": 1.0,
            "evaluate_every": 1,
            "network": "fedavg_cnn",
            "hyperparameters": _FEDAMP_OWN.get(method, _FEDAMP_SGD),
        }
        yield Cell(title, method, config, value)


_FEDAMP_FAMILY = ("fedamp", "heurfedamp"), ("fedavg_ft", "fedprox_ft"), ("fedavg", "fedprox")

EXPERIMENTS = {
    "pflego-table1": Experiment(
        title="Table 1: test accuracy in %, by data set and classes a client",
        source="arXiv 2202.09848v2",
        measures="accuracy",
        reference="pflego",
        protocol="pflego",
        cells=tuple(_table1()),
        sizes={"smoke": Size(2, 1), "laptop": Size(50, 3), "full": Size(200, 3)},
        orderings=(
            Ordering(
                "PFLEGO is best, or within its own interval of the best", _HIGH_AND_MEDIUM, best_or_near("pflego")
            ),
            *(
                Ordering(
                    "PFLEGO is no more than 0.6 points below the paper",
                    (column,),
                    at_least("pflego", published.PFLEGO_TABLE1["pflego", column].value - 0.6),
                    ("pflego",),
                )
                for column in ("MNIST, 2", "Fashion-MNIST, 2")
            ),
        ),
        note="100 clients, 20 % a round, tau = 50. PFLEGO's rates for the two MNISTs were searched on validation; "
        "all else has the rates of the authors' published commands (0.007) or the defaults. A tenth of each client's "
        "training examples is set aside for validation, which the authors do not do. FedBABU has labels of the whole "
        "data set, where the authors' code numbers each client's own; its fine-tuning concerns EV-all only.",
    ),
    "pflego-table2": Experiment(
        title="Table 2: Omniglot, test accuracy in %",
        source="arXiv 2202.09848v2",
        measures="accuracy",
        reference="pflego",
        protocol="pflego",
        cells=tuple(_omniglot(published.PFLEGO_TABLE2)),
        sizes={"smoke": Size(1, 1), "laptop": _OMNIGLOT_LAPTOP, "full": Size(1000, 3)},
        orderings=(
            Ordering(
                "PFLEGO > FedRecon > {FedRep, FedBABU, FedPer} > {Ditto, FedAvg, FedProx}",
                ("Omniglot",),
                descending(("pflego",), ("fedrecon",), ("fedrep", "fedbabu", "fedper"), ("ditto", "fedavg", "fedprox")),
            ),
        ),
        note="50 alphabets, 10 of them a round, tau = 50.",
    ),
    "pflego-table3": Experiment(
        title="Table 3: Omniglot, seconds a round",
        source="arXiv 2202.09848v2",
        measures="seconds",
        protocol="pflego",
        cells=tuple(_omniglot(published.PFLEGO_TABLE3, evaluate_every=0, validation=0.0)),
        sizes={"smoke": Size(1, 1), "laptop": _OMNIGLOT_SECONDS, "full": Size(15, 1)},
        orderings=(
            Ordering("PFLEGO is the cheapest", ("Omniglot",), lowest("pflego")),
            Ordering("Ditto is the dearest", ("Omniglot",), highest("ditto")),
        ),
        note="Only ratios compare: the paper's machine and unit are unknown.",
    ),
    "pflego-participation": Experiment(
        title="Participation: CIFAR-10, 2 classes a client",
        source="arXiv 2202.09848v2, ablation",
        measures="accuracy",
        protocol="pflego",
        cells=tuple(_participation()),
        sizes={"smoke": Size(1, 1), "laptop": _PARTICIPATION_LAPTOP, "full": Size(200, 1)},
    ),
    "pflego-figure4": Experiment(
        title="PFLEGO and FedRecon over tau",
        source="arXiv 2202.09848v2, Figure 4",
        measures="accuracy",
        protocol="pflego",
        cells=tuple(_taus()),
        sizes={"smoke": Size(2, 1), "laptop": Size(100, 1), "full": Size(200, 3)},
        note="rho = 0.001, beta = 0.007. Smaller than the paper's: Fashion-MNIST with 2 classes a client, 20 of 100 "
        "clients in every round, 100 to 200 rounds. The paper has Omniglot, 4 to 28 of 50 clients (another number in "
        "each round) and 5,000 rounds: that is pflego-figure4-omniglot.",
    ),
    "pflego-figure4-omniglot": Experiment(
        title="PFLEGO and FedRecon over tau, as in the paper",
        source="arXiv 2202.09848v2, Figure 4",
        measures="accuracy",
        protocol="pflego",
        cells=tuple(_taus_of_omniglot()),
        sizes={"smoke": Size(1, 1), "laptop": _OMNIGLOT_FEW, "full": Size(5000, 1)},
        note="Omniglot, 50 alphabets, 4 to 28 of them in a round. rho = 0.001, beta = 0.007.",
    ),
    "pflego-rates": Experiment(
        title="PFLEGO over beta and rho",
        source="arXiv 2202.09848v2, ablation",
        measures="accuracy",
        protocol="pflego",
        cells=tuple(_rates()),
        sizes={"smoke": Size(2, 1), "laptop": Size(60, 1), "full": Size(200, 1)},
        note="The paper's data set for this is not known; Fashion-MNIST with 2 classes a client is used.",
    ),
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
} | {
    f"fedamp-{split}": Experiment(
        title=f"Table {number}: best mean testing accuracy in %, {split} split",
        source="arXiv 2007.03797",
        measures="accuracy",
        reference="fedamp",
        protocol="fedamp",
        cells=tuple(_fedamp(split)),
        sizes={"smoke": Size(1, 1), "laptop": Size(10, 1), "full": Size(100, 3)},
        orderings=(Ordering("FedAMP family > fine-tuned > global", ("EMNIST",), descending(*_FEDAMP_FAMILY)),)
        if split == "practical"
        else (),
        note="Networks, rates and rounds of the paper are lost; everyone takes part.",
    )
    for number, split in enumerate(("iid", "pathological", "practical"), 1)
}
