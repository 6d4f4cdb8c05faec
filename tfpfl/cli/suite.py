"""The command suite, which asks whether personalization helps people."""

from pathlib import Path

import click

from tfpfl.cli.ending import SAME_COMMAND, resumable
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH
from tfpfl.cli.options import processes_option


@main.command()
@click.option(
    "--out",
    type=PATH,
    default=Path("runs/suite"),
    help="The folder of the suite: run folders, suite.html and suite.md.",
)
@click.option(
    "--study",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A study in place of the suite's own, such as a changed copy of suite.toml. Default: the suite's own.",
)
@processes_option
def suite(out: Path, study: Path | None, processes: int) -> None:
    """Does personalization help people, and whom?

    Trains eight methods on four data sets of people with three seeds, after the same search for every method, and
    writes one HTML page: where personalization helps, makes no difference, or hurts, with intervals; people who never
    trained, by the number of examples that they give; models on other people's data; calibration; cost. The data must
    be on this machine: `tfpfl datasets` says which are, and docs/people_data.md how to get them.

    You may interrupt it at any time: the same command continues where it stopped.
    """
    from tfpfl.checks import one_line
    from tfpfl.studies.suite import SUITE, run_suite

    with resumable(SAME_COMMAND):
        found, page = run_suite(
            out, study=study or SUITE, processes=processes, tell=lambda line: click.echo(one_line(line))
        )
    for result in found:
        for sentence in result.sentences():
            click.echo(one_line(sentence))
    click.echo(f"Written to {page} and {page.with_suffix('.md')}")
