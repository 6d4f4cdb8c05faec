"""The commands run, resume, evaluate, new-clients and demo, which make a run or read one."""

import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from shlex import quote

import click

from tfpfl.checks import InvalidArgument
from tfpfl.cli.ending import resumable
from tfpfl.cli.given import data_arguments, hyperparameters_of, options_given
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, OneOf, SectionedCommand
from tfpfl.cli.options import (
    PICTURE,
    RunCommand,
    allow_code_of,
    allow_code_of_run,
    allow_code_option,
    config_option,
    download_option,
    log_option,
    log_tables_option,
    machine_options,
    machines_of,
    open_run,
    trackers_of,
    with_options,
)
from tfpfl.runs.options import DATA_NAMES, OPTIONS


@main.command(cls=RunCommand)
@with_options([*map(config_option, OPTIONS), allow_code_option, download_option, *machine_options])
@with_options([log_option, log_tables_option])
@click.option("--create-only", is_flag=True, help="Make the run folder and train nothing yet, for tfpfl serve.")
@click.option("--out", type=PATH, help="The run folder to make. Default: runs/ALGORITHM-DATASET-sSEED.")
def run(out, create_only, allow_code, allow_download, workers, address, deadline, isolate, logs, log_tables, **kw):
    """Train a method and write a run folder.

    The hyperparameters of the method are options too: `tfpfl run --algorithm fedavg --help` shows those of FedAvg. So
    are the arguments of the partition, which stand at the end of this help.
    """
    from tfpfl.data.places import is_places
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.federations import open_federation
    from tfpfl.runs.run import Run

    if create_only and (unused := options_given({"logs", "log_tables", "workers", "address", "deadline", "isolate"})):
        raise click.UsageError(
            f"{', '.join(unused)}: a run folder does not keep what is for the training alone, and --create-only trains "
            "nothing. Leave it out here, and give it to tfpfl resume"
        )
    machines, trackers = machines_of(kw["engine"], workers, address, deadline, isolate), trackers_of(logs, log_tables)
    data = data_arguments(kw)
    names = {f.name for f in fields(RunConfig)} & kw.keys() - {*DATA_NAMES, "federation"}
    hyper = hyperparameters_of(kw["algorithm"], kw["preset"], kw)
    config = RunConfig(**{k: kw[k] for k in names}, hyperparameters=hyper, **data)
    dataset = config.dataset if config.federation is None else Path(config.federation).name
    out = out or Path("runs") / f"{config.short_name}-{dataset.replace('/', '-')}-s{config.seed}"
    if allow_code:
        allow_code_of(config.network)
    opened = None
    if machines.workers:  # check this before the run folder is made
        opened = open_federation(config, allow_download=allow_download)
        _require_workers(machines, opened)
    if machines.address:
        from tfpfl.engines.ray.engine import connect

        connect(machines)
    made = not out.exists()
    with Run.create(config, out, opened, allow_download=allow_download) as run:
        run.machines = machines
        if create_only:
            folder = quote(str(run.folder))
            click.echo(f"Written to {run.folder}. For rounds on devices: tfpfl serve {folder}")
            if not is_places(run.federation):
                click.echo(f"To train it on this machine: tfpfl resume {folder} (then it cannot be served any more)")
        else:
            _train_new(run, trackers, made)


def _train_new(run, trackers, made):
    """Trains a run that was created here. If its first round fails, what the creation made is removed.

    So the same command runs again after the user has mended a method, which the folder has a copy of. The folder stays
    if training diverged, if machines were lost, or if the store cannot be written.

    Args:
        run: the run.
        trackers: the callbacks of --log.
        made: whether its folder was not there before.
    """
    from tfpfl.engines.machines import MachinesError
    from tfpfl.runs.folders import remove_new
    from tfpfl.runs.store import StoreError
    from tfpfl.runs.training import DivergedError

    try:
        _train_and_print(run, trackers)
    except (click.exceptions.Exit, DivergedError, MachinesError, StoreError):
        raise
    except Exception:
        if run.store.round_num == 0:  # while it is locked
            with suppress(OSError):  # the error that is being raised says more
                remove_new(run.folder, made)
        raise


def _require_workers(machines, federation):
    from tfpfl.engines.tff.worker import require_tff
    from tfpfl.engines.tff.workers import workers_of

    require_tff()
    workers_of(machines).require(federation)


def _train_and_print(run, trackers):
    from rich.console import Console

    from tfpfl.runs.callbacks import Progress

    console = Console()
    with resumable(f"tfpfl resume {quote(str(run.folder))}", lambda: f"{run.store.round_num} rounds are saved"):
        run.train([Progress(run.config.title, console), *trackers])
    _print_run(run, console)


def _print_run(run, console):
    from tfpfl.studies.tables import metrics, protocols

    found = [r for r in run.results() if r.when != "last"]
    console.print(protocols(found, f"{run.folder}", run.seen_counts))
    if table := metrics(found, f"{run.folder}: other metrics"):
        console.print(table)
    _print_stop(run)
    if private := run.privacy:
        click.echo(f"epsilon = {private.epsilon:.3g} at delta = {private.delta:.2g}: {private.text}")
    click.echo(f"Written to {run.folder}")


def _print_stop(run):
    if run.stop_reason:
        click.echo(f"Stopped after round {run.store.round_num} of {run.config.rounds}: {run.stop_reason}.")


@main.command()
@click.argument("folder", type=PATH)
@click.option(
    "--rounds",
    type=int,
    help="Number of rounds that the run shall have in the end; a larger number than before extends it. Default: the "
    "number it was started with.",
)
@with_options([allow_code_option, *machine_options, log_option, log_tables_option])
def resume(folder, rounds, allow_code, logs, log_tables, **where):
    """Continue the run in FOLDER as if it had never stopped."""
    from tfpfl.runs.config import read_config

    trackers = trackers_of(logs, log_tables)
    machines = machines_of(read_config(folder).engine, **where)  # before the new number of rounds is saved
    with open_run(folder, allow_code, rounds=rounds) as run:
        run.machines = machines
        done = run.store.round_num
        for name, (then, now) in run.changed_versions.items():
            print(f"{name} was {then} and is {now}: the last bits of the numbers may differ", file=sys.stderr)
        _train_and_print(run, trackers)
        if run.store.round_num == done and not run.stop_reason:  # more rounds do not extend what patience ended
            click.echo(f"Nothing was left to do: the run ended with round {done}. --rounds extends it.")


@main.command()
@click.argument("folder", type=PATH)
@allow_code_option
def evaluate(folder, allow_code):
    """Evaluate all clients of the run in FOLDER. Prints this, then the results from during the run."""
    from rich.console import Console

    from tfpfl.runs import protocols as evaluation
    from tfpfl.studies.tables import metrics, protocols

    with open_run(folder, allow_code, engine="local") as run:
        done = run.store.round_num
        if done == 0:
            raise InvalidArgument(
                f"{folder} has no rounds yet, so there is nothing to evaluate: train it with `tfpfl resume {folder}`"
            )
        found = evaluation.results(run.evaluate(), run.took_part, run.config.score)
        now = [r for r in found if r.when == "last"]
        console, counts = Console(), run.seen_counts
        console.print(protocols(now, f"{folder}: all clients after round {done}", counts))
        if table := metrics(now, f"{folder}: other metrics"):
            console.print(table)
        console.print(protocols([r for r in run.results() if r.when != "last"], f"{folder}: while it ran", counts))
        _print_stop(run)


@main.command(
    "new-clients",
    cls=SectionedCommand,
    headings={"Adaptation": ("epochs", "protocol", "eta", "batch_size"), "Results": ("split", "csv_file", "picture")},
)
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUNS...")
@click.option("--epochs", default=20, help="Number of passes over its training examples that a client adapts.")
@click.option(
    "--protocol",
    type=OneOf(["own", "global"]),
    default="own",
    help="How a client adapts. own: as its method does it. global: SGD with momentum 0.9 from the global model, the "
    "same for all methods; with mini-batches the momentum starts at 0 in every epoch.",
)
@click.option("--eta", type=float, help="Learning rate with --protocol global. Default: the eta of the run.")
@click.option(
    "--batch-size", type=int, help="Examples in each step with --protocol global. Default: the batch size of the run."
)
@click.option(
    "--split",
    type=OneOf(["test", "validation", "train"]),
    default="test",
    help="The examples of each client that score and loss are measured on.",
)
@click.option(
    "--csv",
    "csv_file",
    type=PATH,
    help="Write the scores of every client and epoch to this CSV file. Default: no file.",
)
@click.option(
    "--plot", "picture", type=PICTURE, help="Draw the mean score over epochs into this picture file. Default: no file."
)
@allow_code_option
def new_clients(runs, csv_file, picture, allow_code, **how):
    """Let clients that never trained adapt to the runs in RUNS.

    These are the clients that `tfpfl run --new-clients` kept out of training. Prints their score after each epoch.
    """
    from rich.console import Console

    from tfpfl.runs.files import check_place
    from tfpfl.runs.run import Run
    from tfpfl.studies import new_clients, plots, tables

    if allow_code:
        allow_code_of_run(*runs)
    done = []
    if csv_file:
        check_place(csv_file, ("run,protocol,",))
    new_clients.check_same_clients(runs)
    for folder in runs:
        with Run.open(folder, engine="local") as run:
            try:
                done.append(new_clients.adapt_new_clients(run, **how))
            except new_clients.CannotAdapt as error:
                click.echo(f"{folder} is left out: {error}", err=True)
    if not done:
        raise InvalidArgument("new clients cannot adapt to any of these runs; the lines above say why")
    Console().print(tables.new_clients(done))
    if csv_file:
        new_clients.write_csv(done, csv_file)
        click.echo(f"Written to {csv_file}")
    if picture:
        plots.write_picture(plots.new_clients(done), picture)
        click.echo(f"Written to {picture}")


# What `demo` shows: {folder: (title, entries of the configuration)}. Sharing pays for the first clients only.
DEMO_DATA = {
    "few": ("80 clients of 5 digits, few examples", {"clients": 80, "partition_args": {"K": 5}, "participation": 0.2}),
    "many": (
        "20 clients of 2 digits, many examples",
        {"clients": 20, "partition_args": {"K": 2}, "participation": 0.5},
    ),
}
WHEN_SHARING_PAYS = (
    "Sharing pays when a client has few examples, and other clients have examples of the same digits: the first table. "
    "When each client has enough examples of its own two digits (the second table), Local, which shares nothing, is as "
    "good as any method, and one model for all clients (FedAvg) is behind it."
)
DEMO_SETTINGS: dict[str, dict] = {"pflego": {"beta": 0.1, "rho": 0.01}, "fedavg": {"eta": 0.1}, "local": {"eta": 0.1}}


@main.command()
@click.option(
    "--out",
    type=PATH,
    default=Path("runs/demo"),
    help="The folder for the run folders; an earlier demo in it is replaced.",
)
@click.option("--rounds", default=40, help="Number of communication rounds to train each method.")
@click.option("--seed", default=0, help="Seed of the data's partition, the weights and the clients in a round.")
@click.option(
    "--engine",
    type=OneOf(["tff", "local"]),
    default="tff",
    help="What computes the rounds: TensorFlow Federated, or this process.",
)
def demo(out, rounds, seed, engine):
    """Compare PFLEGO with FedAvg and Local on digits, in two cases.

    First 80 clients have 5 digits each and few examples, then 20 clients have 2 digits each and many examples. Nothing
    is downloaded.
    """
    from rich.console import Console

    from tfpfl.studies.tables import comparison

    console, tables = Console(), []
    for name, (title, data) in DEMO_DATA.items():
        done = [
            _demo_run(out / name / algorithm, console, algorithm, rounds=rounds, seed=seed, engine=engine, **data)
            for algorithm in DEMO_SETTINGS
        ]
        tables.append(comparison(done, f"{title}: {rounds} rounds, engine {engine}, seed {seed}"))
    for table in tables[:-1]:
        table.caption = None  # one below the last table is enough
    console.print(*tables)
    console.print(WHEN_SHARING_PAYS)
    click.echo(f"Written to {out}")


def _demo_run(folder, console, algorithm, **entries):
    """Trains a run of `demo`. Returns the content of its summary.json, and its results."""
    from tfpfl.algorithms import get_method
    from tfpfl.runs.callbacks import Progress
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.folders import DEMO, remove_demo
    from tfpfl.runs.run import Run

    remove_demo(folder)
    config = RunConfig(algorithm=algorithm, hyperparameters=DEMO_SETTINGS[algorithm], **entries)
    with Run.create(config, folder) as run:
        (folder / DEMO).touch()
        run.train([Progress(f"{folder.parent.name}, {get_method(algorithm).title}".ljust(12), console)])
        return run.write_summary(), run.results()
