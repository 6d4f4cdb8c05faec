"""The commands serve, places, replay and demo-live: live rounds, whose clients are devices that speak HTTP."""

import sys
from contextlib import ExitStack
from pathlib import Path

import click

from tfpfl.checks import Unavailable, extra
from tfpfl.cli.ending import resumable
from tfpfl.cli.given import options_given
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, POSITIVE, Between, SectionedCommand
from tfpfl.cli.options import allow_code_option, open_run, payload_option, quorum_option

SERVE = {  # heading of the help -> options
    "Where": ("host", "port", "tls", "web"),
    "Rounds": ("rounds", "cohort", "deadline", "quorum", "wait_for", "payload", "buffer", "staleness"),
    "Secure aggregation": ("secure", "threshold", "clip", "phase"),
    "Who may take part": ("new_token", "revoke", "joins", "max_norm", "most_examples", "data_for_devices"),
}


class Buffer(click.ParamType):
    """The text buffer=K of `--async`: the number of updates after which the server takes a step."""

    name = "buffer=K"

    def convert(self, value, param, ctx):
        """The number K of a text buffer=K."""
        name, _, size = str(value).partition("=")
        if name != "buffer" or not size.isascii() or not size.isdigit() or not 1 <= int(size[:9]) <= 10**6:
            self.fail(f"it is written buffer=K, such as buffer=5: the server steps at every K updates; found {value!r}")
        return int(size)


@main.command(cls=SectionedCommand, headings=SERVE)
@click.argument("folder", metavar="RUN", type=PATH)
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8443,
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
    "--cohort",
    metavar="N|LOW-HIGH",
    help="How many clients a round invites, a number or a range. Only before round 1. Default: as RUN says.",
)
@click.option(
    "--deadline",
    type=POSITIVE,
    default=60.0,
    help="Seconds from the invitation to the end of a round, and for the scores of an evaluated one.",
)
@quorum_option
@click.option(
    "--wait-for",
    type=click.IntRange(1),
    default=1,
    help="Number of clients that must have joined before a round opens.",
)
@click.option("--max-norm", type=POSITIVE, help="Refuse a gradient with a larger L2 norm. Default: no limit.")
@payload_option
@click.option(
    "--async",
    "buffer",
    type=Buffer(),
    metavar="buffer=K",
    help="Asynchronous rounds: each device works at its own speed, and the server steps at every K updates.",
)
@click.option(
    "--staleness",
    type=click.IntRange(0),
    help="With --async: refuse an update if the server has made more steps than this since its theta.  [default: 1000]",
)
@click.option("--secure", is_flag=True, help="The server learns only the sum of the updates; docs/secure.md says how.")
@click.option(
    "--secure-threshold",
    "threshold",
    type=Between(0.5, 1, max_open=True),
    help="With --secure: a client's masks are opened if more than this part of its neighbours answers.  [default: 0.5]",
)
@click.option(
    "--secure-clip",
    "clip",
    type=POSITIVE,
    help="With --secure: a device scales a gradient with a larger L2 norm down to this norm.  [default: 100]",
)
@click.option(
    "--secure-phase",
    "phase",
    type=POSITIVE,
    help="With --secure: seconds that devices have for each of the three messages after a visit.  [default: 20]",
)
@click.option(
    "--joins", type=click.IntRange(1), default=30, help="Number of devices that may join from one address in a minute."
)
@click.option(
    "--most-examples",
    type=click.IntRange(1),
    default=100_000,
    help="In a run on places: refuse a device that says that it has more training examples than this.",
)
@click.option(
    "--new-token",
    type=click.IntRange(0),
    multiple=True,
    metavar="CLIENT",
    help="Give the client of this number another token: the old one, and the device that joined with it, are refused.",
)
@click.option(
    "--revoke",
    type=click.IntRange(0),
    multiple=True,
    metavar="CLIENT",
    help="Refuse the token and device of the client of this number from now on; --new-token takes it in again.",
)
@click.option("--rounds", type=click.IntRange(1), help="A new total number of rounds. Default: that of the run.")
@click.option(
    "--data-for-devices", type=PATH, help="Write the examples of each client into a folder of its own in PATH."
)
@click.option(
    "--web",
    type=PATH,
    metavar="DIR",
    help="Also serve the page with which browser tabs join: web/dist, or what python -m tflite_export web wrote.",
)
@allow_code_option
def serve(folder, host, port, tls, rounds, cohort, new_token, revoke, data_for_devices, web, allow_code, **rules):
    """Run the rounds of RUN on devices over HTTP.

    RUN is a run folder, made by: tfpfl run --create-only. The enrolment tokens of its clients are written to
    RUN/tokens.json, which only you can read: give each device its own. A server that is stopped or killed goes on from
    its last update when it is started again.
    """
    try:
        from tfpfl.live.cohort import as_it_was, with_cohort
        from tfpfl.live.rules import Rules
        from tfpfl.live.serve import TOKENS, serve, write_data
        from tfpfl.live.watch import operator_token
        from tfpfl.live.watching import OPERATOR
    except ModuleNotFoundError as error:
        raise Unavailable(f"live rounds need the package {error.name}: {extra('live')}") from error
    from tfpfl.data.places import is_places

    if host not in ("127.0.0.1", "::1", "localhost") and not tls:
        raise click.UsageError(
            f"other machines reach {host}: give --tls CERT KEY, so that nobody reads or changes rounds"
        )
    if both := sorted(set(new_token) & set(revoke)):
        raise click.UsageError(f"client {both[0]}: give --revoke or --new-token, not both")
    if rules["buffer"] is not None and options_given({"quorum"}):
        raise click.UsageError("--quorum belongs to cohorts, and with --async there are none: the buffer ends a step")
    if rules["buffer"] is None and rules["staleness"] is not None:
        raise click.UsageError("--staleness belongs to --async buffer=K: elsewhere all updates are of one theta")
    named = {"threshold": "--secure-threshold", "clip": "--secure-clip", "phase": "--secure-phase"}
    if alone := [option for name, option in named.items() if rules[name] is not None and not rules["secure"]]:
        raise click.UsageError(f"{alone[0]} belongs to --secure")
    rules = {name: value for name, value in rules.items() if name not in ("staleness", *named) or value is not None}
    how = Rules(**rules, awake=max(90.0, rules["deadline"]))
    with as_it_was(folder) as begins, ExitStack() as opened:
        run = opened.enter_context(open_run(folder, allow_code, rounds=rounds))
        if cohort is not None:
            run = opened.enter_context(with_cohort(run, cohort))
        if options_given({"most_examples"}) and not is_places(run.federation):
            raise click.UsageError(f"--most-examples is for runs on places: the server knows the sizes in {folder}")
        if data_for_devices is not None and is_places(run.federation):
            raise click.UsageError(f"{folder} is a run on places: only the devices have their data")
        if data_for_devices is not None:
            for client in map(int, run.population.client_ids):
                write_data(run.federation, run.population, client, data_for_devices / str(client))

        def started(address):
            begins()
            click.echo(f"Listening on {address}; tokens in {folder / TOKENS}; round {run.store.round_num + 1} is next.")
            # The token opens the page for whoever reads it: it is shown on a terminal, and not written to a log.
            token = f"#{operator_token(folder)}" if sys.stdout.isatty() else f" (the token is in {folder / OPERATOR})"
            click.echo(f"Who is here, who is late: tfpfl watch {address} --run {folder}, or {address}/watch{token}")

        def saved():
            return f"{run.store.round_num} {'round is' if run.store.round_num == 1 else 'rounds are'} saved"

        with resumable("the same command", saved):
            where = {"host": host, "port": port, "tls": tls or None}
            serve(run, how, **where, on_start=started, new_tokens=new_token, revoked=revoke, page=web)
        click.echo(f"{saved()} in {folder}")


@main.command()
@click.argument("out", type=PATH)
@click.option("--clients", type=click.IntRange(1), required=True, help="Largest number of devices that can join a run.")
@click.option("--shape", required=True, metavar="AxBxC", help="The shape of an example, such as 28x28x1 for an image.")
@click.option("--classes", required=True, metavar="C|A,B,...", help="How many classes there are, or all their names.")
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "int32", "float32"]),
    default="uint8",
    help="The numbers of an example before a device preprocesses it.",
)
@click.option("--scale", type=float, help="Devices multiply examples by this. Default: 1/255 of uint8, 1 of others.")
@click.option("--shift", type=float, default=0.0, help="Devices then add this to all numbers.")
def places(out, clients, shape, classes, **how):
    """Make places for devices whose data nobody has.

    Writes a federation to the folder OUT that says what an example and a label are, and nothing of the clients. A run
    on it, made by: tfpfl run --federation OUT --create-only, is for tfpfl serve. A device says how many examples and
    classes it has when it joins.
    """
    from tfpfl.data.places import make_places

    parts = shape.lower().split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise click.UsageError(f"--shape is written like 28x28x1, found {shape!r}")
    number = classes.isascii() and classes.isdigit() and len(classes) < 10
    names = int(classes) if number else [name.strip() for name in classes.split(",")]
    made = make_places(out, clients=clients, example_shape=[int(part) for part in parts], class_names=names, **how)
    click.echo(f"{made.num_clients} places for devices with examples {shape} of {made.num_labels} classes: {out}")


@main.command()
@click.argument("folder", metavar="RUN", type=PATH)
@allow_code_option
def replay(folder, allow_code):
    """Compute the asynchronous rounds of RUN again from their log.

    What the devices sent is computed by the programs of their bundles, in the order of the log and without a network.
    It ends with an error if a bit of theta differs.
    """
    try:
        from tfpfl.live.async_replay import replay
    except ModuleNotFoundError as error:
        raise Unavailable(f"live rounds need the package {error.name}: {extra('live')}") from error
    with open_run(folder, allow_code) as run:
        found = replay(run)
    click.echo(
        f"{found.same_updates} of {found.updates} updates are the ones that were sent, and theta has the same bits "
        f"after {found.same_steps} of {found.steps} steps; at the end it differs by {found.away:.1e} at most."
    )
    if not found.exact:
        raise click.ClickException("the replay differs from the live run: its devices computed other bits")


@main.command("demo-live")
@click.option(
    "--out",
    type=PATH,
    default=Path("runs/demo-live"),
    help="The run folder to make; an earlier demo of this command in it is replaced.",
)
@click.option("--clients", default=4, type=click.IntRange(2, 20), help="Number of devices that take part.")
@click.option("--rounds", default=20, type=click.IntRange(1), help="Number of rounds of communication.")
@click.option("--seed", default=0, help="Seed of the data's partition, the weights and the rounds.")
def demo_live(out, clients, rounds, seed):
    """Train PFLEGO with devices on this machine.

    A server and its devices are processes, with a few digits each. The rounds are compared with a simulation. Nothing
    is downloaded, and nothing but this machine can reach the server.
    """
    import time

    from rich.console import Console

    from tfpfl.live.demo import away_from_simulation, run_live
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.folders import DEMO, remove_demo
    from tfpfl.runs.run import Run
    from tfpfl.studies.tables import protocols

    remove_demo(out)
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
        (out / DEMO).touch()
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
