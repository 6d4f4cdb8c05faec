"""The command advise, which says whether the clients of a run need heads of their own."""

import json
from pathlib import Path

import click

from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, OneOf
from tfpfl.cli.options import allow_code_option, open_run


@main.command()
@click.argument("run", type=PATH)
@click.option(
    "--split",
    type=OneOf(["validation", "test"]),
    default="validation",
    help="The held-out examples of each client that the two heads are compared on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as JSON instead of a table.")
@allow_code_option
def advise(run: Path, split: str, as_json: bool, allow_code: bool) -> None:
    """Say which clients of RUN need a head of their own.

    Each client's own head is compared with one head for all, which is fitted to the features of all clients' training
    examples on the same backbone. There is a test over clients, and one for each client.
    """
    from rich.console import Console

    from tfpfl.checks import one_line
    from tfpfl.studies.advice import advise as advice_on
    from tfpfl.studies.tables import advice

    with open_run(run, allow_code, engine="local") as opened:
        found = advice_on(opened, split)
    if as_json:
        click.echo(json.dumps(found.entries(), indent=2))
        return
    Console().print(advice(found, str(run)))
    click.echo(one_line(f"{found.sentence[:1].upper()}{found.sentence[1:]}."))
