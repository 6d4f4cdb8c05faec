"""The command flower: writes a Flower app that runs the rounds of a run on Flower's nodes."""

import click

from tfpfl.checks import Unavailable, extra
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, POSITIVE, SectionedCommand
from tfpfl.cli.options import allow_code_option, open_run, payload_option, quorum_option

FLOWER = {  # heading of the help -> options
    "Files": ("out", "data_for_devices"),
    "Rounds": ("wait_for", "deadline", "quorum", "patience", "payload", "max_norm"),
}


@main.command(cls=SectionedCommand, headings=FLOWER)
@click.argument("folder", metavar="RUN", type=PATH)
@click.option("--out", type=PATH, required=True, help="The new folder for the files of the app.")
@click.option(
    "--wait-for",
    type=click.IntRange(1),
    help="Number of clients that must have come before a round opens. Default: all.",
)
@click.option(
    "--deadline",
    type=POSITIVE,
    default=600.0,
    help="Seconds from the invitation to the end of a round, and for the scores of an evaluated one.",
)
@quorum_option
@payload_option
@click.option("--max-norm", type=POSITIVE, help="Refuse a gradient with a larger L2 norm. Default: no limit.")
@click.option(
    "--patience", type=POSITIVE, default=120.0, help="Seconds after which a node that has not answered is asked again."
)
@click.option(
    "--data-for-devices", type=PATH, help="Write the examples of each client into a folder of its own in PATH."
)
@allow_code_option
def flower(folder, out, wait_for, patience, data_for_devices, allow_code, **rules):
    """Write a Flower app for the rounds of RUN.

    RUN is a run folder, made by: tfpfl run --create-only. The app has a ServerApp around the run's own server step, and
    a ClientApp around the device of live rounds, which keeps its head in a file. Flower itself is not needed here.
    """
    try:
        from tfpfl.live.flower import next_steps, write_app
        from tfpfl.live.rules import Rules
        from tfpfl.live.serve import write_data
    except ModuleNotFoundError as error:
        raise Unavailable(f"live rounds need the package {error.name}: {extra('live')}") from error
    with open_run(folder, allow_code) as run:
        ids = [int(i) for i in run.population.client_ids]
        write_app(run, out, Rules(**rules, wait_for=wait_for or len(ids)), patience)
        if data_for_devices is not None:
            for client in ids:
                write_data(run.federation, run.population, client, data_for_devices / str(client))
        click.echo(next_steps(run, out))
