"""Every command and every option says what it is, and the table of a run's options is that of its configuration."""

import re
import subprocess
import sys
from dataclasses import fields

import click
import pytest

from tflite_export.cli import main as export
from tfpfl.algorithms import ALGORITHMS
from tfpfl.algorithms.transforms.screening import ON_BROKEN
from tfpfl.cli import main
from tfpfl.cli.options import hyperparameter_texts
from tfpfl.data import PARTITIONERS, load_source
from tfpfl.data.omniglot import AUGMENT
from tfpfl.engines.engine import ENGINES
from tfpfl.engines.local.simulation import GROUPINGS
from tfpfl.models.networks import NETWORKS
from tfpfl.models.split import HEAD_INITS
from tfpfl.runs.config import RunConfig
from tfpfl.runs.options import OPTIONS, SECTIONS

COMMANDS = [
    pytest.param(command, id=f"{program} {name}")
    for program, group in (("tfpfl", main), ("tflite_export", export))
    for name, command in group.commands.items()
]
ELSEWHERE = {
    *("hyperparameters", "partition_args"),  # options of the algorithm and of the partition, from their signatures
    "source",  # its keys have rows in the table
    *("federation_hash", "network_hash", "own_method", "versions", "format"),  # computed
}


def context(command, *arguments):
    return command.make_context(command.name, list(arguments), resilient_parsing=True)


def says_something(text, name=""):
    """Whether a help text is a sentence, and not the option's name again."""
    words = re.findall(r"[a-z]+", text.lower())
    return text.endswith(".") and len(words) >= 5 and len(set(words) - set(re.findall(r"[a-z]+", name.lower()))) >= 3


def test_what_says_something():
    assert says_something("Number of communication rounds to train.", "--rounds")
    assert not says_something("Number of communication rounds to train", "--rounds")
    assert not says_something("The rounds.", "--rounds")
    assert not says_something("The client seconds of the client.", "--client-seconds")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_and_its_options_have_help(command):
    found = context(command)
    assert says_something(" ".join(command.help.split()))
    for parameter in command.get_params(found):
        if isinstance(parameter, click.Argument):
            name = re.search(r"\w+", parameter.make_metavar(found))[0]
            assert name in command.help, f"the help does not say what {name} is"
        else:
            assert says_something(without_default(parameter.help), parameter.opts[0]), parameter.opts


def without_default(text):
    return re.sub(r"\s*\[default: [^]]*\]$", "", text)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hyperparameters_have_help(algorithm):
    command = main.commands["run"]
    params = {p.name: p for p in command.get_params(context(command, "--algorithm", algorithm))}
    for name, parameter in ALGORITHMS[algorithm].hyperparameters.items():
        option = params.get(f"hyper_{name}") or params[name]  # --head-init is an option of every run
        assert says_something(without_default(option.help)), (name, option.help)
        words = [word for value, word in ((None, "none"), (True, "yes"), (False, "no")) if parameter.default is value]
        shown = words[0] if words else parameter.default
        assert option.name == name or option.help.endswith(f"[default: {shown}]")


@pytest.mark.parametrize("partition", PARTITIONERS)
def test_arguments_of_partitions_have_help(partition):
    command = main.commands["run"]
    options = [p for p in command.get_params(context(command, "--partition", partition)) if p.name.startswith("part_")]
    assert options or partition == "iid"
    for option in options:
        assert says_something(without_default(option.help)), (option.opts, option.help)


def test_a_text_that_refers_to_another_method_has_that_methods_first():
    told = hyperparameter_texts("apfl")["eta"]
    assert told.startswith("Learning rate of the local SGD, >= 0. ") and told.endswith(", as in FedAvg.")
    assert hyperparameter_texts("local")["eta"].startswith(hyperparameter_texts("fedavg")["eta"])
    assert hyperparameter_texts("apfl", str.upper)["eta"].endswith("as in FEDAVG.")


def test_every_entry_of_a_configuration_stands_in_the_table_once():
    rows = [option for section in SECTIONS.values() for option in section]
    assert len(rows) == len(OPTIONS)
    assert {o.name for o in rows if not o.of_source} == {f.name for f in fields(RunConfig)} - ELSEWHERE
    assert {o.name for o in rows if o.of_source} <= load_source.__kwdefaults__.keys()


def test_every_row_of_the_table_is_an_option_of_run_with_the_default_of_the_configuration():
    command, config = main.commands["run"], RunConfig()
    found = context(command)
    options = {p.name: p for p in command.params}
    assert len(options) == len(command.params)
    for name, row in OPTIONS.items():
        assert options[name].opts == [row.flag] and options[name].help == row.help
        default = load_source.__kwdefaults__[name] if row.of_source else getattr(config, name)
        assert options[name].get_default(found) == found.params[name] == default
    others = {"allow_code", "allow_download", "workers", "address", "deadline", "isolate", "out", "logs", "log_tables"}
    assert options.keys() - OPTIONS == others


def test_choices_are_those_of_the_code():
    assert OPTIONS["engine"].choices == ENGINES
    assert OPTIONS["grouping"].choices == GROUPINGS
    assert OPTIONS["on_broken"].choices == ON_BROKEN
    listed = {"partition": PARTITIONERS, "network": NETWORKS, "head_init": HEAD_INITS, "augment": AUGMENT}
    for name, known in listed.items():
        assert [word for word in known if word not in OPTIONS[name].help] == []


def test_options_of_run_stand_under_headings():
    command = main.commands["run"]
    text = command.get_help(context(command, "--algorithm", "fedavg", "--partition", "dirichlet"))
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == [
        *SECTIONS,
        "Machines",
        "Options",
        "Hyperparameters of fedavg",
        "Arguments of partition dirichlet",
    ]
    for before, after in zip(headings, headings[1:], strict=False):
        part = text[text.index(f"\n{before}:") : text.index(f"\n{after}:")]
        for row in SECTIONS.get(before, ()):
            assert f"\n  {row.flag} " in part
    assert "--out" in text[text.index("\nOptions:") : text.index("\nHyperparameters")]


def test_the_list_of_commands_does_not_wait_for_tensorflow():
    code = "import sys; from tfpfl.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "reproduce" in told and "tensorflow" not in told.splitlines()[-1].split()
