"""Options that several commands share, and those that an algorithm or a partitioner brings along."""

from difflib import get_close_matches
from inspect import signature
from types import NoneType, UnionType
from typing import get_args

import click

from tfpfl.checks import InvalidArgument
from tfpfl.names import unknown


class Picture(click.Path):
    """The file of a picture; its ending must be one that matplotlib writes. Asked before hours of training."""

    def convert(self, value, param, ctx):
        from matplotlib.backend_bases import FigureCanvasBase

        path = super().convert(value, param, ctx)
        kinds = FigureCanvasBase.get_supported_filetypes()
        if path.suffix and path.suffix[1:].lower() not in kinds:
            self.fail(f"{path} cannot be drawn: a picture is written as .{', .'.join(kinds)}", param, ctx)
        return path


class RunCommand(click.Command):
    """Adds the hyperparameters of the algorithm, if there is one, and the arguments of the partitioner as options."""

    def parse_args(self, ctx, args):
        algorithm, partition = _given(args, "--algorithm", "pflego"), _given(args, "--partition", "round_robin")
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


def _given(args, option, default):
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
        raise InvalidArgument(unknown("partition", partition, PARTITIONERS))
    parameters = [p for p in signature(PARTITIONERS[partition]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    flags = {"K": "--classes-per-client"}
    return [
        _option(p, f"part_{p.name}", flags.get(p.name, "--partition-" + p.name.replace("_", "-")), partition)
        for p in parameters
        if scalar_type(p) is not None
    ]


def scalar_type(parameter):
    annotation = parameter.annotation
    if isinstance(annotation, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not NoneType)
    return annotation if annotation in (int, float, bool, str) else None


def _option(parameter, name, flag, of):
    kind = scalar_type(parameter)
    shown = "none" if parameter.default is None else parameter.default
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=f"{of}; default {shown}")
    return click.Option([flag, name], type=kind, default=None, help=f"{of}; default {shown}")


data_options = [
    click.option("--dataset", default="digits", show_default=True, help="See `tfpfl datasets`."),
    click.option("--clients", type=int, help="I; default 100 (20 for digits), or what the partition says."),
    click.option("--partition", default="round_robin", show_default=True, help="How examples are shared out."),
    click.option("--validation", default=0.1, show_default=True, help="Part of every client's training examples."),
    click.option("--data-seed", type=int, help="Seed of the partition; default: --seed."),
    click.option("--pixels", type=click.Choice(["unit", "signed"]), default="unit", show_default=True),
    click.option("--augment", default="before_split", show_default=True, help="Omniglot's rotations."),
    click.option("--allow-download", is_flag=True, help="Let TFDS download a data set that is not there."),
]

reliability_options = [
    click.option("--dropout", default=0.0, show_default=True, help="Probability that a sampled client's work is lost."),
    click.option("--dropout-spread", default=0.0, show_default=True, help="Each client's own: DROPOUT +- this."),
    click.option(
        "--client-seconds", default=0.0, show_default=True, help="Of a median client, an example and pass; 0: no clock."
    ),
    click.option("--client-seconds-spread", default=0.0, show_default=True, help="Over clients, of the logarithm."),
    click.option("--jitter", default=0.0, show_default=True, help="The same over rounds."),
    click.option("--round-deadline", type=float, help="Virtual seconds after which who is not back is left out."),
    click.option("--joins", multiple=True, metavar="ROUND:ID,...", help="Clients that take part from ROUND on only."),
    click.option("--leaves", multiple=True, metavar="ROUND:ID,...", help="Clients that take no part from ROUND on."),
    click.option(
        "--on-broken",
        type=click.Choice(["stop", "reject"]),
        default="stop",
        show_default=True,
        help="A client's work is broken (not finite, bad data, too large): stop, or go on without it.",
    ),
    click.option("--max-norm", type=float, help="With --on-broken reject: of an update; a longer one is broken."),
    click.option("--clip-norm", type=float, help="With --on-broken reject: a longer update is scaled down to this."),
    click.option("--aggregator", help="clip, zero, robust, compress, dp, dp_adaptive (TFF's); median, trimmed_mean."),
    click.option("--aggregator-args", multiple=True, metavar="NAME=NUMBER", help="Of it: norm, noise, clip, trim, ..."),
]

DATA_NAMES = ("dataset", "clients", "partition", "validation", "data_seed", "pixels", "augment")


def with_options(options):
    def add(function):
        for option in reversed(options):
            function = option(function)
        return function

    return add


def data_arguments(kw) -> dict:
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


def run_options(function):
    """Data, model, cohort and length: what runs of several algorithms have in common."""
    options = [
        *data_options,
        click.option("--network", help="mlp200, cifar_2conv, omniglot_4conv, fedavg_cnn, or your FILE.keras."),
        click.option("--participation", default=0.2, show_default=True, help="The part of the clients in a round."),
        click.option("--rounds", default=200, show_default=True),
        click.option("--engine", type=click.Choice(["local", "tff", "ray"]), default="local", show_default=True),
        click.option(
            "--evaluate-every", default=10, show_default=True, help="Rounds; the last ten are evaluated anyhow."
        ),
    ]
    return with_options(options)(function)


RUN_NAMES = ("network", "participation", "rounds", "engine", "evaluate_every")


def value_of(text: str):
    """A hyperparameter as it is written: 3, 0.1, true, none, or a word."""
    words = {"true": True, "false": False, "none": None}
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return words.get(text.lower(), text)


machine_options = [
    click.option("--workers", metavar="HOST:PORT,...", help="TFF workers (`tfpfl worker`), for --engine tff."),
    click.option("--address", metavar="HOST:PORT|auto", help="A Ray cluster, for --engine ray; default: this machine."),
    click.option("--deadline", type=float, help="Seconds for a part of a round on other machines; default 600."),
    click.option("--isolate", is_flag=True, help="No other user or machine reaches TFF's worker of this run. Linux."),
]


def machines_of(engine: str, workers: str | None, address: str | None, deadline: float | None, isolate: bool):
    """Where the rounds' work is done.

    Raises:
        ValueError: the engine knows no such machines, or an argument is out of range.
    """
    from tfpfl.runtime.machines import Machines

    for flag, given, whose in (
        ("--workers", workers, "tff"),
        ("--isolate", isolate, "tff"),
        ("--address", address, "ray"),
    ):
        if given and engine != whose:
            raise InvalidArgument(f"{flag} is for --engine {whose}, found --engine {engine}")
    if deadline is not None and not workers and engine != "ray":
        raise InvalidArgument("--deadline goes with --workers, or with --engine ray")
    given = {} if deadline is None else {"deadline": deadline}
    return Machines(address, tuple(workers.split(",")) if workers else (), isolate=isolate, **given)
