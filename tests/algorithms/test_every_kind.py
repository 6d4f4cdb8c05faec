"""`tfpfl.studies.battery` for every method with every kind of heads that it can have.

All cases are slow; of those marked `table`, .ci/run runs few for one commit, since they take longest.
"""

import pytest

from helpers.normalized import model_for
from helpers.quick import quick
from helpers.toys import KINDS
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.models import SplitModel
from tfpfl.studies import battery

AT_NIGHT = ["fedrecon", "fedamp"]  # heads that are fitted again, and messages for each client


RATES = ("beta", "eta", "rho", "eta_inner", "eta_p")
FEDREP = {"eta_h": 0.1, "eta_b": 0.05}  # whose default rates are small


def times(name: str, kind: str) -> float:
    """By what the rates of `quick` are multiplied so that the loss falls, and does not oscillate."""
    if name == "pfedme" and kind in ("regression", "multilabel"):
        return 0.5
    if kind == "multilabel" and name not in ("fedamp", "heurfedamp", "layerwise"):
        return 3.0  # the logistic loss is flatter than cross-entropy
    return 1.0


def hyperparameters(name: str, kind: str) -> dict:
    found = {key: value * times(name, kind) if key in RATES else value for key, value in quick(name).items()}
    return found | (FEDREP if name == "fedrep" else {})


def marked(name: str, kind: str):
    every = kind == "regression" and name in AT_NIGHT or name == "pflego"
    return pytest.param(name, kind, marks=pytest.mark.slow if every else (pytest.mark.slow, pytest.mark.table))


@pytest.mark.parametrize(
    ("name", "kind"),
    [marked(name, kind) for name, method in ALGORITHMS.items() for kind in KINDS if not method.only_classes],
)
def test_battery(name, kind):
    hyper, model = hyperparameters(name, kind), model_for(name, "float64", kind)
    findings = battery.check_algorithm(
        lambda _, people: build_algorithm(name, model, people, **hyper), kind=kind, dtype="float64"
    )
    assert [str(finding) for finding in findings if finding.status == "FAILED"] == []
    assert len(findings) == len(battery.CHECKS)


@pytest.mark.parametrize("name", [name for name, method in ALGORITHMS.items() if method.only_classes])
def test_methods_for_classes_say_so(name, tmp_path):
    federation = battery.small_federation(tmp_path / "federation", kind="regression")
    model = SplitModel(battery.backbone("float32"), kind="regression")
    with pytest.raises(InvalidArgument, match="for classification only, found the kind regression"):
        build_algorithm(name, model, battery.small_population(federation), **quick(name))
