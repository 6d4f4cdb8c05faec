"""Options that several commands share, and options made from the arguments of an algorithm or a partitioner."""

import re
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from inspect import getdoc, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args

import click

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.cli.layout import PATH, Between, Names, OneOf, OrNone, SectionedCommand, SectionOption, with_names
from tfpfl.runs.files import check_place
from tfpfl.runs.options import DATA_NAMES, OPTIONS, SECTIONS

if TYPE_CHECKING:
    from tfpfl.runs.run import Run


class Picture(click.Path):
    """An option for the file of a picture. What cannot be written is refused before any training."""

    def convert(self, value, param, ctx):
        """The path; fails if matplotlib cannot write files with this ending."""
        from matplotlib.backend_bases import FigureCanvasBase

        path = super().convert(value, param, ctx)
        try:
            check_place(path)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)
        kinds = FigureCanvasBase.get_supported_filetypes()
        if path.suffix and path.suffix[1:].lower() not in kinds:
            self.fail(f"{path} cannot be drawn: a picture is written as .{', .'.join(kinds)}", param, ctx)
        return path if path.suffix else path.with_name(f"{path.name}.png")  # what matplotlib would write


PICTURE = Picture(path_type=Path)


class RunCommand(SectionedCommand):
    """A command that makes runs.

    It also has options for the arguments of the partitioner and, if it has --algorithm, for the hyperparameters of the
    algorithm. Its help has those of an algorithm only if --algorithm is given: to read them, TensorFlow is imported.
    """

    def parse_args(self, ctx, args):
        """Finds --algorithm and --partition first, adds their options, and then parses all arguments."""
        algorithm, partition = (_given(args, name) for name in ("algorithm", "partition"))
        own = {flag for p in self.params for flag in p.opts}
        extra = _partition_options(partition)
        if not {*ctx.help_option_names}.isdisjoint(args) and _given(args, "algorithm", None) is None:
            self._extra = [option for option in extra if option.opts[0] not in own]
            with suppress(click.NoSuchOption):  # of a hyperparameter, before --help
                return super().parse_args(ctx, list(args))
        if "--algorithm" in own:
            extra = _hyperparameter_options(algorithm) + extra
        self._extra = [option for option in extra if option.opts[0] not in own]
        if "--algorithm" in own:
            _check_no_clash(algorithm, extra, own)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if "--algorithm" in own and (why := _why_not(algorithm, error.option_name)):
                raise click.UsageError(f"{algorithm} has no option {error.option_name}: {why}", ctx) from error
            names = ", ".join(o.opts[0] for o in self._extra)
            params = self.get_params(ctx)
            if error.option_name[2:] in [p.name for p in params if isinstance(p, click.Argument)]:
                argument = error.option_name[2:].upper()
                told = f"{error.option_name} is not an option of this command: write {argument} alone, without"
                raise click.UsageError(f"{told} {error.option_name} before it", ctx) from error
            flags = [flag for p in params if isinstance(p, click.Option) for flag in p.opts]
            near = get_close_matches(error.option_name, flags, n=1)
            hint = f" did you mean {near[0]}?" if near else ""
            whose = f"{algorithm} and of partition {partition}" if "--algorithm" in own else f"partition {partition}"
            raise click.UsageError(
                f"unknown option {error.option_name};{hint} options of {whose}: {names}", ctx
            ) from error

    def get_params(self, ctx):
        """The options of the command, and those of its algorithm and partitioner."""
        return super().get_params(ctx) + getattr(self, "_extra", [])


class ConfigOption(SectionOption):
    """An option for an entry of a run's configuration. The default is the configuration's.

    The default is read only when it is needed: the configuration imports TensorFlow, and `tfpfl --help` must not wait
    for that.
    """

    def get_default(self, ctx, call=True):
        """The default of the entry in `tfpfl.runs.options`."""
        return OPTIONS[self.name].default


def config_option(name: str):
    """A decorator that gives a command the option of the entry `name` in the table of `tfpfl.runs.options`."""
    option = OPTIONS[name]
    kind = OneOf(option.choices) if option.choices else Names(option.known) if option.known else option.type
    return click.option(
        option.flag,
        option.name,
        cls=ConfigOption,
        section=next(heading for heading, options in SECTIONS.items() if option in options),
        type=PATH if kind is Path else kind,
        metavar=option.metavar,
        multiple=option.multiple,
        is_flag=option.type is bool or None,
        help=with_names(option.help, option.known) if option.known else option.help,
    )


def _given(args, name, default=...):
    flag = OPTIONS[name].flag
    for i in reversed(range(len(args))):  # of an option that is there twice, click takes the last
        if args[i].startswith(flag + "="):
            return args[i].split("=", 1)[1]
        if i and args[i - 1] == flag:
            return args[i]
    return OPTIONS[name].default if default is ... else default


def _why_not(algorithm, flag):
    from tfpfl.algorithms import method_named

    return method_named(algorithm).why_not(flag.removeprefix("--").replace("-", "_"))


def _hyperparameter_options(algorithm):
    from tfpfl.algorithms import method_named

    row, section = method_named(algorithm), f"Hyperparameters of {algorithm}"
    texts = hyperparameter_texts(row)
    return [
        _option(p, f"hyper_{name}", _flag(name), section, texts.get(name, ""))
        for name, p in row.hyperparameters.items()
    ]


def _check_no_clash(algorithm, extra, own):
    """Refuses a method with a hyperparameter that is named like an option of the command: nobody could give it.

    `head_init` may be both, as it is in tfpfl's methods.
    """
    clash = [o.opts[0] for o in extra if o.opts[0] in own - {"--head-init"} and o.name.startswith("hyper_")]
    if clash:
        raise InvalidArgument(
            f"{algorithm} has hyperparameters that are named like options of the command, {', '.join(clash)}: give "
            "them other names"
        )


def _partition_options(partition):
    from tfpfl.data import PARTITIONERS

    if partition not in PARTITIONERS:
        raise InvalidArgument(unknown("partition", partition, PARTITIONERS))
    parameters = [p for p in signature(PARTITIONERS[partition]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    flags, section = {"K": "--classes-per-client"}, f"Arguments of partition {partition}"
    texts = {name: _sentence(text) for name, text in argument_texts(PARTITIONERS[partition]).items()}
    return [
        _option(p, f"part_{p.name}", flags.get(p.name, _flag(f"partition_{p.name}")), section, texts.get(p.name, ""))
        for p in parameters
        if scalar_type(p) is not None
    ]


def hyperparameter_texts(algorithm, named=None) -> dict[str, str]:
    """{hyperparameter: its help text}, taken from the docstring of the algorithm's builder.

    Args:
        algorithm: its name in `ALGORITHMS`, or its `Method`.
        named: function (name of an algorithm) -> text that replaces `name` in help texts; default: its title.
    """
    from tfpfl.algorithms import ALGORITHMS

    named = named or (lambda name: ALGORITHMS[name].title)
    shown = {name: named(name) for name in ALGORITHMS}
    return {
        name: re.sub(r"`(\w+)`", lambda m: shown.get(m[1], m[0]), text)
        for name, text in _builder_texts(algorithm).items()
    }


def _builder_texts(algorithm):
    """{hyperparameter: text}. Texts of another algorithm are used if the docstring says so, as in "as in `fedavg`"."""
    from tfpfl.algorithms import ALGORITHMS, get_method

    builder, *others = get_method(algorithm).takers
    found = {name: _sentence(text) for taker in others for name, text in argument_texts(taker).items()}
    for other in re.findall(r"`(\w+)`", (getdoc(builder) or "").split("\n\n")[0]):
        found |= _builder_texts(other) if other in ALGORITHMS else {}
    for name, text in argument_texts(builder).items():
        other = re.search(r"as in `(\w+)`", text)
        more = _builder_texts(other[1]).get(name, "") if other else ""
        found[name] = f"{more} {_sentence(text)}".strip()
    return found


def argument_texts(function) -> dict[str, str]:
    """{argument: its text} from a docstring's section "Args". Arguments that share a line get the same text."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", getdoc(function) or "", re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in rows for name in names.split(", ")}


def _flag(name):
    return "--" + name.replace("_", "-")


def _sentence(text):
    """The text with a capital letter, unless it begins with a symbol or a value."""
    return text[0].upper() + text[1:] if re.match(r"[a-z]+[ ,:]", text) else text


def scalar_type(parameter):
    """The type of a parameter without None: int, float, bool or str; None if it is another type."""
    annotation = parameter.annotation
    if isinstance(annotation, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not NoneType)
    return annotation if annotation in (int, float, bool, str) else None


def _option(parameter, name, flag, section, text):
    kind = scalar_type(parameter)
    shown = "none" if parameter.default is None else parameter.default
    if kind is bool:
        flag, shown = f"{flag}/--no-{flag[2:]}", "yes" if parameter.default else "no"
    elif name.startswith("hyper_") and NoneType in get_args(parameter.annotation):
        kind = OrNone(kind)
    text = f"{text}  [default: {shown}]".lstrip()
    return SectionOption([flag, name], type=kind, default=None, help=text, section=section)


download_option = click.option(
    "--allow-download",
    is_flag=True,
    cls=SectionOption,
    section="Data",
    help="Let TensorFlow Datasets download the data set if it is not on this machine.",
)
allow_code_option = click.option(
    "--allow-code",
    is_flag=True,
    cls=SectionOption,
    section="Model",
    help="Let a file run code of its own: that of the network, such as a Lambda layer, or the method that a run folder "
    "holds. Only for a file that you made: the code can do all that you can. The file is remembered on this machine by "
    "its sha256.",
)
processes_option = click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Number of runs at the same time. The results do not depend on it; seconds per round do.",
)


def allow_code_of(*paths: str | Path | None) -> None:
    """Does what --allow-code says, for files of networks or for run folders.

    Raises:
        InvalidArgument: a path is no file of a network, and no run folder with a network or method of the user's own.
    """
    from tfpfl.runs.consent import allow_code

    for path in paths:
        if path is None or ".py:" in str(path):  # to name a function is to allow it
            raise InvalidArgument("--allow-code is for --network FILE.keras: leave it out, or name the file")
        allow_code(path)


def allow_code_of_run(*folders: Path) -> None:
    """Does what --allow-code says for run folders. If one is another folder or file, nothing is allowed."""
    from tfpfl.runs.config import read_config

    for folder in folders:
        read_config(folder)
    allow_code_of(*folders)


def open_run(folder: Path, allow_code: bool, **how: Any) -> "Run":
    """Opens the run in a folder, see `Run.open`; with --allow-code, its code is allowed before."""
    from tfpfl.runs.run import Run

    if allow_code:
        allow_code_of_run(folder)
    return Run.open(folder, **how)


quorum_option = click.option(
    "--quorum",
    type=Between(0, 1, min_open=True),
    default=0.6,
    help="The part of the invited clients that must have come for a round to end at its deadline.",
)
payload_option = click.option(
    "--payload",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    help="How devices send gradients; int8 is smaller and less exact.",
)
data_options = [*map(config_option, DATA_NAMES), download_option]


def with_options(options):
    """A decorator that gives a command all these options, in this order."""

    def add(function):
        for option in reversed(options):
            function = option(function)
        return function

    return add


# What all runs of a comparison or a search have in common, besides the data.
RUN_NAMES = tuple(name for name in OPTIONS if name not in {*DATA_NAMES, "federation", "algorithm", "preset", "seed"})
# A search gives equal rounds to all settings, and evaluates the last ones.
SEARCH_NAMES = tuple(name for name in RUN_NAMES if name not in ("patience", "monitor", "evaluate_every"))


def run_options(names):
    """A decorator that gives a command the options about the data, and those of these names."""
    return with_options([*data_options, config_option("federation"), *map(config_option, names), allow_code_option])


log_option = click.option(
    "--log",
    "logs",
    type=OneOf(["mlflow", "wandb"]),
    multiple=True,
    help="Also write the run to MLflow (folder mlruns) or to Weights & Biases (offline, folder wandb); may be "
    "repeated. Your own settings of these libraries hold. Default: TensorBoard alone, in the run folder.",
)
log_tables_option = click.option(
    "--log-tables", is_flag=True, help="With --log: also write the tables of the run folder there, as artifacts."
)


def trackers_of(logs: tuple[str, ...], log_tables: bool) -> list:
    """The callbacks that --log asks for.

    Raises:
        InvalidArgument: --log-tables without --log.
        Unavailable: a library is not installed.
    """
    if log_tables and not logs:
        raise InvalidArgument("--log-tables says what --log writes: add --log mlflow or --log wandb, or leave it out")
    if not logs:
        return []
    from tfpfl.runs.trackers import TRACKERS

    return [TRACKERS[name](tables=log_tables) for name in dict.fromkeys(logs)]


_machine_option = partial(click.option, cls=SectionOption, section="Machines")
machine_options = [
    _machine_option(
        "--workers",
        metavar="HOST:PORT,...",
        help="With --engine tff: the workers that compute the rounds, each started with `tfpfl worker`. Default: one "
        "worker on this machine.",
    ),
    _machine_option(
        "--address",
        metavar="HOST:PORT|auto",
        help="With --engine ray: the Ray cluster that computes the rounds; auto finds the one that this machine is "
        "part of. Default: a new one on this machine.",
    ),
    _machine_option(
        "--deadline",
        type=float,
        help="With --workers or --engine ray: seconds to wait for a part of a round. After that, TFF gives the part to "
        "another worker, and Ray gives the round up. Default: 600.",
    ),
    _machine_option(
        "--require-isolation/--no-isolation",
        "--isolate",
        "isolate",
        default=None,
        help="With --engine tff: whether the worker of this run must be isolated, so that no other user or machine can "
        "reach it; or must not be. Default: it is isolated if this system allows it, otherwise a warning says who can "
        "reach it. --isolate is an older name of --require-isolation.",
    ),
]


def machines_of(engine: str, workers: str | None, address: str | None, deadline: float | None, isolate: bool | None):
    """The `Machines` that compute the rounds, from the values of `machine_options`.

    Raises:
        InvalidArgument: an option that the engine does not have, or a deadline that is not positive.
        Unavailable: isolation is required, and this system does not allow it.
    """
    from tfpfl.engines.machines import Machines

    for flag, given, whose in (
        ("--workers", workers, "tff"),
        ("--require-isolation", isolate, "tff"),
        ("--no-isolation", isolate is False, "tff"),
        ("--address", address, "ray"),
    ):
        if given and engine != whose:
            raise InvalidArgument(
                f"{flag} is for --engine {whose}, found --engine {engine}: leave {flag} out, or take the other engine"
            )
    if deadline is not None and not workers and engine != "ray":
        raise InvalidArgument(
            f"--deadline goes with --workers, or with --engine ray; found --engine {engine} without --workers, where "
            "nothing is waited for: leave --deadline out"
        )
    waiting: dict[str, Any] = {} if deadline is None else {"deadline": deadline}
    machines = Machines(address, tuple(workers.split(",")) if workers else (), isolate=isolate, **waiting)
    if isolate:  # checked now, before a run folder is made
        from tfpfl.engines.tff.worker import require_isolation

        require_isolation()
    return machines
