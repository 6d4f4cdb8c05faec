"""The commands partition, datasets, algorithms and cite."""

import os
from pathlib import Path

import click

from tfpfl.cli.group import main
from tfpfl.cli.options import (
    RunCommand,
    data_arguments,
    data_options,
    hyperparameter_texts,
    scalar_type,
    with_options,
)


@main.command(cls=RunCommand)
@click.argument("out", type=click.Path(path_type=Path))
@with_options(data_options)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the partition of the data, unless --data-seed is given."
)
def partition(out, seed, allow_download, **kw):
    """Divide a data set among clients. Writes the federation to the folder OUT.

    OUT-classes.png, beside it, shows which client has how many examples of which class.
    """
    from rich.console import Console

    from tfpfl.data import Federation, load_source
    from tfpfl.studies import plots
    from tfpfl.studies.tables import text

    data = data_arguments(kw)
    seed = seed if data["data_seed"] is None else data["data_seed"]
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
    picture = out.with_name(out.name + "-classes.png")
    plots.write_picture(plots.classes(federation), picture)
    console = Console()
    for name, value in federation.describe().items():
        console.print(f"[bold]{name}[/]: {text(value)}", soft_wrap=True)
    click.echo(f"Written to {out}, and a picture to {picture}")


@main.command()
def datasets():
    """List the data sets, and whether each is on this machine."""
    from rich.console import Console

    from tfpfl.data import list_datasets
    from tfpfl.studies.fitted_table import FittedTable

    table = FittedTable()
    for column in ("name", "example", "classes", "present"):
        table.add_column(column)
    for row in list_datasets():
        table.add_row(row["name"], str(row["shape"]), str(row["classes"]), "yes" if row["present"] else "no")
    Console().print(table)
    click.echo(f"Looked in {os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')} (TFDS_DATA_DIR).")


@main.command()
@click.argument("name", required=False)
def algorithms(name):
    """List the algorithms, or the hyperparameters of NAME."""
    from rich.console import Console

    from tfpfl.algorithms import ALGORITHMS, get_method
    from tfpfl.studies.fitted_table import FittedTable
    from tfpfl.studies.tables import text

    console = Console()
    if name is None:
        columns = ("name", "head", "message", "a client keeps", "down", "up")
        table = FittedTable(wraps=columns[3:])
        for column in columns:
            table.add_column(column)
        for key, row in ALGORITHMS.items():
            table.add_row(key, row.head, row.message, row.state, row.down, row.up)
        console.print(table)
        console.print(
            "down, up: how many numbers a client receives and sends in a round. b: weights of the backbone, h: weights "
            "of a head, d = b + h: of a whole model, I: clients."
        )
        return
    row = get_method(name)
    console.print(f"[bold]{row.title}[/]: {row.reference}", soft_wrap=True)
    table = FittedTable(wraps=["meaning"])
    for column in ("option", "type", "default", "meaning"):
        table.add_column(column)
    texts = hyperparameter_texts(name)
    for key, p in row.hyperparameters.items():
        table.add_row("--" + key.replace("_", "-"), scalar_type(p).__name__, str(p.default), text(texts.get(key, "")))
    console.print(table)
    for preset, values in row.presets.items():
        console.print(f"--preset {preset}: {values}", soft_wrap=True)


@main.command()
@click.argument("names", nargs=-1)
@click.option(
    "--run",
    "folder",
    type=click.Path(path_type=Path),
    help="Print the works behind everything that the run in this folder used.",
)
def cite(names, folder):
    """Print the BibTeX entries to cite.

    NAMES are names of algorithms, data sets and partitions, or tfpfl. Without a name, all names are listed.
    """
    from tfpfl.studies import cite

    if names and folder:
        raise click.UsageError("give names or --run, not both: --run finds the names by itself")
    if folder:
        names = cite.names_of_run(folder)
    click.echo(cite.bibtex(names) if names else cite.listing())
