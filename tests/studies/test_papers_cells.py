"""Every cell of the papers' tables has the hyperparameters and the protocol that the specification gives."""

import runpy
from pathlib import Path

import pytest

from tfpfl.algorithms import get_method
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import protocol
from tfpfl.studies.papers import EXPERIMENTS, FIGURES, ledger_tables
from tfpfl.studies.papers import ledger as ledgers

ROOT = Path(__file__).parents[2]


def cells(*experiments):
    return [cell for name in experiments for cell in EXPERIMENTS[name].cells]


def all_of_it(cell) -> dict:
    """The hyperparameters with which the method is built."""
    defaults = {name: p.default for name, p in get_method(cell.method).hyperparameters.items()}
    return defaults | cell.config["hyperparameters"]


def has(cell, wanted: dict):
    found = all_of_it(cell)
    assert {name: found[name] for name in wanted} == wanted, ledgers.key(cell)


# PGFed (specification 3.2 to 3.21, E7 to E9 and section 10): 5 epochs in batches of 10 at rate 0.005, for every method.
SGD = {"eta": 0.005, "epochs": 5, "steps": None, "batch_size": 10}
MOMENTUM = SGD | {"momentum": 0.9}  # in the authors' code, of these methods only
PGFED = {
    "local": MOMENTUM,
    "fedavg": MOMENTUM,
    "lg_fedavg": MOMENTUM,
    "feddyn": MOMENTUM | {"dyn": 0.1, "keep_momentum": True},  # in PGFed's code clients keep it
    "fedper": MOMENTUM | {"keep_momentum": True},
    "fedbabu": MOMENTUM | {"epochs_ft": 1, "part": "full"},
    "pgfed": MOMENTUM | {"mu": 0.1, "eta2": 0.01, "keep_momentum": True, "init": "w0"},
    "pgfedmo": MOMENTUM | {"mu": 0.1, "eta2": 0.01, "beta": 0.5, "keep_momentum": True, "init": "w0"},
    "fedrod": SGD | {"momentum": 0.0, "init": "copy"},
    "fedfomo": SGD | {"momentum": 0.0, "candidates": 8, "validation_fraction": 0.2, "own_model": "visited"},
    "apfl": SGD | {"momentum": 0.0, "mixing": 0.5, "eta_a": 0.0},
    "pfedme": SGD | {"lam": 1.0, "inner_steps": 5, "eta_p": 0.01, "beta": 1.0, "weight_decay": 0.0},
    "per_fedavg": {"eta_inner": 0.005, "beta": 0.005, "epochs": 5, "steps": None, "batch_size": 10, "variant": "fo"},
    "fedrep": {"unit": "epochs", "tau_h": 5, "tau_b": 5, "eta_h": 0.005, "eta_b": 0.005, "batch_size": 10}
    | {"momentum": 0.0},
}


def test_cells_of_pgfed():
    found = cells("pgfed-table1", "pgfed-table2", "pgfed-tables3-4")
    assert {cell.method for cell in found} == set(PGFED)
    for cell in found:
        has(cell, PGFED[cell.method])
        config = RunConfig(**cell.config)
        title, clients = cell.column.split(", ")
        assert config.dataset == {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}[title]
        assert (config.clients, config.participation, config.sampling) == (int(clients), 0.25, "fixed")
        assert (config.partition, config.partition_args) == ("dirichlet", {"alpha": 0.3})
        assert (config.validation, config.network, config.source) == (0.0, "fedavg_cnn", {"pixels": "signed"})
        # the code fine-tunes and scores FedBABU once at the end, of the other methods it keeps the best round
        scored = protocol(cell.protocol or EXPERIMENTS["pgfed-table1"].protocol)
        assert scored == protocol("pgfed")._replace(when="last" if cell.method == "fedbabu" else "best_test")
    for name in ("pgfed-table1", "pgfed-table2", "pgfed-tables3-4"):
        assert (EXPERIMENTS[name].sizes["full"].rounds, EXPERIMENTS[name].sizes["full"].seeds) == (300, 3)
        assert EXPERIMENTS[name].protocol == "pgfed"
        # On a laptop as many clients train as in the paper, each with a fifth of the examples.
        smaller = EXPERIMENTS[name].at(EXPERIMENTS[name].sizes["laptop"])
        for cell, paper in zip(smaller.cells, EXPERIMENTS[name].cells, strict=True):
            config, full = cell.config, paper.config
            assert config["clients"] - config["new_clients"] == full["clients"] == config["clients"] / 5
            assert {**config, "clients": full["clients"]} == full | {"new_clients": config["new_clients"]}


# FedAMP (E10, section 4): everyone takes part; rates, epochs and networks are lost, so these are decisions.
FEDAMP_SGD = {"eta": 0.01, "epochs": 1, "batch_size": 10}


@pytest.mark.parametrize("split", ["iid", "pathological", "practical"])
def test_cells_of_fedamp(split):
    for cell in cells(f"fedamp-{split}"):
        has(cell, FEDAMP_SGD | ({"eval_model": "local"} if cell.method == "scaffold" else {"momentum": 0.9}))
        config = RunConfig(**cell.config)
        assert (config.participation, config.labels, config.network) == (1.0, "global", "fedavg_cnn")
        people = None if split == "practical" else 62 if cell.column == "EMNIST" else 100
        assert config.clients == people
        assert config.partition == {"practical": "grouped_dominant"}.get(split, split)
        assert config.partition_args == {
            "iid": {},
            "pathological": {"shards": 2},
            "practical": {"groups": {"Fashion-MNIST": "fashion_mnist", "CIFAR-100": "cifar100"}.get(
                cell.column, cell.column.lower())},
        }[split]  # fmt: skip
        assert not cell.protocol
    assert protocol(EXPERIMENTS[f"fedamp-{split}"].protocol) == protocol("fedamp")


# PFLEGO (3.23, E1): 50 steps on all examples at the authors' rate 0.007 (0.001 on CIFAR-10), or a searched rate.
PFLEGO = {
    "pflego": {"tau": 50, "rule": "eq3", "weighting": "alpha", "server_opt": "adam"},
    "fedrep": {"tau_h": 45, "tau_b": 5, "eta_h": 0.007, "eta_b": 0.007, "unit": "steps", "batch_size": None},
    "fedrecon": {"tau": 50, "server_opt": "adam", "reset_head": False, "query_fraction": 0.0},
    "fedbabu": {"eta": 0.007, "steps": None, "epochs": None, "batch_size": None, "momentum": 0.9},
} | dict.fromkeys(
    ("fedper", "fedavg", "fedprox", "ditto"),
    {"eta": 0.007, "steps": None, "epochs": None, "batch_size": None, "momentum": 0.0},  # the default work is 50 steps
)
SEARCHED = {"MNIST, 2": (0.1, 0.003), "MNIST, 5": (0.03, 0.001), "MNIST, 10": (0.03, 0.001)} | {
    "Fashion-MNIST, 5": (0.03, 0.001),
    "CIFAR-10, 2": (0.03, 0.001),
    "CIFAR-10, 5": (0.1, 0.001),
    "CIFAR-10, 10": (0.007, 0.001),
}


def test_cells_of_pflego_table1():
    classes = {"MNIST": (2, 5, 10), "Fashion-MNIST": (2, 5, 10), "CIFAR-10": (2, 5, 10), "EMNIST": (2, 31, 62)}
    found = cells("pflego-table1")
    assert {cell.column for cell in found} == {f"{title}, {K}" for title, Ks in classes.items() for K in Ks}
    for cell in found:
        has(cell, PFLEGO[cell.method])
        config, K = RunConfig(**cell.config), int(cell.column.split(", ")[1])
        assert (config.clients, config.participation, config.partition) == (100, 0.2, "round_robin")
        assert config.partition_args == {"K": K}
        if cell.method == "pflego":
            beta, rho = SEARCHED.get(cell.column, (0.007, 0.001))
            has(cell, {"beta": beta, "rho": rho})
    assert EXPERIMENTS["pflego-table1"].protocol == "pflego"
    assert EXPERIMENTS["pflego-table1"].sizes["full"].rounds == 200


def test_cells_of_pflegos_omniglot():
    for cell in cells("pflego-table2", "pflego-table3"):
        has(cell, PFLEGO[cell.method])
        config = RunConfig(**cell.config)
        assert (config.dataset, config.source, config.labels) == ("omniglot", {"augment": "before_split"}, "local")
        assert (config.network, config.partition, config.clients) == ("omniglot_4conv", "natural", None)
        assert config.participation == 0.2  # 10 of 50 alphabets
        if cell.method in ("pflego", "fedrecon"):
            has(cell, {"beta": 0.007, "rho": 0.003})
        if cell.method == "fedbabu":
            has(cell, {"steps_ft": 0})
    assert EXPERIMENTS["pflego-table2"].sizes["full"].rounds == 1000  # the table has rounds 991 to 1000


def test_cells_of_pflegos_ablations():
    for cell in cells("pflego-participation"):
        has(cell, {"beta": 0.001, "rho": 0.001, "tau": 50} if cell.method == "pflego" else {"eta": 0.007})
        assert cell.config["partition_args"] == {"K": 2} and cell.config["dataset"] == "cifar10"
    assert {cell.config["participation"] for cell in cells("pflego-participation")} == {0.2, 0.4, 1.0}
    figure4 = "pflego-figure4", "pflego-figure4-omniglot"
    for name in figure4:
        taus = {cell.config["hyperparameters"]["tau"] for cell in cells(name)}
        assert taus == {5, 10, 25, 50, 75, 100} and len(cells(name)) == 12
        for cell in cells(name):
            has(cell, {"beta": 0.007, "rho": 0.001})


def test_figure_4_says_what_is_smaller_than_in_the_paper():
    for cell in cells("pflego-figure4-omniglot"):  # specification 3.9: r in [4, 28], 5,000 rounds
        config = RunConfig(**cell.config)
        assert (config.dataset, config.sampling, config.sampling_range) == ("omniglot", "range", (4, 28))
    assert EXPERIMENTS["pflego-figure4-omniglot"].sizes["full"].rounds == 5000
    small = EXPERIMENTS["pflego-figure4"]
    assert {cell.config["dataset"] for cell in small.cells} == {"fashion_mnist"}
    for said in ("Fashion-MNIST", "20 of 100 clients", "Omniglot", "4 to 28 of 50 clients", "5,000 rounds"):
        assert said in small.note
    assert small.note in (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")


def test_a_page_of_the_documentation_lists_every_cell():
    page = runpy.run_path(str(ROOT / "docs" / "generated.py"))["cells_page"]()
    for name, found in (EXPERIMENTS | FIGURES).items():
        section = page.split(f"## {name}: ")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| ") and "algorithms/" in line]
        assert len(rows) == len(found.cells)
        for cell, row in zip(found.cells, rows, strict=True):
            assert row.startswith(f"| {cell.column} | [{get_method(cell.method).title}]") and row.count(" | ") == 4
            assert all(f"**{k} {v}**" in row for k, v in cell.config["hyperparameters"].items())
            assert all(f"{k} {v}" in row for k, v in all_of_it(cell).items())
            assert f"`{cell.protocol or getattr(found, 'protocol', '-')}`" in row or row.endswith("| - |")


def test_a_cell_can_be_measured_in_its_own_way():
    table = EXPERIMENTS["pgfed-table1"]
    babu, avg = (next(c for c in table.cells if c.method == m) for m in ("fedbabu", "fedavg"))
    found = {"seeds": {"0": {"rounds": 300, "accuracy": {"pgfed": [80.0, 1.0], "final": [70.0, 1.0]}}}}
    assert ledgers.measured(table, babu, found) == (70.0, 1.0)
    assert ledgers.measured(table, avg, found) == (80.0, 1.0)
    entry = {"rounds": 300, "asked": 300, "scale": "full", "stopped": None, "seconds": 1.0, "run": "r", "command": "c"}
    found["seeds"]["0"] |= entry
    said = ledger_tables.markdown({"pgfed-table1": {ledgers.key(babu): found}})
    assert "FedBABU: the model that a client predicts with after the server's step; all clients; mean over" in said
    assert "| CIFAR-10, 25 | FedBABU | 78.92 ± 0.36 | 70.00 ± 1.00 | -8.92 |" in said
