"""partition, datasets, algorithms, cite."""

import os
from pathlib import Path

import click

from tfpfl.cli.group import main
from tfpfl.cli.options import RunCommand, data_arguments, data_options, scalar_type, with_options


@main.command(cls=RunCommand)
@click.argument("out", type=click.Path(path_type=Path))
@with_options(data_options)
@click.option("--seed", default=0, show_default=True)
def partition(out, seed, allow_download, **kw):
    """Make a federation folder. A picture of who has what is beside it: OUT-classes.png."""
    from rich.console import Console

    from tfpfl.data import Federation, load_source

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
    federation.plot_classes(picture)
    console = Console()
    for name, value in federation.describe().items():
        console.print(f"[bold]{name}[/]: {value}", soft_wrap=True)
    click.echo(f"Written to {out}, and a picture to {picture}")


@main.command()
def datasets():
    """List the data sets, and which are present."""
    from rich.console import Console
    from rich.table import Table

    from tfpfl.data import list_datasets

    table = Table("name", "example", "classes", "present")
    for row in list_datasets():
        table.add_row(row["name"], str(row["shape"]), str(row["classes"]), "yes" if row["present"] else "no")
    Console().print(table)
    Console().print(f"Looked in {os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')} (TFDS_DATA_DIR).")


@main.command()
@click.argument("name", required=False)
def algorithms(name):
    """List the algorithms, or the hyperparameters of one."""
    from rich.console import Console
    from rich.table import Column, Table

    from tfpfl.algorithms import ALGORITHMS, algorithm_row

    console = Console()
    if name is None:
        names = [Column(name, no_wrap=True) for name in ("name", "head", "message")]
        table = Table(*names, *(Column(name, overflow="fold") for name in ("a client keeps", "down", "up")))
        for key, row in ALGORITHMS.items():
            table.add_row(key, row.head, row.message, row.state, row.down, row.up)
        console.print(table)
        console.print("down, up: numbers that a client receives and sends in a round; b backbone, h head, d = b + h.")
        return
    row = algorithm_row(name)
    console.print(f"[bold]{row.title}[/]: {row.reference}", soft_wrap=True)
    table = Table("option", "type", "default")
    for key, p in row.hyperparameters.items():
        table.add_row("--" + key.replace("_", "-"), scalar_type(p).__name__, str(p.default))
    console.print(table)
    for preset, values in row.presets.items():
        console.print(f"--preset {preset}: {values}", soft_wrap=True)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--run", "folder", type=click.Path(path_type=Path), help="All that the run in this folder is made of.")
def cite(names, folder):
    """Print BibTeX. NAMES are of algorithms, data sets, partitions, tfpfl; without one, list what there is."""
    from tfpfl import cite

    if names and folder:
        raise click.UsageError("give names or --run, not both")
    if folder:
        names = cite.names_of_run(folder)
    click.echo(cite.bibtex(names) if names else cite.listing())
