"""The command reproduce, which runs tables and figures of papers again."""

from pathlib import Path
from shlex import quote

import click

from tfpfl.cli.ending import SAME_COMMAND, resumable
from tfpfl.cli.given import options_given
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, POSITIVE, OneOf, SectionedCommand
from tfpfl.cli.options import PICTURE, allow_code_of, allow_code_option, download_option


@main.command(
    cls=SectionedCommand,
    headings={
        "What is run": ("scale", "only", "rounds", "seeds", "first_seed", "minutes", "no_run"),
        "Results": ("out", "ledger", "add", "plot", "over", "write"),
        "Data": ("federation",),
        "Model": ("network",),
    },
)
@click.argument("name", required=False)
@click.option(
    "--scale",
    type=OneOf(["smoke", "laptop", "full"]),
    default="laptop",
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
@click.option(
    "--first-seed",
    type=click.IntRange(0),
    default=0,
    help="The first of the seeds, so that several machines can have different ones.",
)
@click.option("--minutes", type=POSITIVE, help="Start no further cell after this many minutes. Default: no limit.")
@click.option("--out", type=PATH, default=Path("runs/reproduce"), help="The folder for the run folders and the ledger.")
@click.option(
    "--ledger", type=PATH, help="The file that keeps the results of all experiments. Default: ledger.json in OUT."
)
@click.option(
    "--add",
    type=PATH,
    multiple=True,
    help="Add the results of this ledger too, such as that of another machine; may be repeated. Where both have a "
    "result, that with more rounds stays. Default: none.",
)
@click.option("--plot", type=PICTURE, help="Draw the results of NAME into this picture file. Default: no file.")
@click.option(
    "--over",
    type=OneOf(["rounds", "seconds", "flops", "bytes"]),
    multiple=True,
    help="With --plot: what the curves are drawn over; may be repeated. Default: rounds.",
)
@click.option(
    "--write", type=PATH, help="Write the results of all experiments to this Markdown file. Default: no file."
)
@click.option("--no-run", is_flag=True, help="Run nothing; only show the results that the ledger has.")
@download_option
@click.option(
    "--federation",
    type=PATH,
    help="Folder of a federation. The methods of the table are trained on it with the paper's hyperparameters; their "
    "numbers are not compared with the paper's. Not for figures. Default: the paper's data.",
)
@click.option(
    "--network",
    help="With --federation: the backbone of all methods, as in `tfpfl run`. Default: that of the table, or, if it has "
    "none, one that fits the examples.",
)
@allow_code_option
def reproduce(name, plot, over, write, no_run, rounds, seeds, out, ledger, add, federation, network, allow_code, **kw):
    """Run a table or figure of a paper again, and compare. NAME is the experiment; without it, all are listed.

    With --federation, the table's methods are trained on your own data, and nothing is compared with the paper.

    You may interrupt it at any time: the same command continues where it stopped.
    """
    from rich.console import Console

    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.files import check_place, write_whole
    from tfpfl.studies import papers
    from tfpfl.studies.fitted_table import FittedTable
    from tfpfl.studies.papers import equal_cost, ledger_tables
    from tfpfl.studies.papers import ledger as ledgers
    from tfpfl.studies.papers.elsewhere import ledger_name
    from tfpfl.studies.plots import write_picture

    if name is None:
        unused = options_given({"plot", "over", "minutes", "rounds", "seeds", "first_seed", "scale", "only"})
        if unused:
            raise click.UsageError(f"{', '.join(unused)}: say of which experiment, as in tfpfl reproduce NAME")
    if no_run and (unused := options_given({"minutes", "rounds", "allow_download"})):
        raise click.UsageError(f"{', '.join(unused)}: for runs, and --no-run runs nothing: leave it out")
    if over and not plot:
        raise click.UsageError("--over says what --plot draws over: give --plot FILE, too")
    if write:
        check_place(write, ("# Reproduction",))
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
    for other in add:
        console.print(f"{ledgers.add(ledger, other)} results of {other} are new", soft_wrap=True)
    if name is None:
        columns = ("name", "what", f"rounds x seeds:\n{', '.join(papers.SCALES)}")
        table = FittedTable(wraps=columns[1:])
        table.add_columns(*columns)
        for key, e in (papers.EXPERIMENTS | papers.FIGURES).items():
            sizes = ", ".join(f"{e.sizes[s].rounds} x {e.sizes[s].seeds}" for s in papers.SCALES) if e.cells else "-"
            table.add_row(key, f"{e.source}: {e.title}", sizes)
        console.print(table)
    elif not no_run:
        shown = f"tfpfl reproduce {name} --scale {kw['scale']}" + "".join(f" --only {quote(w)}" for w in kw["only"])
        shown += (f" --rounds {rounds}" if rounds else "") + (f" --seeds {seeds}" if seeds else "")
        shown += f" --first-seed {kw['first_seed']}" if kw["first_seed"] else ""
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
        console.print(ledger_tables.picture_table(name, ledgers.load(ledger).get(name, {})))
    elif own:
        cells = ledgers.load(ledger).get(ledger_name(name, kw["scale"], on, network), {})
        console.print(ledger_tables.table(name, cells, experiment=own))
    elif name is not None:
        part = ledgers.part(name, kw["scale"])
        cells = ledgers.load(ledger).get(part, {})
        console.print(ledger_tables.table(name, cells, kw["scale"]))
        if (compared := equal_cost.table(papers.experiment(name), cells)) is not None:
            console.print(compared)
        for line in ledger_tables.order_lines(papers.experiment(name), cells, "") if part == name else ():
            console.print(line, soft_wrap=True)
    if name is not None and plot:
        drawn = range(kw["first_seed"], kw["first_seed"] + size.seeds) if seeds or kw["first_seed"] else None
        write_picture(papers.draw(name, out, kw["scale"], own, over or ("rounds",), kw["only"], drawn), plot)
    if write:
        written = ledgers.notes(ledger.with_name(ledger.stem + "_notes.toml"))
        write_whole(write, ledger_tables.markdown(ledgers.load(ledger), written))


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
