"""The commands compare, sweep, reproduce and report, which work on several runs."""

from pathlib import Path
from shlex import quote
from typing import Any

import click

from tfpfl.cli.ending import SAME_COMMAND, resumable
from tfpfl.cli.group import main
from tfpfl.cli.layout import Names, OneOf, SectionedCommand, with_names
from tfpfl.cli.options import (
    RUN_NAMES,
    Picture,
    RunCommand,
    allow_code_of,
    allow_code_option,
    config_option,
    data_arguments,
    run_options,
    value_of,
)
from tfpfl.cli.study import columns_of
from tfpfl.runs.options import METHODS

PROTOCOLS = (
    *("EV-all", "EV-seen", "EV-unseen", "EV-local", "global", "validated"),
    *("pflego", "pgfed", "final", "fedamp", "pfllib"),
)


@main.command(
    cls=RunCommand,
    headings={
        "Runs to compare": ("algorithms", "seeds", "settings", "out"),
        "Results": ("protocol", "pairs", "write", "columns", "plot"),
    },
)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
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
    show_default=True,
    metavar="S,T,...",
    help="Seeds of the runs to train; each method is trained once with each seed. All seeds have one split of the "
    "data: that of --data-seed, or else that of the first seed.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.NAME=VALUE",
    help="A hyperparameter of one of the methods to train, such as pflego.tau=20; may be repeated. For a method of "
    "your own, A is the name of its function.",
)
@click.option(
    "--protocol",
    type=Names(PROTOCOLS),
    default="EV-all",
    show_default=True,
    help=with_names(
        "The evaluation protocol: which clients count, when, and how their accuracies are averaged. See "
        "docs/protocols.md.",
        PROTOCOLS,
    ),
)
@click.option(
    "--pairs",
    type=click.Choice(["seen", "all"]),
    default="seen",
    show_default=True,
    help="The clients that gains and tests compare one by one. seen: those that had taken part in the runs of both "
    "methods. all: also those that never took part.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/compare"),
    show_default=True,
    help="The folder for the run folders of --algorithms.",
)
@click.option(
    "--write",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Write the table to a file: FILE.csv, FILE.md or FILE.tex; may be repeated. Default: no file.",
)
@click.option(
    "--columns",
    default="accuracy,EV-local",
    show_default=True,
    metavar="A,B,...",
    help="The columns of FILE.tex; FILE.csv has all of them, with their names.",
)
@click.option(
    "--plot",
    type=Picture(path_type=Path),
    help="Draw the accuracy over rounds, with bands over seeds, into this picture file. Default: no file.",
)
@run_options
def compare(folders, algorithms, seeds, settings, protocol, pairs, out, write, plot, allow_code, allow_download, **kw):
    """Compare methods on one federation. Split, clients of each round, batches and initial weights are the same.

    Give folders of runs that are trained already (RUN...), or methods to train (--algorithms), or both.
    """
    from rich.console import Console

    from tfpfl.algorithms import check_names, method_named
    from tfpfl.runs import protocols
    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.files import write_whole
    from tfpfl.studies import comparison as comparing
    from tfpfl.studies.paper_table import latex, paper_table
    from tfpfl.studies.records import Record
    from tfpfl.studies.tables import comparison_over_clients, metrics_of_algorithms

    wanted, console = protocols.protocol(protocol), Console()
    for path in write:
        if path.suffix[1:] not in (*comparing.FORMATS, "tex"):
            endings = ", .".join((*comparing.FORMATS, "tex"))
            raise click.UsageError(f"--write {path}: a table is written as .{endings}; found {path.suffix or 'none'}")
    names = algorithms.split(",") if algorithms else []
    if not folders and not names:
        raise click.UsageError("nothing to compare: give run folders, or --algorithms with the methods to train")
    hyper: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        whose, _, value = setting.rpartition("=")
        algorithm, _, what = whose.rpartition(".")
        meant = [name for name in names if name == algorithm] or [n for n in names if _function(n) == algorithm]
        algorithm = meant[0] if len(meant) == 1 else algorithm
        if algorithm not in hyper or not what or not value:
            raise click.UsageError(
                f"--set {setting}: write ALGORITHM.NAME=VALUE, of one of --algorithms, such as pflego.tau=20"
            )
        check_names(method_named(algorithm), None, {what: value})
        hyper[algorithm][what] = value_of(value)
    common = {name: kw[name] for name in RUN_NAMES} | data_arguments(kw)
    try:
        drawn = [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--seeds takes numbers with commas between, found {seeds!r}: write 0,1,2") from error
    configs = [
        RunConfig(algorithm=name, hyperparameters=hyper[name], seed=seed, **common) for seed in drawn for name in names
    ]
    if allow_code:
        allow_code_of(kw["network"])
    with resumable(SAME_COMMAND):
        trained = comparing.compare_runs(
            configs,
            out,
            beside=folders,
            callbacks=lambda label: [Progress(label.ljust(24), console)],
            allow_download=allow_download,
        )
    records = [Record.read(folder) for folder in (*folders, *trained)]
    table, notes = comparing.rows(records, wanted, pairs=pairs), comparing.notes(records, wanted, pairs=pairs)
    console.print(comparison_over_clients(table, wanted, notes, pairs=pairs))
    if names := comparing.other_metrics(records, wanted):
        console.print(metrics_of_algorithms(table, names))
    for path in write:
        if path.suffix == ".tex":
            write_whole(path, latex(paper_table({"": table}, columns_of(kw["columns"]), wanted, more=" ".join(notes))))
        else:
            write_whole(path, comparing.text(table, path.suffix[1:], wanted, notes))
    if plot:
        from tfpfl.studies.plots import curves, write_picture

        write_picture(curves(records), plot)


@main.command(
    cls=RunCommand,
    headings={"Search": ("grid", "random", "draws", "halving", "seed"), "Results": ("out",)},
)
@config_option("algorithm")
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
@click.option(
    "--draws", type=click.IntRange(1), default=8, show_default=True, help="Number of settings that --random draws."
)
@click.option(
    "--halving",
    default=1,
    show_default=True,
    metavar="K",
    help="Successive halving: after every stage keep the best 1/K of the settings and train them K times longer. "
    "1: off.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the runs and of the values that --random draws.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/sweep"),
    show_default=True,
    help="The folder for the run folders, one for each setting.",
)
@run_options
def sweep(algorithm, grid, random, draws, halving, seed, out, allow_code, allow_download, **kw):
    """Search for good hyperparameters. Settings are ranked by accuracy on validation examples, never on test examples.

    Hyperparameters that are not searched are options, as in `tfpfl run`.
    """
    from rich.console import Console

    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.config import RunConfig
    from tfpfl.studies import search as searching
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
        into[name.replace("-", "_")] = found
    if bool(values) == bool(ranges):
        raise click.UsageError("give --grid or --random, one of the two; each may be repeated")
    hyper = {k[6:]: v for k, v in kw.items() if k.startswith("hyper_") and v is not None}
    common = {name: kw[name] for name in RUN_NAMES} | data_arguments(kw)
    config = RunConfig(algorithm=algorithm, hyperparameters=hyper, seed=seed, **common)
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


@main.command(
    cls=SectionedCommand,
    headings={
        "What is run": ("scale", "only", "rounds", "seeds", "minutes", "no_run", "allow_download"),
        "Results": ("out", "ledger", "plot", "write"),
    },
)
@click.argument("name", required=False)
@click.option(
    "--scale",
    type=OneOf(["smoke", "laptop", "full"]),
    default="laptop",
    show_default=True,
    help="How many rounds and seeds: smoke is the least, full is as in the paper. The list that `tfpfl reproduce` "
    "prints shows the numbers.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="WORD",
    help="Run only the cells of the table whose name contains this word; may be repeated. Default: all cells.",
)
@click.option("--rounds", type=click.IntRange(1), help="Number of rounds in each run. Default: what --scale says.")
@click.option("--seeds", type=click.IntRange(1), help="Number of seeds of each cell. Default: what --scale says.")
@click.option("--minutes", type=float, help="Start no further cell after this many minutes. Default: no limit.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/reproduce"),
    show_default=True,
    help="The folder for the run folders and the ledger.",
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    help="The file that keeps the results of all experiments. Default: ledger.json in OUT.",
)
@click.option(
    "--plot", type=Picture(path_type=Path), help="Draw the results of NAME into this picture file. Default: no file."
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the results of all experiments to this Markdown file. Default: no file.",
)
@click.option("--no-run", is_flag=True, help="Run nothing; only show the results that the ledger has.")
@click.option(
    "--allow-download",
    is_flag=True,
    help="Let TensorFlow Datasets download a data set that is not on this machine.",
)
@click.option(
    "--federation",
    type=click.Path(path_type=Path),
    help="Folder of a federation. The methods of the table are trained on it with the paper's hyperparameters; their "
    "numbers are not compared with the paper's. Not for figures. Default: the paper's data.",
)
@click.option(
    "--network",
    help="With --federation: the backbone of all methods, as in `tfpfl run`. Default: that of the table, or, if it has "
    "none, one that fits the examples.",
)
@allow_code_option
def reproduce(name, plot, write, no_run, rounds, seeds, out, ledger, federation, network, allow_code, **kw):
    """Run a table or figure of a paper again, and compare. NAME is the experiment; without it, all are listed.

    With --federation, the table's methods are trained on your own data, and nothing is compared with the paper.

    You may interrupt it at any time: the same command continues where it stopped.
    """
    from rich.console import Console

    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.files import write_whole
    from tfpfl.studies import papers
    from tfpfl.studies.fitted_table import FittedTable
    from tfpfl.studies.papers import ledger as ledgers
    from tfpfl.studies.papers.elsewhere import ledger_name
    from tfpfl.studies.plots import write_picture

    console, ledger = Console(), ledger or out / "ledger.json"
    own = None
    if name is not None:
        size = papers.experiment(name).sizes[kw["scale"]]  # refuses an unknown name
        size = size._replace(rounds=rounds or size.rounds, seeds=seeds or size.seeds)
    if federation is not None or network is not None:
        own, on = _own_table(name, federation, network, size if name else None, write)
        if allow_code:
            allow_code_of(network)
    elif allow_code:
        raise click.UsageError("--allow-code is for --network FILE.keras: leave it out")
    if name is None:
        columns = ("name", "what", f"rounds x seeds:\n{', '.join(papers.SCALES)}")
        table = FittedTable(wraps=columns[1:])
        for column in columns:
            table.add_column(column)
        for key, e in (papers.EXPERIMENTS | papers.FIGURES).items():
            sizes = ", ".join(f"{e.sizes[s].rounds} x {e.sizes[s].seeds}" for s in papers.SCALES) if e.cells else "-"
            table.add_row(key, f"{e.source}: {e.title}", sizes)
        console.print(table)
    elif not no_run:
        shown = f"tfpfl reproduce {name} --scale {kw['scale']}" + "".join(f" --only {quote(w)}" for w in kw["only"])
        shown += (f" --rounds {rounds}" if rounds else "") + (f" --seeds {seeds}" if seeds else "")
        shown += f" --federation {quote(str(federation))}" if own else ""
        shown += f" --network {quote(network)}" if network else ""
        with resumable(SAME_COMMAND):
            papers.reproduce(
                name,
                out=out,
                ledger=ledger,
                size=size,
                command=shown,
                callbacks=lambda label: [Progress(label, console)],
                tell=lambda text: console.print(text, soft_wrap=True),
                federation=on if own else None,
                network=network,
                **kw,
            )
    if name in papers.FIGURES:
        console.print(ledgers.picture_table(name, ledgers.load(ledger).get(name, {})))
    elif own:
        cells = ledgers.load(ledger).get(ledger_name(name, on), {})
        console.print(ledgers.table(name, cells, experiment=own))
    elif name is not None:
        cells = ledgers.load(ledger).get(name, {})
        console.print(ledgers.table(name, cells))
        for text, column, held in ledgers.verdicts(papers.experiment(name), cells):
            if held != "open":
                console.print(f"{column}: {text}: [bold]{held}[/]", soft_wrap=True)
    if name is not None and plot:
        write_picture(papers.draw(name, out, kw["scale"], own), plot)
    if write:
        written = ledgers.notes(ledger.with_name(ledger.stem + "_notes.toml"))
        write_whole(write, ledgers.markdown(ledgers.load(ledger), written))


def _own_table(name, federation, network, size, write):
    """The table `name` on a federation of the user's, and the federation.

    Raises:
        click.UsageError: an option is missing, or cannot be together with --federation.
    """
    from tfpfl.data import Federation
    from tfpfl.studies import papers

    if federation is None:
        raise click.UsageError("--network goes with --federation: a paper's own data are trained with its own network")
    if name is None:
        raise click.UsageError("--federation needs NAME, the table whose methods are trained on it")
    if write:
        raise click.UsageError("--write has the papers' results: leave it out, as --federation compares with no paper")
    opened = Federation.load(federation)
    return papers.table_on(name, opened, size, network), opened


@main.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The HTML file to write.",
)
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
        if ":" in name:
            raise click.UsageError(f"--baseline {name}: none of the runs is of this method")
        get_method(name)  # refuses an unknown name
    options = {"title": title, "baselines": baselines or BASELINES, "allow_different_data": allow_different_data}
    click.echo(f"Written to {write_report(records, out, **options)}")


def _function(name: str) -> str:
    """What --set calls a method: the function of a method of the user's own, else the name."""
    return name.rpartition(":")[2]
