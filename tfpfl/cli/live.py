"""The commands serve and device: live rounds, in which the clients are devices that speak HTTP."""

from pathlib import Path

import click

from tfpfl.checks import Unavailable
from tfpfl.cli.ending import resumable
from tfpfl.cli.group import main
from tfpfl.cli.layout import SectionedCommand
from tfpfl.cli.options import allow_code_of, allow_code_option

_seconds = click.FloatRange(0, 1e6, min_open=True)


SERVE = {  # heading of the help -> options
    "Where": ("host", "port", "tls", "web"),
    "Rounds": ("rounds", "deadline", "quorum", "wait_for", "payload"),
    "Who may take part": ("new_token", "revoke", "joins", "max_norm", "data_for_devices"),
}


@main.command(cls=SectionedCommand, headings=SERVE)
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8443,
    show_default=True,
    help="The TCP port that the server listens on; 0 takes any that is free.",
)
@click.option(
    "--tls",
    nargs=2,
    type=click.Path(path_type=Path, exists=True),
    metavar="CERT KEY",
    help="PEM files of the certificate and its key, for https. Needed on every other address than 127.0.0.1.",
)
@click.option(
    "--deadline",
    type=_seconds,
    default=60.0,
    show_default=True,
    help="Seconds from the invitation to the end of a round, and for the scores of an evaluated one.",
)
@click.option(
    "--quorum",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.6,
    show_default=True,
    help="The part of the invited clients that must have come for a round to end at its deadline.",
)
@click.option(
    "--wait-for",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Open no round before so many clients have joined.",
)
@click.option("--max-norm", type=_seconds, help="Refuse a gradient with a larger L2 norm. Default: take all.")
@click.option(
    "--payload",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="How devices send gradients; int8 is smaller and less exact.",
)
@click.option(
    "--joins",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="So many devices may join from one address in a minute.",
)
@click.option(
    "--new-token",
    type=click.IntRange(0),
    multiple=True,
    metavar="CLIENT",
    help="Give this client another token: the old one, and the device that joined with it, are refused.",
)
@click.option(
    "--revoke",
    type=click.IntRange(0),
    multiple=True,
    metavar="CLIENT",
    help="Refuse this client's token and device from now on; --new-token takes the client in again.",
)
@click.option("--rounds", type=click.IntRange(1), help="A new total number of rounds. Default: that of the run.")
@click.option(
    "--data-for-devices", type=click.Path(path_type=Path), help="Write each client's examples to a folder here."
)
@click.option(
    "--web",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also serve the page with which browser tabs join: web/dist, or what python -m tflite_export web wrote.",
)
@allow_code_option
def serve(folder, host, port, tls, rounds, new_token, revoke, data_for_devices, web, allow_code, **rules):
    """Run the rounds of RUN on devices over HTTP.

    RUN is a run folder, made by: tfpfl run --create-only. The enrolment tokens of its clients are written to
    RUN/tokens.json, which only you can read: give each device its own. A server that is stopped or killed goes on from
    its last update when it is started again.
    """
    try:
        from tfpfl.live.rules import Rules
        from tfpfl.live.serve import TOKENS, serve, write_data
    except ModuleNotFoundError as error:
        raise Unavailable(f"live rounds need the package {error.name}: pip install 'tfpfl[live]'") from error
    from tfpfl.runs.run import Run

    if host not in ("127.0.0.1", "::1", "localhost") and not tls:
        raise click.UsageError(
            f"other machines reach {host}: give --tls CERT KEY, so that nobody reads or changes rounds"
        )
    if both := sorted(set(new_token) & set(revoke)):
        raise click.UsageError(f"client {both[0]}: give --revoke or --new-token, not both")
    how = Rules(**rules, awake=max(90.0, rules["deadline"]))
    if allow_code:
        allow_code_of(folder)
    with Run.open(folder, rounds=rounds) as run:
        if data_for_devices is not None:
            for client in map(int, run.population.client_ids):
                write_data(run.examples, run.population, client, data_for_devices / str(client))

        def started(address):
            click.echo(f"Listening on {address}; tokens in {folder / TOKENS}; round {run.store.round_num + 1} is next.")

        with resumable(f"tfpfl serve {folder}", lambda: f"{run.store.round_num} rounds are saved"):
            where = {"host": host, "port": port, "tls": tls or None}
            serve(run, how, **where, on_start=started, new_tokens=new_token, revoked=revoke, page=web)
        click.echo(f"{run.store.round_num} rounds are saved in {folder}")


@main.command()
@click.argument("url")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="The folder with train.npz and test.npz.")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    required=True,
    help="Where the device keeps its key, bundle and head.",
)
@click.option("--token", help="The enrolment token, at the first start. Default: $TFPFL_TOKEN.")
@click.option("--most", type=click.IntRange(1), help="End after so many updates. Default: when the run is over.")
@click.option(
    "--patience", type=_seconds, default=300.0, show_default=True, help="Seconds for which the server may be away."
)
@click.option("--ca", type=click.Path(path_type=Path), help="The certificate that the server's must be signed by.")
def device(**given):
    """Take part in the live rounds of the server at URL.

    The same as: python -m tflite_export.device, which needs no TensorFlow.
    """
    from tflite_export.device.__main__ import take_part
    from tflite_export.device.errors import InvalidInput

    try:
        take_part(**given)
    except InvalidInput as error:
        raise click.ClickException(str(error)) from error


@main.command("demo-live")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/demo-live"),
    show_default=True,
    help="The run folder to make.",
)
@click.option(
    "--clients", default=4, show_default=True, type=click.IntRange(2, 20), help="Number of devices that take part."
)
@click.option(
    "--rounds", default=20, show_default=True, type=click.IntRange(1), help="Number of rounds of communication."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the data's partition, the weights and the rounds.")
def demo_live(out, clients, rounds, seed):
    """Train PFLEGO with devices on this machine.

    A server and its devices are processes, with a few digits each. The rounds are compared with a simulation. Nothing
    is downloaded, and nothing but this machine can reach the server.
    """
    import shutil
    import time

    from rich.console import Console

    from tfpfl.live.demo import away_from_simulation, run_live
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run
    from tfpfl.studies.tables import protocols

    if (out / "demo").exists():
        shutil.rmtree(out)
    config = RunConfig(
        hyperparameters={"beta": 0.1, "rho": 0.01},
        dataset="digits",
        partition_args={"K": 3},
        clients=clients,
        participation=0.5,
        rounds=rounds,
        seed=seed,
        evaluate_every=5,
    )
    with Run.create(config, out):
        (out / "demo").touch()  # a later demo may replace this folder
    started = time.monotonic()
    click.echo(f"A server and {clients} devices run {rounds} rounds; logs are in {out}")
    run_live(out, "--wait-for", str(clients))
    click.echo(f"All rounds took {time.monotonic() - started:.0f} s, with the start of all processes.")
    away = away_from_simulation(out)
    with Run.open(out) as run:
        found = [r for r in run.results() if r.when != "last"]
        Console().print(protocols(found, f"{out}: a live run of {clients} devices", run.seen_counts))
    click.echo(
        f"The same rounds in a simulation: theta differs by {away.theta:.1e} at most, heads by {away.heads:.1e}."
    )
