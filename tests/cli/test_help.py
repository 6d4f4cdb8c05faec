"""Every command and every option says what it is, and the table of a run's options is that of its configuration."""

import re
import subprocess
import sys
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from helpers.normalized import adapters_of
from tflite_export.cli import main as export
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.parts.schedules import SCHEDULES
from tfpfl.algorithms.transforms.screening import ON_BROKEN
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.cli.group import Group
from tfpfl.cli.options import hyperparameter_texts, scalar_type
from tfpfl.data import PARTITIONERS, Population, list_datasets, load_source
from tfpfl.data.kinds import KINDS
from tfpfl.data.omniglot import AUGMENT
from tfpfl.engines.engine import ENGINES
from tfpfl.engines.local.simulation import GROUPINGS
from tfpfl.models.networks import NETWORKS, build_network
from tfpfl.models.normalization import BATCH_NORMS
from tfpfl.models.split import HEAD_INITS, SplitModel
from tfpfl.runs.aggregators import AGGREGATORS
from tfpfl.runs.config import RunConfig
from tfpfl.runs.metrics import ALWAYS, NAMES
from tfpfl.runs.options import OPTIONS, SECTIONS
from tfpfl.runs.protocols import PROTOCOLS

COMMANDS = [
    pytest.param(command, id=f"{program} {name}")
    for program, group in (("tfpfl", main), ("tflite_export", export))
    for name, command in group.commands.items()
]
ELSEWHERE = {
    *("hyperparameters", "partition_args"),  # options of the algorithm and of the partition, from their signatures
    "source",  # its keys have rows in the table
    *("federation_hash", "network_hash", "network_weights", "own_method", "own_metrics"),  # computed
    *("network_place", "network_beside"),
    *("versions", "format"),
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
        option = params["head_init" if name == "head_init" else f"hyper_{name}"]  # --head-init: of every run
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
        assert options[name].opts == [row.flag] and options[name].help.startswith(row.help)
        default = load_source.__kwdefaults__[name] if row.of_source else getattr(config, name)
        assert options[name].get_default(found) == found.params[name] == default
    others = {"allow_code", "allow_download", "workers", "address", "deadline", "isolate", "out", "logs", "log_tables"}
    assert options.keys() - OPTIONS == others | {"create_only"}


def test_choices_are_those_of_the_code():
    choices = {"engine": ENGINES, "grouping": GROUPINGS, "on_broken": ON_BROKEN, "head_init": HEAD_INITS}
    choices |= {"augment": AUGMENT, "batch_norm": BATCH_NORMS}
    assert {name: OPTIONS[name].choices for name in choices} == choices
    known = {"algorithm": ALGORITHMS, "partition": PARTITIONERS, "network": NETWORKS, "aggregator": AGGREGATORS}
    known |= {"dataset": [row["name"] for row in list_datasets()]}
    known |= {"schedule": SCHEDULES}
    known |= {"metrics": NAMES, "monitor": (*ALWAYS, *NAMES), "kind": KINDS}
    assert {name: sorted(option.known) for name, option in OPTIONS.items() if option.known} == {
        name: sorted(names) for name, names in known.items()
    }
    named = re.findall(r"(\w+): ([\w, ]+)[;.]", OPTIONS["preset"].help.partition("one. ")[2].partition(" Default")[0])
    assert {name: names.split(", ") for name, names in named} == {
        name: [*row.presets] for name, row in ALGORITHMS.items() if row.presets
    }


@pytest.mark.parametrize(
    ("command", "flag", "known"),
    [
        *[("run", OPTIONS[name].flag, OPTIONS[name].known) for name in OPTIONS if OPTIONS[name].known],
        *[("run", OPTIONS[name].flag, OPTIONS[name].choices) for name in OPTIONS if OPTIONS[name].choices],
        ("compare", "--algorithms", ALGORITHMS),
        ("compare", "--protocol", PROTOCOLS),
        ("report", "--baseline", ALGORITHMS),
        ("new-clients", "--protocol", ("own", "global")),
    ],
)
def test_the_names_that_an_option_takes_are_in_its_help_and_are_completed(command, flag, known):
    found = context(main.commands[command])
    (option,) = [p for p in found.command.get_params(found) if flag in p.opts]
    shown = " ".join(option.get_help_record(found))
    assert [name for name in known if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown)] == []
    assert {item.value for item in option.type.shell_complete(found, option, "")} == set(known)
    last = list(known)[-1]
    if command == "compare" and flag == "--algorithms":
        assert [i.value for i in option.type.shell_complete(found, option, f"pflego,{last}")] == [f"pflego,{last}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--engine", "locl"], "unknown value 'locl'; did you mean 'local'? there are local, tff, ray"),
        (["run", "--head-init", "zero"], "unknown value 'zero'; did you mean 'zeros'?"),
        (["run", "--dataset", "digit"], "did you mean digits"),
        (["run", "--network", "mlp20"], "did you mean 'mlp200'?"),
        (["run", "--algorithm", "fedavgg"], "did you mean 'fedavg'?"),
        (["run", "--partition", "dirichle"], "did you mean 'dirichlet'?"),
        (["run", "--aggregator", "medan"], "did you mean 'median'?"),
        (["compare", "runs", "--protocol", "EV-al"], "did you mean 'EV-all'?"),
        (["demo", "--engine", "tf"], "did you mean 'tff'?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_one(words, said, elsewhere):
    done = CliRunner().invoke(main, words)
    assert done.exit_code != 0 and said in done.output and "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_help_of_a_hyperparameter_lists_its_values(name):
    """Those that the builder names when it refuses another one."""
    network = "conv_bn" if ALGORITHMS[name].batch_norm else "mlp200"
    model = SplitModel(build_network(network, (4, 4, 1)), adapters=adapters_of(name))
    population = Population([8] * 4, [2] * 4, num_labels=2)
    texts = hyperparameter_texts(name)
    for option, parameter in ALGORITHMS[name].hyperparameters.items():
        if scalar_type(parameter) is str:
            with pytest.raises(InvalidArgument) as refused:
                build_algorithm(name, model, population, **{option: "no such value"})
            said = re.search(r"(?:one of|there are|must be) (?:one of )?(.+?)(?:[;,] found|$)", str(refused.value))[1]
            allowed = [value.strip("'") for value in re.split(", | or ", said)]
            assert len(allowed) > 1 and "no such value" not in allowed
            assert [value for value in allowed if not re.search(rf"\b{value}\b", texts[option])] == [], option


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


@pytest.mark.parametrize("group", [main, export], ids=["tfpfl", "tflite_export"])
def test_every_command_stands_under_one_heading(group):
    text = CliRunner().invoke(group, ["--help"]).output
    lists = dict(re.findall(r"^(\S.*):\n((?:  .*\n?)+)", text, re.MULTILINE))
    listed = [line.split()[0] for heading in group.headings for line in lists[heading].splitlines()]
    assert sorted(listed) == sorted(group.commands)
    assert set(group.headings) <= set(lists) and len(group.headings) > 1


WITHOUT_TENSORFLOW = {  # these start without it
    main: {"datasets", "cite", "places", "watch", "device"},
    export: {"verify", "inspect", "bench"},
}


@pytest.mark.parametrize("group", [main, export], ids=["tfpfl", "tflite_export"])
def test_a_command_that_needs_tensorflow_first_asks_whether_it_can_start(group):
    assert set(group.heavy) == set(group.commands) - WITHOUT_TENSORFLOW[group]


def test_a_command_without_a_heading_is_listed_too():
    commands = [click.Command("a"), click.Command("b")]
    group = type("Grouped", (Group,), {"headings": {"First": ("a",)}})("some", commands=commands)
    assert re.search(r"First:\n  a *\n\nOther commands:\n  b", CliRunner().invoke(group, ["--help"]).output)
    plain = Group("some", commands=commands)
    assert re.search(r"\nCommands:\n  a *\n  b", CliRunner().invoke(plain, ["--help"]).output)


@pytest.mark.parametrize("command", COMMANDS)
def test_many_options_stand_under_headings(command):
    headings = re.findall(r"^(\S.*):$", command.get_help(context(command)), re.MULTILINE)
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert len(headings) > 1 or len(options) <= 8


def test_help_does_not_wait_for_tensorflow():
    """Neither the list of commands nor the help of any command; and what is imported besides is not much."""
    code = """
import sys
from tfpfl.cli import main
for words in [[], *([name] for name in main.commands), ["run", "--partition", "dirichlet"]]:
    try:
        main([*words, "--help"], standalone_mode=False)
    except SystemExit:
        pass
print(len(sys.modules), *sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    count, *modules = told.splitlines()[-1].split()
    assert "reproduce" in told and "--tau" not in told and "--partition-alpha" in told
    heavy = {"tensorflow", "tensorflow_datasets", "keras", "sklearn", "scipy", "matplotlib", "ray", "rich"}
    assert heavy.isdisjoint(modules) and int(count) < 450


def test_the_help_of_run_takes_a_hyperparameter_before_it():
    told = CliRunner().invoke(main, ["run", "--tau", "5", "--help"])
    assert told.exit_code == 0 and "--tau INTEGER" in told.output
