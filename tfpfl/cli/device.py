"""The commands device and watch, which speak to the server of live rounds."""

import click

from tfpfl.checks import InvalidArgument, Unavailable, check_address_space
from tfpfl.cli.ending import Ended
from tfpfl.cli.given import options_given
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, POSITIVE, SectionedCommand

DEVICE = {  # heading of the help -> options
    "The device": ("data", "state", "token", "runtime"),
    "The server": ("patience", "ca"),
    "Updates": ("most", "half", "secure"),
}


def _of_the_server(patience: float):
    """The options on how the server is spoken to."""
    asked = click.option(
        "--patience",
        type=POSITIVE,
        default=patience,
        help="Seconds for which a server that does not answer is asked again.",
    )
    trusted = click.option("--ca", type=PATH, help="The certificate that the server's must be signed by.")
    return lambda command: asked(trusted(command))


@main.command(cls=SectionedCommand, headings=DEVICE)
@click.argument("url")
@click.option(
    "--data", type=PATH, required=True, help="The folder with train.npz, and perhaps validation.npz and test.npz."
)
@click.option("--state", type=PATH, required=True, help="Where the device keeps its key, bundle and head.")
@click.option("--token", help="The enrolment token, at the first start. Default: $TFPFL_TOKEN.")
@click.option(
    "--most",
    type=click.IntRange(1),
    help="Number of updates after which the device ends. Default: it ends with the run.",
)
@_of_the_server(patience=300.0)
@click.option("--half", is_flag=True, help="Ask for theta in half precision: half of the bytes, and less exact.")
@click.option("--secure", is_flag=True, help="Send no update that is not masked, whatever the server asks for.")
@click.option(
    "--runtime",
    type=click.Choice(["litert", "tf"]),
    default="litert",
    help="What computes the visits: the exported program on LiteRT (PFLEGO), or for other methods TensorFlow.",
)
def device(runtime, **given):
    """Take part in the live rounds of the server at URL.

    The same as: python -m tflite_export.device, which needs no TensorFlow. With --runtime tf, the device computes the
    visits of other methods, such as FedAvg, FedRep and Ditto, and keeps what they keep with a client.
    """
    from tflite_export.device.__main__ import take_part
    from tflite_export.device.errors import InvalidInput

    try:
        if runtime == "tf":
            check_address_space()
            from tfpfl.live.tf_device import TfDevice

            given["device"] = TfDevice
        take_part(**given)
    except InvalidInput as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("url")
@click.option(
    "--run", type=PATH, help="The run folder, where this is the server's machine: the operator's token is read from it."
)
@click.option(
    "--token",
    envvar="TFPFL_OPERATOR_TOKEN",
    help="The operator's token, from operator.token of the run folder. Default: $TFPFL_OPERATOR_TOKEN.",
)
@click.option("--once", is_flag=True, help="Print the present state with all clients, and end.")
@_of_the_server(patience=30.0)
def watch(url, run, token, once, patience, ca):
    """Show how live rounds go: who is here, and who is late.

    URL is the server's address. The state is read again every second, until the run is over or Ctrl-C. It is for the
    operator: tfpfl serve writes the token that it needs to RUN/operator.token.
    """
    import time

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from tflite_export.device.errors import InvalidInput
    from tflite_export.device.live.connection import trusting
    from tfpfl.live.watch_table import WatchTable
    from tfpfl.live.watching import OPERATOR, WatchedServer

    if run is not None:
        if options_given({"token"}):
            raise click.UsageError("--run reads the operator's token from RUN: give --run or --token, not both")
        if not (run / OPERATOR).exists():
            raise InvalidArgument(f"{run} has no {OPERATOR}, which tfpfl serve {run} writes when it starts")
        token = (run / OPERATOR).read_text(encoding="utf-8", errors="replace")
    try:
        context = None if ca is None else trusting(ca)
    except InvalidInput as error:
        raise Unavailable(str(error)) from error
    console = Console()

    def away(why, seconds):
        note = f"{server.url} does not answer: {why}. It is asked for another {seconds:.0f} s"
        if once:
            click.echo(note, err=True)
        else:
            live.update(WatchTable(server.last, console.height, note) if server.last else Text(note), refresh=True)

    server = WatchedServer(url, token, patience=patience, context=context, waiting=away)
    if once:
        console.print(WatchTable(server.state()))
        return
    with Live(console=console, auto_refresh=False) as live:
        try:
            while server.last is None or server.last["doing"] != "done":
                live.update(WatchTable(server.state(), console.height), refresh=True)
                time.sleep(1.0)
        except KeyboardInterrupt as end:  # Ctrl-C is how one ends this; other signals end it as any command
            if isinstance(end, Ended):
                raise
        except Unavailable:
            if server.last is None or server.last["saved"] < server.last["run"]["rounds"]:
                raise  # otherwise all rounds are saved, and so the server has ended
