"""The command study, which runs a study that is described in a file."""

from pathlib import Path
from typing import Any

import click

from tfpfl.cli.ending import SAME_COMMAND, resumable
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH
from tfpfl.cli.options import allow_code_of, allow_code_option, download_option, processes_option


def names_in(text: str) -> tuple[str, ...]:
    """The names of an option's value 'A,B,...', such as columns or methods."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@main.command()
@click.argument("file", type=PATH)
@click.option(
    "--out",
    type=PATH,
    help="The folder of the study: run folders, tables and a log. Default: runs/study-NAME for NAME.toml.",
)
@processes_option
@click.option(
    "--columns",
    default="score",
    metavar="A,B,...",
    help="The columns of table.md and table.tex for each data set: score, and others by the names that `tfpfl compare "
    "--write FILE.csv` writes.",
)
@allow_code_option
@download_option
def study(file: Path, out: Path | None, processes: int, columns: str, allow_code: bool, allow_download: bool) -> None:
    """Run a study of methods, data sets and seeds from one FILE.

    FILE is TOML or YAML. A search for hyperparameters may be part of it.

    Every entry is checked before anything is run. The winner of the search is chosen on validation examples alone, and
    then trained with all seeds. You may interrupt it at any time: the same command continues where it stopped.
    docs/studies.md describes the file, and what is written into OUT.
    """
    from rich.console import Console

    from tfpfl.checks import one_line
    from tfpfl.studies.paper_tables import terminal
    from tfpfl.studies.study.file import Study
    from tfpfl.studies.study.run import run_study

    if allow_code:
        checked = Study.read(file)
        sections: list[dict[str, Any]] = [checked.run, *(data.entries for data in checked.data)]
        sections += [method.entries for method in checked.methods]
        named = {str(s["network"]) for s in sections if str(s.get("network", "")).endswith(".keras")}
        allow_code_of(*sorted(named)) if named else allow_code_of(None)
    out = out or Path("runs") / f"study-{file.stem}"
    wanted = names_in(columns)
    with resumable(SAME_COMMAND):
        results = run_study(
            file,
            out,
            processes=processes,
            columns=wanted,
            tell=lambda line: click.echo(one_line(line)),
            allow_download=allow_download,
        )
    if any(results.by_data.values()):
        Console().print(terminal(results.table(wanted), results.study.title))
    for cell in results.cells:
        for line in [*results.said(cell), *results.ends(cell)]:
            click.echo(one_line(line))
        for line in results.commands(cell)[:1]:
            click.echo(f"  {line}")
    click.echo(f"Written to {out}: {', '.join(path.name for path in results.files)}")
    for note in results.notes:
        click.echo(one_line(note))
    if not any(results.by_data.values()) and not results.failures:
        raise click.ClickException("no method came to its end with all seeds: the lines above say why")
    if results.failures:
        raise click.ClickException(
            f"{len(results.failures)} runs failed; they are named above. The same command tries them again"
        )
