"""The file of a study: what it says, and that every wrong entry is named before anything runs."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tfpfl.algorithms import own
from tfpfl.checks import InvalidArgument
from tfpfl.runs import RunConfig, metrics, own_metrics
from tfpfl.runs.protocols import EV_LOCAL
from tfpfl.studies.study import worker
from tfpfl.studies.study.file import Study

TOML = """
title = "T"
seeds = [3, 4]
protocol = "EV-local"
[run]
rounds = 12
participation = 0.5
[search]
rounds = 6
[data.two]
clients = 6
partition_args = {K = 2}
[data.own]
federation = "made/here"
network = "own.keras"
[methods.pflego]
preset = "paper"
hyperparameters = {tau = 5}
search = {beta = [1e-3, 0.1], on_broken = ["reject", "stop"]}
[methods.many]
algorithm = "local"
title = "Local, long"
participation = 1
search = {eta = [0.1, 0.2, 0.3, 0.4]}
"""
YAML = """
title: T
seeds: [3, 4]
protocol: EV-local
run: {rounds: 12, participation: 0.5}
search: {rounds: 6}
data:
  two: {clients: 6, partition_args: {K: 2}}
  own: {federation: made/here, network: own.keras}
methods:
  pflego:
    preset: paper
    hyperparameters: {tau: 5}
    search: {beta: [1e-3, 0.1], on_broken: [reject, stop]}
  many:
    algorithm: local
    title: Local, long
    participation: 1
    search: {eta: [0.1, 0.2, 0.3, 0.4]}
"""


def small(**changes) -> dict:
    """A study of one method on one data set; a change None leaves an entry out."""
    content = {"data": {"d": {"clients": 5}}, "methods": {"local": {}}} | changes
    return {name: value for name, value in content.items() if value is not None}


def searched(search=None, **space) -> dict:
    return small(search=search or {}, methods={"local": {"search": space}})


def test_entries_reach_the_configurations(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    study = Study.read(tmp_path / "a.toml")
    (two, own), (pflego, many) = study.data, study.methods
    assert (study.title, study.seeds, study.protocol) == ("T", (3, 4), EV_LOCAL)
    assert (pflego.title, many.title) == ("PFLEGO", "Local, long")
    config = study.config(two, pflego, {"beta": 0.1, "on_broken": "reject"}, seed=4)
    assert (config.rounds, config.seed, config.data_seed, config.clients) == (12, 4, 0, 6)
    assert (config.preset, config.on_broken, config.participation) == ("paper", "reject", 0.5)
    assert config.hyperparameters == {"tau": 5, "beta": 0.1} and config.partition_args == {"K": 2}
    config = study.config(own, many, {"eta": 0.2}, seed=3, rounds=6)
    assert (config.rounds, config.participation, config.data_seed) == (6, 1.0, None)
    assert (config.federation, config.network) == (str(tmp_path / "made/here"), str(tmp_path / "own.keras"))
    assert len(study.settings(pflego)) == len(study.settings(many)) == 4
    assert study.search.seeds == (3,)


def test_yaml_says_the_same(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yaml").write_text(YAML)
    toml, yaml = (Study.read(tmp_path / name) for name in ("a.toml", "a.yaml"))
    assert yaml.methods[0].space["beta"] == [0.001, 0.1]  # YAML 1.1 would read a text
    assert (toml.run, toml.data, toml.methods, toml.search) == (yaml.run, yaml.data, yaml.methods, yaml.search)


def test_draws_are_as_many_as_asked_for_and_those_of_the_seed():
    space = {"eta": {"low": 0.01, "high": 1}, "steps": [1, 2]}
    first, same, other = (
        Study.of(searched({"kind": "random", "settings": 5, "seed": seed}, **space)) for seed in (1, 1, 2)
    )
    settings = [study.settings(study.methods[0]) for study in (first, same, other)]
    assert settings[0] == settings[1] != settings[2] and len(settings[0]) == 5
    assert all(0.01 <= s["eta"] <= 1 and s["steps"] in (1, 2) for s in settings[0])
    few = Study.of(searched({"kind": "random", "settings": 5}, steps=[1, 2]))
    assert len(few.settings(few.methods[0])) == 2  # there are no more


WRONG = {
    "a list": ([], "the file must be a table"),
    "unknown": (small(sed=[1]), "sed: unknown entry 'sed'; did you mean 'seeds'"),
    "seeds": (small(seeds=[0, 0]), "seeds must be a list of different integers"),
    "a seed": (small(seeds=[True]), "seeds must be a list of different integers"),
    "protocol": (small(protocol="EV-al"), "protocol: unknown protocol 'EV-al'; did you mean 'EV-all'"),
    "no data": (small(data=None), "data: a study needs at least one section [data.NAME]"),
    "no methods": (small(methods={}), "methods: a study needs at least one section [methods.NAME]"),
    "a name": (small(data={"../x": {}}), "data.../x: a name has letters"),
    "run": (small(run={"round": 3}), "run.round: unknown entry 'round'; did you mean 'rounds'"),
    "the seed": (small(run={"seed": 3}), "run.seed: unknown entry 'seed'"),
    "of data": (small(data={"d": {"client": 3}}), "data.d.client: unknown entry 'client'; did you mean 'clients'"),
    "two sources": (
        small(run={"validation": 0.2}, data={"d": {"federation": "x", "clients": 3}}),
        "data.d.federation says what the data are: leave out clients, validation",
    ),
    "method": (
        small(methods={"lokal": {}}),
        "methods.lokal.algorithm: unknown algorithm 'lokal'; did you mean 'local'",
    ),
    "of a method": (small(methods={"local": {"foo": 1}}), "methods.local.foo: unknown entry 'foo'"),
    "loose": (small(methods={"local": {"eta": 1}}), "methods.local.eta is a hyperparameter: write it into"),
    "other data": (small(methods={"local": {"clients": 3}}), "methods.local.clients: it is the same for all methods"),
    "more rounds": (small(methods={"local": {"rounds": 3}}), "methods.local.rounds: it is the same for all methods"),
    "titles": (
        small(methods={"local": {}, "b": {"algorithm": "local", "title": "Local"}}),
        "methods: two have the same title; the titles are Local, Local",
    ),
    "hyper": (
        small(methods={"local": {"hyperparameters": {"et": 1}}}),
        "methods.local.hyperparameters.et: unknown hyperparameter 'et'; did you mean 'eta'",
    ),
    "searched": (searched(et=[1]), "methods.local.search.et: unknown hyperparameter 'et'; did you mean 'eta'"),
    "no list": (searched(eta=0.1), "methods.local.search.eta must be a list of values"),
    "empty": (searched(eta=[]), "methods.local.search.eta must be a list of values"),
    "twice": (searched(eta=[0.1, 0.1]), "methods.local.search.eta: a value is there twice"),
    "twice as a number": (searched(eta=[1, 1.0]), "methods.local.search.eta: a value is there twice in [1, 1.0]"),
    "type": (searched(eta=["a"]), "methods.local.search.eta: eta must be float, found 'a'"),
    "range in a grid": (searched(eta={"low": 0.1, "high": 1}), "methods.local.search.eta: a grid needs a list"),
    "range": (
        searched({"kind": "random", "settings": 2}, eta={"low": 1, "high": 0.1}),
        "methods.local.search.eta: a range needs 0 < low < high, found low=1 and high=0.1",
    ),
    "range of integers": (
        searched({"kind": "random", "settings": 2}, steps={"low": 1, "high": 9}),
        "a range draws real numbers: give a list of values",
    ),
    "kind": (searched({"kind": "gird"}), "search.kind must be one of grid, random, optuna; found 'gird'"),
    "settings of a grid": (searched({"settings": 3}, eta=[0.1]), "search.settings: a grid tries all its settings"),
    "no settings": (searched({"kind": "random"}, eta=[0.1]), "search.settings: kind = 'random' needs the number"),
    "halving": (searched({"halving": 0}), "search.halving must lie in 1..2^31-1, found 0"),
    "a word": (searched({"rounds": "3"}), "search.rounds must be int or None, found '3'"),
    "halving with optuna": (
        searched({"kind": "optuna", "settings": 2, "halving": 2}, eta=[0.1]),
        "search.halving: Optuna learns from runs of one length",
    ),
    "budgets": (
        small(methods={"local": {"search": {"eta": [0.1]}}, "pflego": {"search": {"beta": [0.1, 0.2]}}}),
        "search: every method must try as many settings, and local has 1, pflego has 2",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_is_named(case):
    content, message = WRONG[case]
    with pytest.raises(InvalidArgument) as error:
        Study.of(content, where="my.toml")
    assert str(error.value).startswith("my.toml: ") and message in str(error.value)


def test_budgets_may_differ_if_the_file_says_so():
    methods = {"local": {"search": {"eta": [0.1]}}, "pflego": {"search": {"beta": [0.1, 0.2]}}}
    study = Study.of(small(methods=methods, search={"same_budget": False}))
    assert [len(study.settings(method)) for method in study.methods] == [1, 2]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.toml", "x = = 1", "a.toml is not valid TOML: "),
        ("a.yaml", "a: [", "a.yaml is not valid YAML: "),
        ("a.json", "{}", "a study is a file .toml, .yaml or .yml; found "),
        ("a.toml", "\udcff", "cannot be read: "),
        ("a.toml", json.dumps(None), "is not valid TOML"),
        ("a.yaml", "", "the file must be a table of names and values, found None"),
    ],
)
def test_a_file_that_is_no_study(tmp_path, name, text, message):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        Study.read(tmp_path / name)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Study.read(tmp_path / "missing.toml")


def test_the_example_of_the_documentation():
    """Five methods, two data sets, three seeds; as many settings for every method."""
    study = Study.read(Path(__file__).parents[2] / "docs" / "study.toml")
    assert (len(study.methods), len(study.data), len(study.seeds)) == (5, 2, 3)
    assert {len(study.settings(method)) for method in study.methods} == {4}
    for data in study.data:
        for method in study.methods:
            for setting in study.settings(method):
                study.config(data, method, setting, seed=0)


def test_a_method_without_a_space_has_one_setting():
    study = Study.of(small())
    assert study.settings(study.methods[0]) == [{}]


OWN = """
from tfpfl.algorithms import fedavg

def mine(model, population, *, eta: float = 0.1):
    return fedavg(model, population, eta=eta)

def hits(labels, logits):
    return (logits.argmax(1) == labels).mean()
"""


def test_the_word_none_is_none_where_a_value_may_be_none():
    """TOML has no null."""
    method = {"hyperparameters": {"clip": "None"}, "search": {"steps": [5, 10]}}
    study = Study.of(small(search={}, methods={"pfedhn": method, "b": {"algorithm": "pfedhn"}}))
    first, _ = study.methods
    config = study.config(study.data[0], first, {"steps": 5}, seed=0)
    assert config.hyperparameters == {"clip": None, "steps": 5}
    study = Study.of(small(search={}, methods={"pfedhn": {"search": {"clip": ["none", 5]}}}))
    assert study.methods[0].space["clip"] == [None, 5.0]
    with pytest.raises(InvalidArgument, match="tau must be int, found 'none'"):
        Study.of(small(search={}, methods={"pflego": {"search": {"tau": ["none"]}}}))


def test_methods_and_metrics_of_the_users_own(tmp_path, monkeypatch):
    """Named relative to the file; the process of a run gets the code that was checked, also if the file has changed."""
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    monkeypatch.setattr(own_metrics, "METRICS", metrics.METRICS)
    monkeypatch.setattr(own_metrics, "_loaded", {})
    monkeypatch.setattr(own, "_loaded", {})
    (tmp_path / "m.py").write_text(OWN)
    (tmp_path / "package_82.py").write_text(OWN + "# of the module")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "s.toml").write_text(
        'run.metrics = ["m.py:hits"]\ndata.d.clients = 5\nmethods.b.algorithm = "package_82:mine"\n'
        '[methods.a]\nalgorithm = "m.py:mine"\nsearch.eta = [0.1, 0.2]\n'
    )
    study = Study.read(tmp_path / "s.toml")
    b, a = study.methods
    config = study.config(study.data[0], a, {"eta": 0.2}, seed=1)
    assert (config.algorithm, config.metrics, config.hyperparameters) == ("m.py:mine", ("hits",), {"eta": 0.2})
    asked = json.loads(json.dumps({"config": asdict(config), "code": worker.sent(config)}))
    (tmp_path / "m.py").write_text("raise AssertionError('the changed file is run')")
    assert study.config(study.data[0], a, {"eta": 0.2}, seed=1) == config  # nor does a study that goes on
    own._loaded.clear()
    own_metrics._loaded.clear()
    del metrics.METRICS["hits"]
    for name in [name for name in sys.modules if name.startswith(own.PREFIX)]:
        monkeypatch.delitem(sys.modules, name)
    for code in asked["code"]:
        worker._load(code)
    assert RunConfig(**asked["config"]).method.hyperparameters["eta"].default == 0.1 and "hits" in metrics.METRICS
    own.own_method("package_82:mine")
    config = study.config(study.data[0], b, {}, seed=1)
    assert config.own_method["kind"] == "module" and worker.sent(config)[0]["entry"] == config.own_method

    with pytest.raises(InvalidArgument, match="methods.a.algorithm: .*m.py cannot be imported: AssertionError"):
        Study.of(small(methods={"a": {"algorithm": "m.py:mine"}}), folder=tmp_path)
    with pytest.raises(InvalidArgument, match="data.d.metrics: .*m.py cannot be imported: AssertionError"):
        Study.of(small(data={"d": {"metrics": ["m.py:hits"]}}), folder=tmp_path)
    with pytest.raises(InvalidArgument, match="methods.x.algorithm: unknown algorithm 'x'.*named FILE.py:function"):
        Study.of(small(methods={"x": {}}))


@pytest.mark.parametrize("entry", ["patience", "monitor", "evaluate_every"])
def test_what_a_search_sets_itself_cannot_be_searched(entry):
    """All settings would be the same run, and the first one the best."""
    methods = {"local": {"search": {entry: [1, 3]}}}
    with pytest.raises(InvalidArgument, match=rf"methods.local.search.{entry}: a search compares settings after equal"):
        Study.of({"data": {"d": {"clients": 6}}, "methods": methods, "seeds": [0]})
