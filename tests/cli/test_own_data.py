"""One's own data at the command line: tables that become federations, and --federation wherever runs are made."""

import csv
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.runs.config import read_config
from tfpfl.studies import papers
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers.elsewhere import DATA

pytestmark = pytest.mark.usefixtures("elsewhere")


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Four named clients of two classes each."""
    rng = np.random.default_rng(0)
    clients = {}
    for i, name in enumerate(["north", "=south", "east", "Zoë"]):
        y = rng.integers(0, 2, 24) + i % 2
        clients[name] = (rng.normal(size=(24, 3)).astype("float32") + y[:, None], y)
    return Federation.from_clients(
        clients, name="four", out=tmp_path_factory.mktemp("own") / "four", class_names=["a", "b", "c"]
    )


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    rows = [[f"u{i % 3}", rng.normal(), 7, ["ill", "well"][i // 3 % 2]] for i in range(30)]
    with open(tmp_path / "people.csv", "w", newline="") as file:
        csv.writer(file).writerows([["user", "mass", "site", "state"], *rows])
    return tmp_path / "people.csv"


def test_a_table_becomes_a_federation_and_a_warning_is_one_line(table, tmp_path):
    args = ["partition", "--from", table, "--client", "user", "--label", "state", "--seed", 5]
    said = CliRunner().invoke(main, [str(a) for a in [*args, "--validation", 0, tmp_path / "f"]])
    assert said.exit_code == 0, said.output
    (warning,) = [line for line in said.output.splitlines() if "same value" in line]
    assert (
        warning.startswith("Warning: the same value in every row: column 'site'.") and "TfpflWarning" not in said.output
    )
    made = Federation.load(tmp_path / "f")
    assert made.client_names == ["u0", "u1", "u2"] and made.class_names == ["ill", "well"]
    with pytest.warns(TfpflWarning, match="the same value in every row: column 'site'"):
        here = Federation.from_table(
            table, client="user", label="state", features=["mass", "site"], seed=5, validation=0, out=tmp_path / "g"
        )
    assert made.hash == here.hash
    call(*args, "--features", "mass", "--test-fraction", 0.5, tmp_path / "h")
    assert Federation.load(tmp_path / "h").example_shape == (1,)
    assert Federation.load(tmp_path / "h").num_examples("test").tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--client", "user"], "--from needs --client COLUMN and --label COLUMN"),
        (["--client", "user", "--label", "stat"], "label: unknown column 'stat'; did you mean 'state'"),
        (
            ["--client", "user", "--label", "state", "--clients", "3"],
            "--from says what the data are: leave out --clients",
        ),
        (["--client", "user", "--label", "state", "--partition", "iid"], "leave out --partition"),
        (
            ["--client", "site", "--label", "user"],
            "column 'state' is not numeric, row 1 has 'ill': leave it out with feat",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_in_one_line(table, tmp_path, args, message):
    result = CliRunner().invoke(main, ["partition", "--from", str(table), *args, str(tmp_path / "f")])
    assert result.exit_code != 0 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "f").exists()


def test_a_fraction_for_validation_that_is_not_used_is_refused(table, tmp_path):
    """Where every client has validation rows, it would be written down and change nothing."""
    rows = list(csv.reader(table.open()))
    parts = ["part", *(["train", "validation", "test"][i // 3 % 3] for i in range(30))]
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([*row, part] for row, part in zip(rows, parts, strict=True))
    args = ["partition", "--from", table, "--client", "user", "--label", "state", "--split", "part"]
    refused = call(*args, "--validation", 0.4, tmp_path / "f", code=2)
    assert "column 'part' has some for every client: leave it out" in " ".join(refused.split())
    assert not (tmp_path / "f").exists()
    call(*args, tmp_path / "f")
    assert Federation.load(tmp_path / "f").num_examples("validation").sum() == 9


def test_a_column_without_a_table_is_refused(tmp_path):
    assert "--label names a column of a table: give the table with" in call("partition", "--label", "y", "f", code=2)


@pytest.mark.slow
def test_compare_trains_on_a_federation_and_clients_csv_has_the_names(federation, tmp_path):
    out, small = tmp_path / "out", ["--rounds", 1, "--participation", 1]
    call("compare", "--algorithms", "local", "--federation", federation.path, *small, "--out", out)
    assert read_config(out / "local-s0").federation_hash == federation.hash
    with open(out / "local-s0" / "clients.csv", newline="", encoding="utf-8") as file:
        rows = [(row["client"], row["name"]) for row in csv.DictReader(file)]
    assert rows == [("0", "north"), ("1", "'=south"), ("2", "east"), ("3", "Zoë")]  # no spreadsheet computes a name
    assert len(papers.Record.read(out / "local-s0").client_names) == 4


@pytest.mark.slow
def test_sweep_searches_on_a_federation(federation, tmp_path):
    args = ["--algorithm", "local", "--grid", "eta=0.1,0.2", "--rounds", 1, "--out", tmp_path / "out"]
    call("sweep", "--federation", federation.path, *args)
    found = [read_config(folder) for folder in (tmp_path / "out").iterdir()]
    assert len(found) == 2 and {config.federation_hash for config in found} == {federation.hash}


COMMANDS = {"run": [], "compare": ["--algorithms", "local"], "sweep": ["--grid", "tau=1,2"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_federation_and_other_data_are_refused(command, federation, tmp_path):
    args = [command, *COMMANDS[command], "--federation", federation.path, "--clients", 3, "--classes-per-client", 2]
    said = call(*args, "--out", tmp_path / "out", code=2)
    assert "--federation says what the data are: leave out --clients, --classes-per-client" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", slow_but(list(papers.EXPERIMENTS), "pflego-table1", "pflego-rates", "fedamp-iid"))
def test_a_table_on_a_federation_has_every_setting_once_and_none_of_the_papers_numbers(name, federation):
    size = papers.EXPERIMENTS[name].sizes["laptop"]
    before, after = papers.EXPERIMENTS[name].at(size), papers.table_on(name, federation, size)

    def settings(experiment):
        kept = [{k: v for k, v in cell.config.items() if k not in DATA} for cell in experiment.cells]
        return [json.dumps(config, sort_keys=True) for config in kept]

    assert sorted(settings(after)) == sorted(set(settings(before)))
    assert {cell.column for cell in after.cells} == {"four"} and not after.orderings
    assert {(cell.published, cell.config["federation"]) for cell in after.cells} == {(None, str(federation.path))}
    assert len({ledgers.key(cell) for cell in after.cells}) == len(after.cells)
    assert not any("new_clients" in cell.config for cell in after.cells)  # all of the user's clients train
    other = papers.table_on(name, federation, size, "mlp200")
    assert {cell.config["network"] for cell in other.cells} == {"mlp200"}


@pytest.mark.slow
def test_reproduce_on_a_federation_says_that_it_compares_with_no_paper(federation, tmp_path):
    args = ["--federation", federation.path, "--network", "mlp200", "--out", tmp_path / "out"]
    args += ["--only", "local"]
    said = call("reproduce", "pgfed-tables3-4", *args, "--rounds", 1, "--seeds", 1)
    assert "nothing here is compared with the paper's numbers" in said and "on the federation four" in said
    assert "its methods on four" in said and "Local" in said
    (cells,) = ledgers.load(tmp_path / "out" / "ledger.json").values()
    (entry,) = cells["four | local"]["seeds"].values()
    assert entry["federation"] == federation.hash[:12] and "--federation" in entry["command"]
    (folder,) = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert folder.name.startswith("local-four-") and read_config(folder).hyperparameters["momentum"] == 0.9
    assert "four Local" in call("reproduce", "pgfed-tables3-4", *args, "--no-run")
    assert "four" not in call("reproduce", "pgfed-tables3-4", "--no-run", "--out", tmp_path / "out")


@pytest.mark.slow
def test_another_network_or_federation_of_the_same_name_is_run_and_kept_apart(federation, tmp_path):
    network, mine = tmp_path / "net.py", tmp_path / "mine"
    for units, source in ((3, federation.path), (5, federation.path), (5, None)):
        shutil.rmtree(mine, ignore_errors=True)
        if source:
            shutil.copytree(source, mine)
        else:
            call("partition", "--dataset", "digits", "--clients", "5", mine)
        network.write_text(
            "import keras\n\n\ndef make(input_shape):\n    return keras.Sequential([keras.Input(input_shape), "
            f'keras.layers.Flatten(), keras.layers.Dense({units}, "relu")])\n'
        )
        args = ["--federation", mine, "--network", f"{network}:make", "--only", "local", "--rounds", 1, "--seeds", 1]
        call("reproduce", "fedamp-iid", *args, "--out", tmp_path / "out")
    parts = ledgers.load(tmp_path / "out" / "ledger.json")
    runs = [entry["run"] for part in parts.values() for cell in part.values() for entry in cell["seeds"].values()]
    assert len(parts) == 3 and len(set(runs)) == 3


@pytest.mark.parametrize(
    "args, message",
    [
        (["pflego-table1", "--network", "mlp200"], "--network goes with --federation"),
        (["--federation", "F"], "--federation needs NAME"),
        (
            ["pflego-table1", "--federation", "F", "--write", "x.md"],
            "leave it out, as --federation compares with no paper",
        ),
    ],
)
def test_reproduce_refuses_what_does_not_go_together(args, message, federation):
    assert message in call("reproduce", *[federation.path if a == "F" else a for a in args], code=2)


def test_a_papers_table_is_not_run_on_numbers(tmp_path):
    """100 times their errors would have been shown as accuracies."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 3)).astype("f"), rng.normal(size=20)) for _ in range(3)]
    numbers = Federation.from_clients(clients, targets="real", out=tmp_path / "numbers")
    said = call("reproduce", "pflego-table1", "--federation", numbers.path, "--network", "mlp200", code=1)
    assert "pflego-table1 compares accuracies, and the federation" in said and "has real targets in place of" in said


def test_a_figure_has_no_other_federation(federation):
    name = next(iter(papers.FIGURES))
    with pytest.raises(
        InvalidArgument, match="is a figure: it is measured on clients and classes that only the paper's"
    ):
        papers.table_on(name, federation, papers.FIGURES[name].sizes["smoke"])
