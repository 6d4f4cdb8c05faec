"""The commands partition, datasets, algorithms and cite."""

import os
from functools import partial

import click

from tfpfl.cli.given import data_arguments, options_given, refuse_other_data
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, OneOf, SectionOption
from tfpfl.cli.options import RunCommand, data_options, hyperparameter_texts, scalar_type, with_options

_table_option = partial(click.option, cls=SectionOption, section="A table of your own")
table_options = [
    _table_option(
        "--from",
        "table",
        metavar="FILE",
        help="A table with a row for each example: FILE.csv (in UTF-8, the first line names the columns) or "
        "FILE.parquet. It replaces the data set and its partition. Default: none.",
    ),
    _table_option(
        "--client", metavar="COLUMN", help="With --from: the column that names the client of each row. Needed."
    ),
    _table_option(
        "--label",
        "labels",
        metavar="COLUMN",
        multiple=True,
        help="With --from: the column of the label, a whole number or a name. Needed. With --targets it may be given "
        "several times, once for each output.",
    ),
    _table_option(
        "--targets",
        type=OneOf(("real", "count", "binary")),
        help="With --from: the label is no class but a number: real (any finite one), count (0 or more) or binary (0 "
        "or 1 for each output). Default: classes.",
    ),
    _table_option(
        "--features",
        metavar="A,B,...",
        help="With --from: the columns of the features, all numeric; they are not standardized. Default: all columns "
        "but those of the client, the label and the split.",
    ),
    _table_option(
        "--split",
        metavar="COLUMN",
        help="With --from: the column that says train, validation or test. Default: no column; --test-fraction and "
        "--validation say how many examples are set aside.",
    ),
    _table_option(
        "--test-fraction",
        type=float,
        default=0.25,
        help="With --from: the fraction of each client's examples that is set aside for test, if there is no --split.",
    ),
    _table_option(
        "--compact-labels",
        is_flag=True,
        help="With --from: number the whole-number labels that occur anew, from 0 on. Otherwise a label that no "
        "example has keeps its place, and a warning says so.",
    ),
]


def _all_have_validation(table: str, client: str, split: str) -> bool:
    """Whether every client of a table has validation rows. Columns that the table lacks are refused later."""
    from tfpfl.data.arrays import as_text
    from tfpfl.data.columns import table_columns

    columns = table_columns(table, [client, split])
    if not {client, split} <= set(columns):
        return False
    named, parts = ([as_text(value, f"column {name!r}") for value in columns[name]] for name in (client, split))
    return set(named) == {name for name, part in zip(named, parts, strict=True) if part == "validation"}


@main.command(cls=RunCommand)
@click.argument("out", type=PATH)
@with_options(data_options)
@with_options(table_options)
@click.option("--seed", default=0, help="Seed of the partition of the data, unless --data-seed is given.")
def partition(
    out, seed, allow_download, table, client, labels, targets, features, split, test_fraction, compact_labels, **kw
):
    """Divide a data set among clients. Writes the federation to the folder OUT.

    With --from, the data are a table of your own, and one of its columns says to which client a row belongs.

    OUT-classes.png, beside it, shows which client has how many examples of which class; targets that are numbers have
    none.
    """
    from rich.console import Console

    from tfpfl.data import Federation, load_source
    from tfpfl.studies import plots
    from tfpfl.studies.fitted_table import text

    beside = out if out.name else out.resolve()  # "." has no name
    if not beside.name:
        raise click.UsageError(f"{out} is the root of all folders: name a folder to make")
    picture = beside.with_name(beside.name + "-classes.png")
    if picture.is_dir():  # said before the federation is there, which is not written twice
        raise click.UsageError(f"the picture of the classes goes to {picture}, which is a folder: take another OUT")
    seed = seed if kw["data_seed"] is None else kw["data_seed"]
    if table is not None:
        refuse_other_data("--from", besides=("validation", "data_seed"))
        if split is not None and options_given({"test_fraction"}):
            raise click.UsageError("--test-fraction is for a table without --split: leave one of the two out")
        if client is None or not labels:
            raise click.UsageError("--from needs --client COLUMN and --label COLUMN")
        if split is not None and options_given({"validation"}) and _all_have_validation(table, client, split):
            raise click.UsageError(
                f"--validation is for clients without validation rows, and column {split!r} has some for every client: "
                "leave it out"
            )
        federation = Federation.from_table(
            table,
            client=client,
            label=labels[0] if len(labels) == 1 else labels,
            targets=targets,
            features=None if features is None else [name.strip() for name in features.split(",")],
            split=split,
            compact_labels=compact_labels,
            validation=kw["validation"],
            test_fraction=test_fraction,
            seed=seed,
            out=out,
        )
    else:
        named = {"--client": client, "--label": labels or None, "--features": features, "--split": split}
        for flag, given in (named | {"--targets": targets}).items():
            if given is not None:
                what = "says what a column of a table is" if flag == "--targets" else "names a column of a table"
                raise click.UsageError(f"{flag} {what}: give the table with --from FILE")
        if unused := options_given({"test_fraction", "compact_labels"}):
            raise click.UsageError(
                f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} for a table: give it with --from FILE. "
                "The arguments of a partition stand at the end of --help"
            )
        data = data_arguments(kw)
        source = load_source(data["dataset"], allow_download=allow_download, **({"seed": seed} | data["source"]))
        federation = Federation.build(
            source,
            data["partition"],
            clients=data["clients"],
            seed=seed,
            validation=data["validation"],
            out=out,
            **data["partition_args"],
        )
    drawn = federation.targets is None or federation.targets.sort == "binary"  # numbers have no classes to draw
    if drawn:
        plots.write_picture(plots.classes(federation), picture)
    console = Console()
    for name, value in federation.describe().items():
        console.print(f"[bold]{name}[/]: {text(value)}", soft_wrap=True)
    click.echo(f"Written to {out}" + (f", and a picture to {picture}" if drawn else ""))


@main.command()
def datasets():
    """List the data sets, and whether each is on this machine."""
    from rich.console import Console

    from tfpfl.data import list_datasets
    from tfpfl.studies.fitted_table import FittedTable

    table = FittedTable()
    table.add_columns("name", "example", "classes", "natural clients", "present")
    for row in list_datasets():
        numbers = [str(row["classes"] or "numbers"), str(row["clients"] or "-")]
        table.add_row(row["name"], str(row["shape"]), *numbers, "yes" if row["present"] else "no")
    Console().print(table)
    click.echo(f"Looked in {os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')} (TFDS_DATA_DIR).")
    people = os.environ.get("TFPFL_PEOPLE")
    if people:
        click.echo(f"Data of people were looked for in {people} (TFPFL_PEOPLE).")
    else:
        click.echo(
            "Data of people are looked for in the folder TFPFL_PEOPLE, which is not set; see docs/people_data.md."
        )


@main.command()
@click.argument("name", required=False)
def algorithms(name):
    """List the algorithms, or the hyperparameters of NAME.

    NAME may also be a method of your own, as for `tfpfl run --algorithm`; this runs its code.
    """
    from rich.console import Console

    from tfpfl.algorithms import ALGORITHMS, method_named
    from tfpfl.algorithms.own import offered
    from tfpfl.studies.fitted_table import FittedTable, text

    console = Console()
    if name is None:
        columns = ("name", "head", "message", "a client keeps", "down", "up")
        table = FittedTable(wraps=columns[3:])
        table.add_columns(*columns)
        for key, row in ALGORITHMS.items():
            table.add_row(key, row.head, row.message, row.state, row.down, row.up)
        console.print(table)
        console.print(
            "down, up: how many numbers a client receives and sends in a round. b: weights of the backbone, h: weights "
            "of a head, d = b + h: of a whole model, n: those of the backbone that stay with the client, M: features, "
            "C: classes, I: clients."
        )
        for key, package in offered().items():
            console.print(f"{text(key)}: offered by the installed package {text(package)}", soft_wrap=True)
        return
    row = method_named(name)
    begins = row.reference.startswith(row.title) and not row.reference[len(row.title) :][:1].isalnum()
    about = row.reference.removeprefix(row.title) if begins else f": {row.reference}"  # both may be of one docstring
    console.print(f"[bold]{text(row.title)}[/]{text(about)}", soft_wrap=True)
    table = FittedTable(wraps=["meaning"])
    table.add_columns("option", "type", "default", "meaning")
    texts = hyperparameter_texts(row)
    for key, p in row.hyperparameters.items():
        table.add_row("--" + key.replace("_", "-"), scalar_type(p).__name__, str(p.default), text(texts.get(key, "")))
    console.print(table)
    for preset, values in row.presets.items():
        console.print(f"--preset {preset}: {values}", soft_wrap=True)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--run", "folder", type=PATH, help="Print the works behind everything that the run in this folder used.")
def cite(names, folder):
    """Print the BibTeX entries to cite.

    NAMES are names of algorithms, data sets and partitions, or tfpfl. Without a name, all names are listed.
    """
    from tfpfl.checks import one_line
    from tfpfl.studies import cite

    if names and folder:
        raise click.UsageError("give names or --run, not both: --run finds the names by itself")
    if folder:
        names = cite.names_of_run(folder)
        if own := cite.method_without_work(folder):
            click.echo(f"{one_line(own)} is not a method of tfpfl: cite its own source besides these works", err=True)
    click.echo(cite.bibtex(names) if names else cite.listing())
