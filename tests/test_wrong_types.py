"""The functions and classes that most users call first tell an argument of a wrong type by an error of this package.

Every argument gets every wrong value. Some values are right for some arguments, which is no failure; what may not come
is an error of Python or NumPy from the middle of the work.
"""

import inspect

import numpy as np
import pytest

from helpers import small_runs as runs
from helpers import toys
from tfpfl import (
    Federation,
    Machines,
    Population,
    Run,
    RunConfig,
    Sampling,
    Scorer,
    Simulation,
    Source,
    SplitModel,
    Training,
    adapt_new_clients,
    build_algorithm,
    build_network,
    check_algorithm,
    compare_runs,
    load_source,
    search_hyperparameters,
    write_report,
)
from tfpfl.checks import TfpflError
from tfpfl.runs import Availability, ClientModels, EarlyStopping, Metric

WRONG = (None, "x", "2", 3.5, -1, [], [3], print, {"a": (1,)}, float("nan"), object())


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A right value for every argument that has no default."""
    federation = runs.federation(tmp_path_factory.mktemp("data") / "federation")
    population = federation.population(Sampling("fixed", 0.5), "local", shared_slots=True)
    model = SplitModel(toys.backbone("float32"))
    table = tmp_path_factory.mktemp("table") / "table.csv"
    table.write_text("who,size,kind\n" + "\n".join(f"p{i % 3},{i * i % 7},{'ab'[i % 2]}" for i in range(60)))
    return {
        "backbone": toys.backbone("float32"),
        "model": model,
        "population": population,
        "federation": federation,
        "algorithm": build_algorithm("fedsgd", model, population),
        "clients": toys.clients((20, 31), (2, 3), dtype="float32"),
        "input_shape": (8, 8, 1),
        "num_examples": [3, 4],
        "num_classes": [2, 2],
        "x": np.ones((20, 3)),
        "y": np.arange(20) % 2,
        "config": runs.config(),
        "table": table,
        "client": "who",
        "label": "kind",
        "patience": 3,
    }


ENTRIES = {
    "Sampling": (Sampling, {}),
    "SplitModel": (SplitModel, {}),
    "build_network": (build_network, {"name": "mlp200"}),
    "build_algorithm": (build_algorithm, {"name": "pflego"}),
    "Simulation": (Simulation, {}),
    "Scorer": (Scorer, {}),
    "Training": (Training, {}),
    "RunConfig": (RunConfig, {"algorithm": "pflego"}),
    "load_source": (load_source, {"name": "synthetic"}),
    "from_clients": (Federation.from_clients, {}),
    "from_table": (Federation.from_table, {}),
    "Federation.build": (Federation.build, {"clients": 5}),
    "from_arrays": (Source.from_arrays, {}),
    "Federation.population": (Federation.population, {}),
    "Population": (Population, {}),
    "Machines": (Machines, {}),
    "Availability": (Availability, {}),
    "Run.create": (Run.create, {}),
    "EarlyStopping": (EarlyStopping, {}),
    "Metric": (Metric, {"name": "mine", "function": min}),
    "ClientModels": (ClientModels, {}),
    "adapt_new_clients": (adapt_new_clients, {}),
    "compare_runs": (compare_runs, {"configs": []}),
    "search_hyperparameters": (search_hyperparameters, {"settings": []}),
    "write_report": (write_report, {}),
    "check_algorithm": (check_algorithm, {}),
}
# A wrong path is told by Python: TypeError, "expected str, bytes or os.PathLike object". A download needs a network.
LEFT_OUT = {"out", "folder", "data_dir", "allow_download", "self"}
ONLY = {  # the others are looked at later, after work of minutes
    "check_algorithm": {"build"},
    "adapt_new_clients": {"run"},
    "compare_runs": {"configs", "beside"},
    "search_hyperparameters": {"config", "settings"},
    "write_report": {"records"},
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.filterwarnings("ignore::tfpfl.checks.TfpflWarning")
def test_a_wrong_type_is_told_by_this_package(entry, known, tmp_path):
    call, given = ENTRIES[entry]
    parameters = inspect.signature(call).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = {p.name: known[p.name] for p in parameters if p.default is p.empty and p.name in known}
    if "self" in named:
        needed["self"] = known["federation"]
    refused = 0
    for name in ONLY.get(entry, set(named) - LEFT_OUT):
        for i, value in enumerate(WRONG):
            out = {place: tmp_path / f"{name}-{i}" for place in ("out", "folder") if place in named}
            try:
                call(**{**needed, **given, **out, name: value})
            except TfpflError:
                refused += 1
            except Exception as error:  # noqa: BLE001 -- which one it is, is what the test asks
                pytest.fail(f"{entry}({name}={value!r}) gives {type(error).__name__}: {error}")
    assert refused >= len(WRONG) // 2  # the calls were such that a wrong value can be told
