"""compare, sweep, report, reproduce: several runs."""

from pathlib import Path
from shlex import quote

import click

from tfpfl.cli.group import main
from tfpfl.cli.options import RUN_NAMES, Picture, RunCommand, data_arguments, run_options, value_of


@main.command(cls=RunCommand)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option("--algorithms", metavar="A,B,...", help="Train these first, in OUT; what is there is continued.")
@click.option("--seeds", default="0", show_default=True, metavar="S,T,...", help="Of the runs to train.")
@click.option("--set", "settings", multiple=True, metavar="A.NAME=VALUE", help="A hyperparameter of one of them.")
@click.option("--protocol", default="EV-all", show_default=True, help="Of the numbers; see docs/protocols.md.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/compare"), show_default=True)
@click.option("--write", multiple=True, type=click.Path(path_type=Path), help="The table: FILE.csv, .md or .tex.")
@click.option("--plot", type=Picture(path_type=Path), help="Accuracy over rounds, with bands over seeds.")
@run_options
def compare(folders, algorithms, seeds, settings, protocol, out, write, plot, allow_download, **kw):
    """Compare algorithms on one federation. Same split, cohorts, batches and initial weights.

    Runs that are there, RUN..., or algorithms to train with --algorithms.
    """
    from rich.console import Console

    from tfpfl import compare as comparing
    from tfpfl import evaluation
    from tfpfl.algorithms import check_names
    from tfpfl.callbacks import Progress
    from tfpfl.record import Record
    from tfpfl.run import RunConfig
    from tfpfl.tables import comparison_over_clients

    wanted, console = evaluation.protocol(protocol), Console()
    for path in write:
        if path.suffix[1:] not in comparing.FORMATS:
            raise click.UsageError(f"--write {path}: a table is written as .{', .'.join(comparing.FORMATS)}")
    names = algorithms.split(",") if algorithms else []
    if not folders and not names:
        raise click.UsageError("nothing to compare: give run folders, or --algorithms")
    hyper = {name: {} for name in names}
    for setting in settings:
        whose, _, value = setting.partition("=")
        algorithm, _, what = whose.partition(".")
        if algorithm not in hyper or not what or not value:
            raise click.UsageError(f"--set {setting}: write ALGORITHM.NAME=VALUE, of one of --algorithms")
        check_names(algorithm, None, {what: value})
        hyper[algorithm][what] = value_of(value)
    common = {name: kw[name] for name in RUN_NAMES} | data_arguments(kw)
    try:
        drawn = [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--seeds takes numbers with commas between, found {seeds!r}") from error
    configs = [
        RunConfig(algorithm=name, hyperparameters=hyper[name], seed=seed, **common) for seed in drawn for name in names
    ]
    trained = comparing.run_all(
        configs, out, callbacks=lambda label: [Progress(label.ljust(24), console)], allow_download=allow_download
    )
    records = [Record.read(folder) for folder in (*folders, *trained)]
    table = comparing.rows(records, wanted)
    console.print(comparison_over_clients(table, wanted))
    for path in write:
        path.write_text(comparing.text(table, path.suffix[1:], wanted))
    if plot:
        from tfpfl.plots import curves

        curves(records).savefig(plot)


@main.command(cls=RunCommand)
@click.option("--algorithm", default="pflego", show_default=True, help="See `tfpfl algorithms`.")
@click.option("--grid", multiple=True, metavar="NAME=A,B,...", help="Every combination of these.")
@click.option("--random", multiple=True, metavar="NAME=LOW:HIGH", help="Drawn log-uniformly.")
@click.option("--draws", type=click.IntRange(1), default=8, show_default=True, help="Of --random.")
@click.option(
    "--halving", default=1, show_default=True, metavar="K", help="Give a Kth of the settings K times the rounds."
)
@click.option("--seed", default=0, show_default=True, help="Of the runs and of --random.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/sweep"), show_default=True)
@run_options
def sweep(algorithm, grid, random, draws, halving, seed, out, allow_download, **kw):
    """Search hyperparameters on validation examples. Others are options as in `run`."""
    from rich.console import Console

    from tfpfl import sweep as searching
    from tfpfl.callbacks import Progress
    from tfpfl.run import RunConfig
    from tfpfl.tables import rungs

    values, ranges = {}, {}
    for text, into in [(t, values) for t in grid] + [(t, ranges) for t in random]:
        name, _, given = text.partition("=")
        parts = given.split("," if into is values else ":")
        if not name or not given or into is ranges and len(parts) != 2:
            raise click.UsageError(f"{text!r}: write NAME=A,B,... for --grid and NAME=LOW:HIGH for --random")
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
    settings = searching.grid(values) if values else searching.draws(ranges, draws, seed)
    console = Console()
    found = searching.sweep(
        config,
        settings,
        out,
        factor=halving,
        callbacks=lambda label: [Progress(label, console)],
        allow_download=allow_download,
    )
    console.print(rungs(found, config))


@main.command()
@click.argument("name", required=False)
@click.option("--scale", type=click.Choice(["smoke", "laptop", "full"]), default="laptop", show_default=True)
@click.option("--only", multiple=True, metavar="WORD", help="Only cells with this in their name; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), help="Instead of the scale's.")
@click.option("--seeds", type=click.IntRange(1), help="Instead of the scale's.")
@click.option("--minutes", type=float, help="Begin no cell after so many.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/reproduce"), show_default=True)
@click.option("--ledger", type=click.Path(path_type=Path), help="Default: ledger.json in OUT.")
@click.option("--plot", type=Picture(path_type=Path), help="Draw what was run of NAME into this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the ledger of all experiments as Markdown.")
@click.option("--no-run", is_flag=True, help="Only show what is in the ledger.")
@click.option("--allow-download", is_flag=True, help="Let TFDS download a data set that is not there.")
def reproduce(name, plot, write, no_run, rounds, seeds, out, ledger, **kw):
    """Run a paper's table or figure again, and say what agrees. Without NAME: list them.

    Interrupt it when you like: the same command goes on where it was.
    """
    from rich.console import Console
    from rich.table import Column, Table

    from tfpfl import papers
    from tfpfl.callbacks import Progress
    from tfpfl.papers import ledger as ledgers

    console, ledger = Console(), ledger or out / "ledger.json"
    if name is not None:
        papers.experiment(name)  # refuses what there is not
    if name is None:
        table = Table(Column("name", no_wrap=True), "what", f"rounds x seeds: {', '.join(papers.SCALES)}")
        for key, e in (papers.EXPERIMENTS | papers.FIGURES).items():
            sizes = ", ".join(f"{e.sizes[s].rounds} x {e.sizes[s].seeds}" for s in papers.SCALES) if e.cells else "-"
            table.add_row(key, f"{e.source}: {e.title}", sizes)
        console.print(table)
    elif not no_run:
        size = papers.experiment(name).sizes[kw["scale"]]
        size = size._replace(rounds=rounds or size.rounds, seeds=seeds or size.seeds)
        shown = f"tfpfl reproduce {name} --scale {kw['scale']}" + "".join(f" --only {quote(w)}" for w in kw["only"])
        shown += (f" --rounds {rounds}" if rounds else "") + (f" --seeds {seeds}" if seeds else "")
        papers.reproduce(
            name,
            out=out,
            ledger=ledger,
            size=size,
            command=shown,
            callbacks=lambda label: [Progress(label, console)],
            tell=console.print,
            **kw,
        )
    if name in papers.FIGURES:
        console.print(ledgers.picture_table(name, ledgers.load(ledger).get(name, {})))
    elif name is not None:
        cells = ledgers.load(ledger).get(name, {})
        console.print(ledgers.table(name, cells))
        for text, column, held in ledgers.verdicts(papers.experiment(name), cells):
            if held != "open":
                console.print(f"{column}: {text}: [bold]{held}[/]", soft_wrap=True)
    if name is not None and plot:
        papers.draw(name, out, kw["scale"]).savefig(plot)
    if write:
        written = ledgers.notes(ledger.with_name(ledger.stem + "_notes.toml"))
        write.write_text(ledgers.markdown(ledgers.load(ledger), written))


@main.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--title", help="The heading; default: algorithms and data set.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    help="Compare client by client with this algorithm; default local, fedavg_ft.",
)
@click.option("--allow-different-data", is_flag=True, help="Put runs on different data side by side anyway.")
def report(folders, out, title, baselines, allow_different_data):
    """Compare run folders on one HTML page. It needs no network: tables, curves, fairness, costs, commands.

    Runs that differ in their seed alone are one row, with intervals over the seeds.
    """
    from tfpfl.algorithms import algorithm_row
    from tfpfl.record import Record
    from tfpfl.report import BASELINES, write_report

    for name in baselines:
        algorithm_row(name)  # refuses an unknown one
    options = {"title": title, "baselines": baselines or BASELINES, "allow_different_data": allow_different_data}
    click.echo(f"Written to {write_report([Record.read(folder) for folder in folders], out, **options)}")
