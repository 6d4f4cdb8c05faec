"""The command line: run, resume, evaluate, report, partition, datasets, algorithms, demo.

TensorFlow is imported only by the commands that need it, so that `--help` answers at once.
"""

import logging
import os
import sys
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import get_args

import click
from click.core import ParameterSource

from tfpfl.names import unknown

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow starts; inherited by TFF's worker
logging.getLogger("tensorflow").setLevel(logging.ERROR)


class _Group(click.Group):
    """Errors that are ours end in one line; anything else is a bug and keeps its trace."""

    def parse_args(self, ctx, args):
        ctx.ensure_object(dict)["trace"] = "--trace" in args  # wherever it stands
        return super().parse_args(ctx, [a for a in args if a != "--trace"])

    def resolve_command(self, ctx, args):
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(unknown("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, RuntimeError) as error:
            ours = type(error).__module__.startswith(("tfpfl", "builtins"))
            if not ours or ctx.obj["trace"]:
                raise
            raise click.ClickException(" ".join(str(error).split())) from error


class _RunCommand(click.Command):
    """Adds the hyperparameters of the algorithm, if there is one, and the arguments of the partitioner as options."""

    def parse_args(self, ctx, args):
        algorithm, partition = _value_of(args, "--algorithm", "pflego"), _value_of(args, "--partition", "round_robin")
        own = {flag for p in self.params for flag in p.opts}
        extra = _partition_options(partition)
        if "--algorithm" in own:
            extra = _hyperparameter_options(algorithm) + extra
        self._extra = [option for option in extra if option.opts[0] not in own]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = ", ".join(o.opts[0] for o in self._extra)
            near = get_close_matches(error.option_name, [o for p in self.get_params(ctx) for o in p.opts], n=1)
            hint = f" did you mean {near[0]}?" if near else ""
            whose = f"{algorithm} and of partition {partition}" if "--algorithm" in own else f"partition {partition}"
            raise click.UsageError(
                f"unknown option {error.option_name};{hint} options of {whose}: {names}", ctx
            ) from error

    def get_params(self, ctx):
        return super().get_params(ctx) + getattr(self, "_extra", [])


def _value_of(args, option, default):
    for i, arg in enumerate(args):
        if arg == option and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(option + "="):
            return arg.split("=", 1)[1]
    return default


def _hyperparameter_options(algorithm):
    from tfpfl.algorithms import algorithm_row

    row = algorithm_row(algorithm)
    return [
        _option(p, f"hyper_{name}", "--" + name.replace("_", "-"), row.title) for name, p in row.hyperparameters.items()
    ]


def _partition_options(partition):
    from tfpfl.data import PARTITIONERS

    if partition not in PARTITIONERS:
        raise ValueError(unknown("partition", partition, PARTITIONERS))
    parameters = [p for p in signature(PARTITIONERS[partition]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    flags = {"K": "--classes-per-client"}
    return [
        _option(p, f"part_{p.name}", flags.get(p.name, "--partition-" + p.name.replace("_", "-")), partition)
        for p in parameters
        if _scalar_type(p) is not None
    ]


def _scalar_type(parameter):
    annotation = parameter.annotation
    if isinstance(annotation, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not NoneType)
    return annotation if annotation in (int, float, bool, str) else None


def _option(parameter, name, flag, of):
    kind = _scalar_type(parameter)
    shown = "none" if parameter.default is None else parameter.default
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=f"{of}; default {shown}")
    return click.Option([flag, name], type=kind, default=None, help=f"{of}; default {shown}")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tfpfl")
def main():
    """tfpfl: personalized federated learning on TensorFlow Federated and Keras.

    --trace with any command shows the stack trace of an error.
    """


_data_options = [
    click.option("--dataset", default="digits", show_default=True, help="See `tfpfl datasets`."),
    click.option("--clients", type=int, help="I; default 100 (20 for digits), or what the partition says."),
    click.option("--partition", default="round_robin", show_default=True, help="How examples are shared out."),
    click.option("--validation", default=0.1, show_default=True, help="Part of every client's training examples."),
    click.option("--data-seed", type=int, help="Seed of the partition; default: --seed."),
    click.option("--pixels", type=click.Choice(["unit", "signed"]), default="unit", show_default=True),
    click.option("--augment", default="before_split", show_default=True, help="Omniglot's rotations."),
    click.option("--allow-download", is_flag=True, help="Let TFDS download a data set that is not there."),
]

_DATA_NAMES = ("dataset", "clients", "partition", "validation", "data_seed", "pixels", "augment")


def _with(options):
    def add(function):
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _data_arguments(kw) -> dict:
    """The entries of a RunConfig that say what the federation is."""
    clients, dataset = kw["clients"], kw["dataset"]
    if clients is None and kw["partition"] not in ("natural", "grouped_dominant"):
        clients = 20 if dataset == "digits" else 100
    source = {}
    if kw["pixels"] != "unit":
        source["pixels"] = kw["pixels"]
    if dataset == "omniglot":
        source["augment"] = kw["augment"]
    return {
        "dataset": dataset,
        "source": source,
        "partition": kw["partition"],
        "partition_args": {k[5:]: v for k, v in kw.items() if k.startswith("part_") and v is not None},
        "clients": clients,
        "validation": kw["validation"],
        "data_seed": kw["data_seed"],
    }


@main.command(cls=_RunCommand)
@click.option("--algorithm", default="pflego", show_default=True, help="See `tfpfl algorithms`.")
@click.option("--preset", help="A named set of hyperparameters, such as pflego's exact, paper, code.")
@_with(_data_options)
@click.option("--federation", type=click.Path(path_type=Path), help="A federation folder, instead of the data options.")
@click.option("--network", help="mlp200, cifar_2conv, omniglot_4conv, fedavg_cnn, or your FILE.keras.")
@click.option("--head-init", default="glorot", show_default=True, help="glorot, uniform01 or zeros.")
@click.option("--labels", type=click.Choice(["local", "global"]), help="Class ids; default local for personal heads.")
@click.option("--participation", default=0.2, show_default=True, help="The part of the clients in a round.")
@click.option("--sampling", type=click.Choice(["fixed", "binomial", "range"]), default="fixed", show_default=True)
@click.option("--sampling-range", type=(int, int), help="Smallest and largest cohort, for --sampling range.")
@click.option("--rounds", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of cohorts, shuffles, initial weights.")
@click.option("--engine", type=click.Choice(["tff", "local"]), default="local", show_default=True)
@click.option(
    "--cohort",
    type=click.Choice(["auto", "plain", "fused", "stacked"]),
    default="auto",
    show_default=True,
    help="How the local engine takes clients through a round.",
)
@click.option("--evaluate-every", default=10, show_default=True, help="Rounds; the last ten are evaluated anyhow.")
@click.option("--patience", type=int, help="Stop after so many evaluated rounds without a better validation accuracy.")
@click.option("--out", type=click.Path(path_type=Path), help="The run folder; default runs/ALGORITHM-DATASET-sSEED.")
def run(out, allow_download, federation, **kw):
    """Train, evaluate and write a run folder. Hyperparameters of the algorithm are options: see the end of --help."""
    from tfpfl.run import Run, RunConfig

    if federation is None:
        data = _data_arguments(kw)
    else:
        data = {"federation": str(federation)}
        context = click.get_current_context()
        given = [
            p.opts[0]
            for p in context.command.get_params(context)
            if (p.name in _DATA_NAMES or p.name.startswith("part_"))
            and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
        ]
        if given:
            raise click.UsageError(f"--federation says what the data are; leave out {', '.join(given)}")
    names = ("algorithm", "preset", "network", "head_init", "labels", "participation", "sampling", "sampling_range")
    names += ("rounds", "seed", "engine", "cohort", "evaluate_every", "patience")
    hyper = {k[6:]: v for k, v in kw.items() if k.startswith("hyper_") and v is not None}
    config = RunConfig(**{k: kw[k] for k in names}, hyperparameters=hyper, **data)
    dataset = config.dataset if federation is None else federation.name
    out = out or Path("runs") / f"{config.algorithm}-{dataset.replace('/', '-')}-s{config.seed}"
    with Run.create(config, out, allow_download=allow_download) as run:
        _train_and_print(run)


def _train_and_print(run):
    from rich.console import Console

    from tfpfl.algorithms import algorithm_row
    from tfpfl.callbacks import Progress

    console = Console()
    try:
        run.train([Progress(algorithm_row(run.config.algorithm).title, console)])
    except KeyboardInterrupt:
        done = run.store.round_num
        print(f"\nInterrupted; {done} rounds are saved. Continue with: tfpfl resume {run.folder}", file=sys.stderr)
        raise click.exceptions.Exit(130) from None
    _print_run(run, console)


def _print_run(run, console):
    from tfpfl.tables import protocols

    console.print(protocols([r for r in run.results() if r.when != "last"], f"{run.folder}"))
    _print_stop(run)
    click.echo(f"Written to {run.folder}")


def _print_stop(run):
    if run.stop_reason:
        click.echo(f"Stopped before round {run.config.rounds}: {run.stop_reason}.")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--rounds", type=int, help="Go on up to this many rounds.")
def resume(folder, rounds):
    """Continue the run in FOLDER, exactly as if it had not been interrupted."""
    from tfpfl.run import Run

    with Run.open(folder, rounds=rounds) as run:
        done = run.store.round_num
        for name, (then, now) in run.changed_versions.items():
            print(f"{name} was {then} and is {now}: the last bits of the numbers may differ", file=sys.stderr)
        _train_and_print(run)
        if run.store.round_num == done:
            click.echo(f"Nothing was left to do: the run ended with round {done}. --rounds extends it.")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def evaluate(folder):
    """Score all clients' personal models of the run in FOLDER as they are now, and print its results by protocol."""
    from rich.console import Console

    from tfpfl import evaluation
    from tfpfl.run import Run
    from tfpfl.tables import protocols

    with Run.open(folder, engine="local") as run:
        done = run.store.round_num
        if done == 0:
            raise ValueError(f"{folder} has no rounds yet")
        now = [r for r in evaluation.results(run.evaluate()) if r.when == "last"]
        console = Console()
        console.print(protocols(now, f"{folder}: all clients after round {done}"))
        console.print(protocols([r for r in run.results() if r.when != "last"], f"{folder}: while it ran"))
        _print_stop(run)


@main.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--title", help="The heading; default: algorithms and data set.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    help="Compare client by client with this algorithm; default local, fedavg_ft.",
)
@click.option("--allow-different-data", is_flag=True, help="Put runs on different data side by side anyway.")
def report(folders, out, title, baselines, allow_different_data):
    """Compare run folders on one HTML page that needs no network: tables, curves, fairness, costs, commands.

    Runs that differ in their seed alone are one row, with intervals over the seeds.
    """
    from tfpfl.algorithms import algorithm_row
    from tfpfl.record import Record
    from tfpfl.report import BASELINES, write_report

    for name in baselines:
        algorithm_row(name)  # refuses an unknown one
    options = {"title": title, "baselines": baselines or BASELINES, "allow_different_data": allow_different_data}
    click.echo(f"Written to {write_report([Record.read(folder) for folder in folders], out, **options)}")


@main.command(cls=_RunCommand)
@click.argument("out", type=click.Path(path_type=Path))
@_with(_data_options)
@click.option("--seed", default=0, show_default=True)
def partition(out, seed, allow_download, **kw):
    """Make a federation folder OUT, with a picture of who has what beside it (OUT-classes.png)."""
    from rich.console import Console

    from tfpfl.data import Federation, load_source

    data = _data_arguments(kw)
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
        table.add_row("--" + key.replace("_", "-"), _scalar_type(p).__name__, str(p.default))
    console.print(table)
    for preset, values in row.presets.items():
        console.print(f"--preset {preset}: {values}", soft_wrap=True)


@main.command("new-clients")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--epochs", default=20, show_default=True, help="Of adapting, by every new client.")
@click.option(
    "--protocol",
    type=click.Choice(["own", "global"]),
    default="own",
    show_default=True,
    help="Each method's own way, or SGD with momentum 0.9 on all of its global model.",
)
@click.option("--eta", type=float, help="Rate, for --protocol global; default: the run's eta.")
@click.option("--batch-size", type=int, help="For --protocol global; default: the run's.")
@click.option("--split", type=click.Choice(["test", "validation", "train"]), default="test", show_default=True)
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="Write every client and epoch to this file.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw the means over epochs into this file.")
def new_clients(runs, csv_file, picture, **how):
    """Let the clients that RUNS did not train on adapt to what was trained, and print how well they do."""
    from rich.console import Console

    from tfpfl import new_clients
    from tfpfl.run import Run

    done = []
    for folder in runs:
        with Run.open(folder, engine="local") as run:
            try:
                done.append(new_clients.adapt_new_clients(run, **how))
            except new_clients.CannotAdapt as error:
                click.echo(f"{folder} is left out: {error}", err=True)
    if not done:
        raise ValueError("none of these runs has something for new clients to start from")
    Console().print(new_clients.table(done))
    for path, write in ((csv_file, new_clients.write_csv), (picture, new_clients.plot)):
        if path:
            write(done, path)
            click.echo(f"Written to {path}")


@main.command()
@click.argument("names", nargs=-1)
@click.option("--run", "folder", type=click.Path(path_type=Path), help="All that the run in this folder is made of.")
def cite(names, folder):
    """Print BibTeX for NAMES: algorithms, data sets, partitions, tfpfl. Without a name, list what there is."""
    from tfpfl import cite

    if names and folder:
        raise click.UsageError("give names or --run, not both")
    if folder:
        names = cite.names_of_run(folder)
    click.echo(cite.bibtex(names) if names else cite.listing())


def _run_options(function):
    """Data, model, cohort and length: what runs of several algorithms have in common."""
    options = [
        *_data_options,
        click.option("--network", help="mlp200, cifar_2conv, omniglot_4conv, fedavg_cnn, or your FILE.keras."),
        click.option("--participation", default=0.2, show_default=True, help="The part of the clients in a round."),
        click.option("--rounds", default=200, show_default=True),
        click.option("--engine", type=click.Choice(["tff", "local"]), default="local", show_default=True),
        click.option(
            "--evaluate-every", default=10, show_default=True, help="Rounds; the last ten are evaluated anyhow."
        ),
    ]
    return _with(options)(function)


_RUN_NAMES = ("network", "participation", "rounds", "engine", "evaluate_every")


def _value(text: str):
    """A hyperparameter as it is written: 3, 0.1, true, none, or a word."""
    words = {"true": True, "false": False, "none": None}
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return words.get(text.lower(), text)


@main.command(cls=_RunCommand)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option("--algorithms", metavar="A,B,...", help="Train these first, in OUT; what is there is continued.")
@click.option("--seeds", default="0", show_default=True, metavar="S,T,...", help="Of the runs to train.")
@click.option("--set", "settings", multiple=True, metavar="A.NAME=VALUE", help="A hyperparameter of one of them.")
@click.option("--protocol", default="EV-all", show_default=True, help="Of the numbers; see docs/protocols.md.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/compare"), show_default=True)
@click.option("--write", multiple=True, type=click.Path(path_type=Path), help="The table: FILE.csv, .md or .tex.")
@click.option("--plot", type=click.Path(path_type=Path), help="Accuracy over rounds, with bands over seeds.")
@_run_options
def compare(folders, algorithms, seeds, settings, protocol, out, write, plot, allow_download, **kw):
    """Several algorithms on one federation: same split, cohorts, batches and initial weights.

    Runs that are there, RUN..., or algorithms to train with --algorithms.
    """
    from rich.console import Console

    from tfpfl import compare as comparing
    from tfpfl import evaluation
    from tfpfl.algorithms import check_names
    from tfpfl.callbacks import Progress
    from tfpfl.record import Record
    from tfpfl.run import RunConfig
    from tfpfl.tables import comparison_over_clients

    wanted, console = evaluation.protocol(protocol), Console()
    for path in write:
        if path.suffix[1:] not in comparing.FORMATS:
            raise click.UsageError(f"--write {path}: a table is written as .{', .'.join(comparing.FORMATS)}")
    names = algorithms.split(",") if algorithms else []
    if not folders and not names:
        raise click.UsageError("nothing to compare: give run folders, or --algorithms")
    hyper = {name: {} for name in names}
    for setting in settings:
        whose, _, value = setting.partition("=")
        algorithm, _, what = whose.partition(".")
        if algorithm not in hyper or not what or not value:
            raise click.UsageError(f"--set {setting}: write ALGORITHM.NAME=VALUE, of one of --algorithms")
        check_names(algorithm, None, {what: value})
        hyper[algorithm][what] = _value(value)
    common = {name: kw[name] for name in _RUN_NAMES} | _data_arguments(kw)
    try:
        drawn = [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--seeds takes numbers with commas between, found {seeds!r}") from error
    configs = [
        RunConfig(algorithm=name, hyperparameters=hyper[name], seed=seed, **common) for seed in drawn for name in names
    ]
    trained = comparing.run_all(
        configs, out, callbacks=lambda label: [Progress(label.ljust(24), console)], allow_download=allow_download
    )
    records = [Record.read(folder) for folder in (*folders, *trained)]
    table = comparing.rows(records, wanted)
    console.print(comparison_over_clients(table, wanted))
    for path in write:
        path.write_text(comparing.text(table, path.suffix[1:], wanted))
    if plot:
        from tfpfl.plots import curves

        curves(records).savefig(plot)


@main.command(cls=_RunCommand)
@click.option("--algorithm", default="pflego", show_default=True, help="See `tfpfl algorithms`.")
@click.option("--grid", multiple=True, metavar="NAME=A,B,...", help="Every combination of these.")
@click.option("--random", multiple=True, metavar="NAME=LOW:HIGH", help="Drawn log-uniformly.")
@click.option("--draws", default=8, show_default=True, help="Of --random.")
@click.option(
    "--halving", default=1, show_default=True, metavar="K", help="Give a Kth of the settings K times the rounds."
)
@click.option("--seed", default=0, show_default=True, help="Of the runs and of --random.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/sweep"), show_default=True)
@_run_options
def sweep(algorithm, grid, random, draws, halving, seed, out, allow_download, **kw):
    """Search hyperparameters on validation examples. Others are options as in `run`."""
    from rich.console import Console

    from tfpfl import sweep as searching
    from tfpfl.callbacks import Progress
    from tfpfl.run import RunConfig
    from tfpfl.tables import rungs

    values, ranges = {}, {}
    for text, into in [(t, values) for t in grid] + [(t, ranges) for t in random]:
        name, _, given = text.partition("=")
        parts = given.split("," if into is values else ":")
        if not name or not given or into is ranges and len(parts) != 2:
            raise click.UsageError(f"{text!r}: write NAME=A,B,... for --grid and NAME=LOW:HIGH for --random")
        into[name.replace("-", "_")] = [_value(p) for p in parts] if into is values else tuple(map(float, parts))
    if bool(values) == bool(ranges):
        raise click.UsageError("give --grid or --random, one of the two; each may be repeated")
    settings = searching.grid(values) if values else searching.draws(ranges, draws, seed)
    hyper = {k[6:]: v for k, v in kw.items() if k.startswith("hyper_") and v is not None}
    common = {name: kw[name] for name in _RUN_NAMES} | _data_arguments(kw)
    config = RunConfig(algorithm=algorithm, hyperparameters=hyper, seed=seed, **common)
    console = Console()
    found = searching.sweep(
        config,
        settings,
        out,
        factor=halving,
        callbacks=lambda label: [Progress(label, console)],
        allow_download=allow_download,
    )
    console.print(rungs(found, config))


@main.command()
@click.argument("name", required=False)
@click.option("--scale", type=click.Choice(["smoke", "laptop", "full"]), default="laptop", show_default=True)
@click.option("--only", multiple=True, metavar="WORD", help="Only cells with this in their name; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), help="Instead of the scale's.")
@click.option("--seeds", type=click.IntRange(1), help="Instead of the scale's.")
@click.option("--minutes", type=float, help="Begin no cell after so many.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/reproduce"), show_default=True)
@click.option("--ledger", type=click.Path(path_type=Path), help="Default: ledger.json in OUT.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw what was run of NAME into this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the ledger of all experiments as Markdown.")
@click.option("--no-run", is_flag=True, help="Only show what is in the ledger.")
@click.option("--allow-download", is_flag=True, help="Let TFDS download a data set that is not there.")
def reproduce(name, plot, write, no_run, rounds, seeds, out, ledger, **kw):
    """Run a paper's table or figure again, and say what agrees. Without NAME: list them.

    Interrupt it when you like: the same command goes on where it was.
    """
    from rich.console import Console
    from rich.table import Column, Table

    from tfpfl import papers
    from tfpfl.callbacks import Progress
    from tfpfl.papers import ledger as ledgers

    console, ledger = Console(), ledger or out / "ledger.json"
    if name is not None:
        papers.experiment(name)  # refuses what there is not
    if name is None:
        table = Table(Column("name", no_wrap=True), "what", f"rounds x seeds: {', '.join(papers.SCALES)}")
        for key, e in papers.EXPERIMENTS.items():
            sizes = ", ".join(f"{e.sizes[s].rounds} x {e.sizes[s].seeds}" for s in papers.SCALES)
            table.add_row(key, f"{e.source}: {e.title}", sizes)
        console.print(table)
    elif not no_run:
        size = papers.experiment(name).sizes[kw["scale"]]
        size = papers.Size(rounds or size.rounds, seeds or size.seeds)
        shown = f"tfpfl reproduce {name} --scale {kw['scale']}" + "".join(f" --only {w}" for w in kw["only"])
        shown += (f" --rounds {rounds}" if rounds else "") + (f" --seeds {seeds}" if seeds else "")
        papers.reproduce(
            name,
            out=out,
            ledger=ledger,
            size=size,
            command=shown,
            callbacks=lambda label: [Progress(label, console)],
            **kw,
        )
    if name is not None:
        cells = ledgers.load(ledger).get(name, {})
        console.print(ledgers.table(name, cells))
        for text, column, held in ledgers.verdicts(papers.experiment(name), cells):
            if held != "open":
                console.print(f"{column}: {text}: [bold]{held}[/]", soft_wrap=True)
        if plot:
            papers.draw(name, out).savefig(plot)
    if write:
        written = ledgers.notes(ledger.with_name(ledger.stem + "_notes.toml"))
        write.write_text(ledgers.markdown(ledgers.load(ledger), written))


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True)
@click.option("--rounds", default=60, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--engine", type=click.Choice(["tff", "local"]), default="tff", show_default=True)
def demo(out, rounds, seed, engine):
    """PFLEGO against FedAvg and Local: 20 clients with 2 digits each, through TFF. Needs no download.

    OUT is made anew if it holds an earlier demo.
    """
    import shutil

    from rich.console import Console

    from tfpfl.algorithms import algorithm_row
    from tfpfl.callbacks import Progress
    from tfpfl.run import Run, RunConfig
    from tfpfl.tables import comparison

    console = Console()
    done = []
    for algorithm in ("pflego", "fedavg", "local"):
        folder = out / algorithm
        if (folder / "demo").exists():
            shutil.rmtree(folder)
        config = RunConfig(
            algorithm=algorithm,
            partition_args={"K": 2},
            clients=20,
            participation=0.5,
            rounds=rounds,
            seed=seed,
            engine=engine,
        )
        with Run.create(config, folder) as run:
            (folder / "demo").touch()  # says to a later demo that this folder may go
            run.train([Progress(algorithm_row(algorithm).title.ljust(8), console)])
            done.append((run.write_summary(), run.results()))
    console.print(comparison(done, f"digits, 20 clients of 2 classes, {rounds} rounds, engine {engine}, seed {seed}"))
    click.echo(f"Written to {out}")
