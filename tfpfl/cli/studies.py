"""The commands compare, sweep and report, which work on several runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tfpfl.cli.ending import SAME_COMMAND, resumable
from tfpfl.cli.given import data_arguments, hyperparameters_of, options_given, value_of
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, Names, OneOf, with_names
from tfpfl.cli.options import PICTURE, RUN_NAMES, SEARCH_NAMES, RunCommand, allow_code_of, config_option, run_options
from tfpfl.cli.study import names_in
from tfpfl.runs.options import DATA_NAMES, METHODS

PROTOCOLS = (
    *("EV-all", "EV-seen", "EV-unseen", "EV-local", "global", "validated"),
    *("pflego", "pgfed", "final", "fedamp", "pfllib"),
)


# How the tables begin that `compare` writes; another file of the same ending may be the user's own.
_BEGINS = {"csv": "algorithm,seeds,rounds,", "md": "| algorithm ", "tex": "% Written by tfpfl"}


@main.command(
    cls=RunCommand,
    headings={
        "Runs to compare": ("algorithms", "seeds", "settings", "out"),
        "Results": ("protocol", "pairs", "write", "columns", "plot"),
    },
)
@click.argument("folders", nargs=-1, type=PATH, metavar="[RUN]...")
@click.option(
    "--algorithms",
    type=Names(METHODS, many=True),
    metavar="A,B,...",
    help=with_names(
        "Train these methods before they are compared, each in a run folder in OUT. Runs that are there already are "
        "continued. A method of your own is written as for `tfpfl run --algorithm`. Default: none.",
        METHODS,
    ),
)
@click.option(
    "--seeds",
    default="0",
    metavar="S,T,...",
    help="Seeds of the runs to train; each method is trained once with each seed. All seeds have one split of the "
    "data: that of --data-seed, or else that of the runs that are there already, or else that of the first seed.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.NAME=VALUE",
    help="A hyperparameter of one of the methods to train, such as pflego.tau=20; may be repeated. For a method of "
    "your own, A is what stands after the colon.",
)
@click.option(
    "--protocol",
    type=Names(PROTOCOLS),
    default="EV-all",
    help=with_names(
        "The evaluation protocol: which clients count, when, and how their scores are averaged. See docs/protocols.md.",
        PROTOCOLS,
    ),
)
@click.option(
    "--pairs",
    type=OneOf(["seen", "all"]),
    default="seen",
    help="The clients that gains and tests compare one by one. seen: those that had taken part in the runs of both "
    "methods. all: also those that never took part.",
)
@click.option("--out", type=PATH, default=Path("runs/compare"), help="The folder for the run folders of --algorithms.")
@click.option(
    "--write",
    multiple=True,
    type=PATH,
    help="Write the table to a file: FILE.csv, FILE.md or FILE.tex; may be repeated. Default: no file.",
)
@click.option(
    "--columns",
    default="score,EV-local",
    metavar="A,B,...",
    help="The columns of FILE.tex, with score for the accuracy, or what the score is called; FILE.csv has all of them, "
    "with their names.",
)
@click.option(
    "--plot",
    type=PICTURE,
    help="Draw the score over rounds, with the model, clients and mean of --protocol and bands over seeds, into this "
    "picture file. Default: no file.",
)
@run_options(RUN_NAMES)
def compare(folders, algorithms, seeds, settings, protocol, pairs, out, write, plot, allow_code, allow_download, **kw):
    """Compare methods on one federation. Split, clients of each round, batches and initial weights are the same.

    Give folders of runs that are trained already (RUN...), or methods to train (--algorithms), or both.
    """
    from rich.console import Console

    from tfpfl.algorithms import check_names, method_named
    from tfpfl.runs import protocols
    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.files import check_place, write_whole
    from tfpfl.studies import comparison as comparing
    from tfpfl.studies.paper_tables import latex, paper_table
    from tfpfl.studies.records import Record
    from tfpfl.studies.run_groups import check_comparable, check_different
    from tfpfl.studies.tables import comparison_over_clients, metrics_of_algorithms

    wanted, console = protocols.protocol(protocol), Console()
    for path in write:
        if path.suffix[1:] not in _BEGINS:
            endings = ", .".join(_BEGINS)
            raise click.UsageError(f"--write {path}: a table is written as .{endings}; found {path.suffix or 'none'}")
        check_place(path, (_BEGINS[path.suffix[1:]],))
    names = list(names_in(algorithms or ""))
    if not folders and not names:
        raise click.UsageError("nothing to compare: give run folders, or --algorithms with the methods to train")
    if not names and (flags := options_given({"settings", "seeds", *RUN_NAMES, *DATA_NAMES, "federation"})):
        raise click.UsageError(f"{', '.join(flags)}: for the methods of --algorithms, which is not given: leave it out")
    if not names and options_given({"out"}):
        raise click.UsageError("--out is for the runs of --algorithms, which is not given; --write names a file")
    if wanted.clients != "all" and options_given({"pairs"}):
        raise click.UsageError(
            f"--pairs is for protocols over all clients, and --protocol {protocol} is over {wanted.clients} ones, "
            "which are the pairs: leave --pairs out"
        )
    hyper: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        whose, _, value = setting.rpartition("=")
        algorithm, _, what = whose.rpartition(".")
        meant = [name for name in names if name == algorithm] or [n for n in names if _function(n) == algorithm]
        algorithm = meant[0] if len(meant) == 1 else algorithm
        if algorithm not in hyper or not what or not value:
            there = ", ".join(map(_function, names))
            raise click.UsageError(
                f"--set {setting}: write ALGORITHM.NAME=VALUE, such as pflego.tau=20. ALGORITHM may be one of "
                f"--algorithms, here {there}"
            )
        check_names(method_named(algorithm), None, {what: value})
        if what in hyper[algorithm]:
            raise click.UsageError(f"--set {algorithm}.{what} is there twice: a run has one value. Leave one out")
        hyper[algorithm][what] = value_of(value)
    common = {name: kw[name] for name in RUN_NAMES} | data_arguments(kw)
    try:
        drawn = [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--seeds takes numbers with commas between, found {seeds!r}: write 0,1,2") from error
    configs = [
        RunConfig(algorithm=name, hyperparameters=hyper[name], seed=seed, **common) for seed in drawn for name in names
    ]
    given = [Record.read(folder) for folder in folders]
    methods = {config.algorithm for config in [*(record.config for record in given), *configs]}
    if options_given({"pairs"}) and methods.isdisjoint(comparing.BASELINES):
        raise click.UsageError(
            f"--pairs is for gains over {' or '.join(comparing.BASELINES)}, and none of the methods is one: leave "
            "--pairs out"
        )
    columns = names_in(kw["columns"])
    comparing.check_columns(columns, [*(record.config for record in given), *configs])
    if options_given({"columns"}) and not any(path.suffix == ".tex" for path in write):
        raise click.UsageError("--columns says what FILE.tex has: give --write FILE.tex")
    check_comparable(given)
    check_different(given)
    if allow_code:
        allow_code_of(kw["network"])
    with resumable(SAME_COMMAND):
        trained = comparing.compare_runs(
            configs,
            out,
            beside=folders,
            protocol=wanted,
            callbacks=lambda label: [Progress(label.ljust(24), console)],
            allow_download=allow_download,
        )
    records = [*given, *map(Record.read, trained)]
    table, notes = comparing.rows(records, wanted, pairs=pairs), comparing.notes(records, wanted, pairs=pairs)
    console.print(comparison_over_clients(table, wanted, notes, pairs=pairs))
    if names := comparing.other_metrics(records, wanted):
        console.print(metrics_of_algorithms(table, names))
    for path in write:
        if path.suffix == ".tex":
            gains = any(column.startswith(("gain", "worse", "p ", "pairs")) for column in columns)
            shown = comparing.notes(records, wanted, pairs=pairs, gains=gains)
            write_whole(path, latex(paper_table({"": table}, columns, wanted, more=" ".join(shown))))
        else:
            write_whole(path, comparing.text(table, path.suffix[1:], wanted, notes))
    if plot:
        from tfpfl.studies.plots import curves, write_picture

        write_picture(curves(records, protocol=wanted), plot)


@main.command(cls=RunCommand, headings={"Search": ("grid", "random", "draws", "halving", "seed"), "Results": ("out",)})
@config_option("algorithm")
@config_option("preset")
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME=A,B,...",
    help="The values of a hyperparameter to try; may be repeated, and then every combination is tried.",
)
@click.option(
    "--random",
    multiple=True,
    metavar="NAME=LOW:HIGH",
    help="A range of a hyperparameter to draw values from, uniformly on the logarithmic scale; may be repeated.",
)
@click.option("--draws", type=click.IntRange(1), default=8, help="Number of settings that --random draws.")
@click.option(
    "--halving",
    type=click.IntRange(1),
    default=1,
    metavar="K",
    help="Successive halving: after every stage keep the best 1/K of the settings and train them K times longer. "
    "1: off.",
)
@click.option("--seed", default=0, help="Seed of the runs and of the values that --random draws.")
@click.option(
    "--out", type=PATH, default=Path("runs/sweep"), help="The folder for the run folders, one for each setting."
)
@run_options(SEARCH_NAMES)
def sweep(algorithm, preset, grid, random, draws, halving, seed, out, allow_code, allow_download, **kw):
    """Search for good hyperparameters. Settings are ranked by the score on validation examples, never on test examples.

    Hyperparameters that are not searched are options, as in `tfpfl run`.
    """
    from rich.console import Console

    from tfpfl.checks import one_line
    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.command import command
    from tfpfl.runs.config import RunConfig
    from tfpfl.studies import search as searching
    from tfpfl.studies.records import Record
    from tfpfl.studies.tables import rungs

    values: dict[str, Any] = {}
    ranges: dict[str, Any] = {}
    for text, into in [(t, values) for t in grid] + [(t, ranges) for t in random]:
        name, _, given = text.partition("=")
        parts = given.split("," if into is values else ":")
        if not name or not given or into is ranges and len(parts) != 2:
            raise click.UsageError(
                f"{text!r}: write NAME=A,B,... for --grid and NAME=LOW:HIGH for --random, such as beta=0.001:0.1"
            )
        try:
            found = [value_of(p) for p in parts] if into is values else tuple(map(float, parts))
        except ValueError as error:
            raise click.UsageError(f"--random takes two numbers, found {text!r}") from error
        name = name.replace("-", "_")
        if name in values or name in ranges:
            raise click.UsageError(f"{name} is searched twice: write all of its values into one --grid")
        into[name] = found
    if bool(values) == bool(ranges):
        raise click.UsageError("give --grid or --random, one of the two; each may be repeated")
    if not ranges and options_given({"draws"}):
        raise click.UsageError("--draws is for --random: --grid tries every combination")
    hyper = hyperparameters_of(algorithm, preset, kw)
    if both := [f"--{name.replace('_', '-')}" for name in (*values, *ranges) if name in hyper]:
        raise click.UsageError(f"{', '.join(both)} is searched, so that its option is not used: leave it out")
    common = {name: kw[name] for name in SEARCH_NAMES} | data_arguments(kw)
    config = RunConfig(algorithm=algorithm, preset=preset, hyperparameters=hyper, seed=seed, **common)
    known = config.method.hyperparameters
    for name in ranges:
        if name in known and known[name].annotation not in (float, float | None):
            raise click.UsageError(
                f"--random draws numbers such as 7.23, which {name} cannot be: use --grid {name}=A,B"
            )
    if allow_code:
        allow_code_of(kw["network"])
    settings = searching.grid(values) if values else searching.draws(ranges, draws, seed)
    console = Console()
    with resumable(SAME_COMMAND):
        found = searching.search_hyperparameters(
            config,
            settings,
            out,
            factor=halving,
            callbacks=lambda label: [Progress(label, console)],
            allow_download=allow_download,
        )
    console.print(rungs(found, config))
    good = searching.ranked(found)
    if not good:
        raise click.ClickException("every setting diverged: try smaller learning rates")
    best = good[0]
    diverged = searching.about_the_diverged((c.hyperparameters, c.rounds, c.score) for stage in found for c in stage)
    tried = [c.hyperparameters for c in found[0]]
    for sentence in [*diverged, *searching.about_the_edge(best.hyperparameters, tried)]:
        click.echo(one_line(sentence))
    # A search with more rounds may have continued the run, and the best of an earlier stage has fewer.
    winner = replace(Record.read(best.folder).config, evaluate_every=config.evaluate_every, rounds=config.rounds)
    click.echo(f"The best setting again:\n  {command(winner, best.folder, out=Path('runs') / best.folder.name)}")


@main.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default=Path("report.html"), help="The HTML file to write.")
@click.option("--title", help="The heading of the page. Default: the names of the methods and of the data set.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    type=Names(METHODS),
    help=with_names(
        "A method that the others are compared with, client by client; may be repeated. Default: local and fedavg_ft.",
        METHODS,
    ),
)
@click.option(
    "--allow-different-data",
    is_flag=True,
    help="Put runs side by side although their data differ, which is refused otherwise.",
)
def report(folders, out, title, baselines, allow_different_data):
    """Write one HTML page that compares runs. It has tables, curves, fairness, costs and the commands of the runs.

    RUN... are run folders; those that differ only in their seed are one row, with intervals over seeds. The page loads
    nothing from a network.
    """
    from tfpfl.algorithms import get_method
    from tfpfl.studies.records import Record
    from tfpfl.studies.report import BASELINES, write_report

    records = [Record.read(folder) for folder in folders]
    baselines = [Path(name).name for name in baselines]  # of dir/mine.py:mine, what configurations call it
    for name in set(baselines) - {record.config.algorithm for record in records}:
        if ":" not in name:
            get_method(name)  # refuses an unknown name
        raise click.UsageError(f"--baseline {name}: none of the runs is of this method")
    options = {"title": title, "baselines": baselines or BASELINES, "allow_different_data": allow_different_data}
    click.echo(f"Written to {write_report(records, out, **options)}")


def _function(name: str) -> str:
    """What --set calls a method: the function of a method of the user's own, else the name."""
    return name.rpartition(":")[2]
