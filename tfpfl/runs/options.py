"""The options of `tfpfl run`: for each entry of `RunConfig` its name, help, type and choices at the command line.

From this table `tfpfl.cli.options` makes the options of the command line, and `tfpfl.runs.command` writes the command
of a run. The defaults are those of `RunConfig`.
"""

import ast
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tfpfl.data.kinds import KINDS
from tfpfl.runs.metrics import ALWAYS, NAMES


class RunOption(NamedTuple):
    """One option of `tfpfl run`."""

    name: str  # an entry of `RunConfig`; with `of_source`, a key of its entry `source`
    help: str  # whole sentences; the command line adds the default, if it does not depend on other entries
    type: type | tuple = str  # a tuple: one value of each type
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    multiple: bool = False  # whether the option may be given several times
    of_source: bool = False  # whether it is a keyword argument of `load_source`
    written: str = ""  # the option without --, if it is not the name
    known: tuple[str, ...] = ()  # names that the help lists; with some options, such as network, a file is possible too

    @property
    def flag(self) -> str:
        """The option as it is written at the command line, such as --data-seed."""
        return "--" + (self.written or self.name.replace("_", "-"))

    @property
    def default(self) -> Any:
        """The value of the entry without this option; None if it depends on other entries."""
        return _defaults()[self.name]


@cache
def _defaults() -> dict:
    """The defaults of `RunConfig`, read from its source: its module imports TensorFlow, and help texts must be fast."""
    from tfpfl.data import load_source

    source = Path(__file__).with_name("config.py").read_text(encoding="utf-8")
    (config,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "RunConfig")
    found = dict(load_source.__kwdefaults__ or {})
    for entry in config.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.target.id in OPTIONS:
            assert entry.value is not None
            found[entry.target.id] = ast.literal_eval(entry.value)
    return found


# Names of other modules, written down again: these import TensorFlow, and help texts must be fast. A test compares.
METHODS = (
    *("pflego", "fedavg", "local", "fedsgd", "fedprox", "scaffold", "feddyn", "fedavg_ft", "fedprox_ft", "fedper"),
    *("fedrep", "fedbabu", "fedrecon", "lg_fedavg", "fedrod", "ditto", "pfedme", "apfl", "per_fedavg", "layerwise"),
    *("fedfomo", "fedamp", "heurfedamp", "pgfed", "pgfedmo", "fedbn", "feddane", "fedpac", "knn_per", "fed3r"),
    *("fedproto", "pfedhn", "fedala", "feddbe", "fedas", "fedcp", "gpfl", "adapters"),
)
TFDS_NAMES = (
    *("mnist", "fashion_mnist", "kmnist", "emnist/byclass", "emnist/balanced", "cifar10", "cifar100"),
    *("svhn_cropped", "omniglot"),
)
PEOPLE = ("omniglot_drawers", "fsdd", "watch", "vowels", "sleepstudy", "shakespeare")

# The sections are the headings in `tfpfl run --help`.
SECTIONS = {
    "Method": (
        RunOption(
            "algorithm",
            "The method that is trained; `tfpfl algorithms` describes them. A method of your own is written "
            "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.",
            known=METHODS,
        ),
        RunOption(
            "preset",
            "A named set of hyperparameters; only some methods have one. pflego: exact, paper, code; fedrecon: "
            "stateless; layerwise: pm_a, pm_b; per_fedavg: fo, hf. Default: none.",
        ),
        RunOption(
            "objective",
            "What is minimized over the clients' losses. mean: their weighted mean. fair:q: large losses count more, "
            "by the power q (q-FFL). cvar:p: the mean of the worst clients, which have the share p of the weight.",
            metavar="mean|fair:q|cvar:p",
        ),
    ),
    "Data": (
        RunOption(
            "dataset",
            "The data set; `tfpfl datasets` describes the known ones. Any other image classification data set of "
            "TensorFlow Datasets works too, by its name.",
            known=("digits", "synthetic", *TFDS_NAMES, *PEOPLE),
        ),
        RunOption(
            "clients",
            "Number of clients. Default: 20 for digits and 100 for other data sets; natural and grouped_dominant have "
            "a number of their own.",
            int,
        ),
        RunOption(
            "partition",
            "How the examples are divided among the clients.",
            known=(
                *("iid", "round_robin", "dirichlet", "pathological", "grouped_dominant"),
                *("natural", "quantity_skew"),
            ),
        ),
        RunOption("validation", "Fraction of each client's training examples that is set aside for validation.", float),
        RunOption(
            "data_seed",
            "Seed of the partition of the data. Default: the value of --seed, or of the first of --seeds.",
            int,
        ),
        RunOption(
            "pixels",
            "Range of the pixel values: unit is [0, 1], signed is [-1, 1].",
            choices=("unit", "signed"),
            of_source=True,
        ),
        RunOption(
            "augment",
            "For omniglot: which drawings are also used rotated by 90, 180 and 270 degrees. before_split: all, before "
            "they are split into train and test; train_only; after_split: all, after the split; none.",
            choices=("before_split", "train_only", "after_split", "none"),
            of_source=True,
        ),
        RunOption(
            "only_classes",
            "Only the examples of some classes: first_half or second_half; for omniglot background (30 alphabets) or "
            "evaluation (the other 20); or names, such as cat,dog. Default: all.",
            of_source=True,
        ),
        RunOption(
            "federation",
            "Folder of a federation, for example one that `tfpfl partition` wrote. It replaces all other options about "
            "the data. Default: none.",
            Path,
        ),
    ),
    "Model": (
        RunOption(
            "network",
            "The backbone: a known name, a Keras file of your own, FILE.keras, or a function of your own that gives a "
            "Keras model, FILE.py:FUNCTION. A Keras file with code in it needs --allow-code. Default: cifar_2conv for "
            "images with three colours, otherwise mlp200.",
            known=("mlp200", "cifar_2conv", "omniglot_4conv", "fedavg_cnn", "conv_bn"),
        ),
        RunOption(
            "init",
            "Initial weights of a network that has a name. keras: Glorot uniform kernels, biases of 0. stax: Glorot "
            "normal kernels and small random biases, as in the code of PFLEGO's authors. Default: keras; with "
            "--preset code stax.",
            choices=("keras", "stax"),
            written="network-init",  # --init is a hyperparameter of Ditto, PGFed and others
        ),
        RunOption(
            "batch_norm",
            "What trainable BatchNormalization layers of the network do. frozen: the stored statistics normalize; "
            "scale and offset are trained. local: statistics, scale and offset stay with the client (FedBN). shared: "
            "the server averages the statistics. Default: frozen; for fedbn local.",
            choices=("frozen", "local", "shared"),
        ),
        RunOption(
            "train_from",
            "The first layer of the backbone that trains, by its name. What lies below it is frozen: its features are "
            "computed once and kept beside the federation. Default: the whole backbone trains.",
            metavar="LAYER",
        ),
        RunOption(
            "adapters",
            "Train small adapters instead of the backbone's own weights, which are frozen: lora:R (of rank R), "
            "scale_shift or bottleneck:R (R units), at dense layers and 1x1 convolutions. Default: no adapters.",
            metavar="KIND",
        ),
        RunOption(
            "personal",
            "The part of the adapters that stays with the client and is never sent: A or B of lora, scale or shift of "
            "scale_shift, down or up of a bottleneck. Default: all of the adapters are shared.",
            metavar="PART",
        ),
        RunOption(
            "head_init", "How the weights of the head are initialized.", choices=("glorot", "uniform01", "zeros")
        ),
        RunOption(
            "kind",
            "The kind of labels, which decides the head's loss and the score: classification, multilabel, regression, "
            "poisson (counts), quantile:Q, such as quantile:0.9, or huber:DELTA. Default: the usual one for the labels "
            "of the federation; classification for classes.",
            known=tuple(KINDS),
        ),
        RunOption(
            "labels",
            "What the outputs of a head stand for. local: the classes that the client has. global: all classes of the "
            "data set. Default: local for a method with personal heads, otherwise global. Local labels mix classes "
            "where all share one head.",
            choices=("local", "global"),
        ),
    ),
    "Rounds": (
        RunOption("participation", "Fraction of the clients that take part in a round.", float),
        RunOption(
            "sampling",
            "How the clients of a round are drawn. fixed: the same number in every round. binomial: each client with "
            "probability --participation. range: a random number from --sampling-range. While clients are away "
            "(--joins, --leaves), cohorts are smaller in the same proportion.",
            choices=("fixed", "binomial", "range"),
        ),
        RunOption(
            "sampling_range",
            "Smallest and largest number of clients in a round, for --sampling range.",
            (int, int),
            metavar="LOW HIGH",
        ),
        RunOption("rounds", "Number of communication rounds to train.", int),
        RunOption(
            "seed", "Seed of the initial weights, of the clients in each round and of the order of their examples.", int
        ),
        RunOption(
            "engine",
            "What computes the rounds. local: this process. tff: TensorFlow Federated. ray: Ray, on one machine or a "
            "cluster.",
            choices=("local", "tff", "ray"),
        ),
        RunOption(
            "grouping",
            "How the local engine computes the clients of a round. one_by_one: each by itself. fused: one pass through "
            "the backbone for many clients, if the method allows it. stacked: clients of equal size as one batch. "
            "auto: fused if possible, else one_by_one. All give equal results up to rounding.",
            choices=("auto", "one_by_one", "fused", "stacked"),
        ),
        RunOption(
            "evaluate_every",
            "Number of rounds from one evaluation to the next; 0: none. The last ten of its rounds are evaluated, too.",
            int,
        ),
        RunOption(
            "metrics",
            "A metric that is measured besides score and loss, for every client; may be repeated. Each is for certain "
            "kinds of labels. A metric of your own, a function of labels and logits, is written FILE.py:FUNCTION or "
            "PACKAGE.MODULE:FUNCTION. Default: none.",
            known=NAMES,
            multiple=True,
            written="metric",
        ),
        RunOption(
            "patience",
            "Stop the run after this many evaluations without a better validation score, such as the accuracy, or what "
            "--monitor names. Only those of --evaluate-every count. Default: never.",
            int,
        ),
        RunOption(
            "monitor",
            "What --patience looks at: the mean over clients on validation examples of accuracy (with another kind: of "
            "its score), loss or a metric, written as for --metric.",
            known=(*ALWAYS, *NAMES),
        ),
        RunOption(
            "schedule",
            "What the learning rates are multiplied by, a function of the round t. cosine:F:T falls from 1 to F "
            "(default 0) in round T (default: the last). step:30,60:0.1 is 0.1 after round 30 and 0.01 after round 60. "
            "inverse_sqrt:T0 is 1 / sqrt(1 + (t - 1) / T0), inverse:T0 the same without the root; T0 is 1 by default. "
            "Default: constant.",
            known=("constant", "cosine", "step", "inverse_sqrt", "inverse"),
        ),
        RunOption(
            "schedule_of",
            "A learning rate that follows --schedule, such as rho; may be repeated. Default: all, except rates that "
            "multiply the result of steps that follow it already, such as SCAFFOLD's eta_g.",
            metavar="NAME",
            multiple=True,
        ),
        RunOption(
            "new_clients",
            "Number of clients that are kept out of training, for `tfpfl new-clients`. The data seed draws them.",
            int,
        ),
    ),
    "Unreliable clients": (
        RunOption("dropout", "Probability that the work of a sampled client is lost.", float),
        RunOption(
            "dropout_spread",
            "How much clients differ in dropout: each client's probability is drawn uniformly from DROPOUT - SPREAD to "
            "DROPOUT + SPREAD.",
            float,
        ),
        RunOption(
            "client_seconds",
            "Virtual seconds the median client needs per example and pass; 0 turns the virtual clock off.",
            float,
        ),
        RunOption(
            "client_seconds_spread", "How much clients differ in speed: standard deviation of log(seconds).", float
        ),
        RunOption(
            "jitter", "How much one client's speed varies between rounds: standard deviation of log(seconds).", float
        ),
        RunOption(
            "round_deadline",
            "Clients that take longer than this many virtual seconds are dropped from the round. Needs "
            "--client-seconds. Default: the round waits for all.",
            float,
        ),
        RunOption(
            "joins",
            "Clients that take part from this round on and not before, such as 20:3,4; may be repeated.",
            metavar="ROUND:ID,...",
            multiple=True,
        ),
        RunOption(
            "leaves",
            "Clients that no longer take part from this round on, such as 40:0; may be repeated.",
            metavar="ROUND:ID,...",
            multiple=True,
        ),
        RunOption(
            "on_broken",
            "What happens when a client's work is broken: its update is not finite or too large, or its data are bad. "
            "stop: the run ends. reject: the round goes on without this client.",
            choices=("stop", "reject"),
        ),
        RunOption(
            "max_norm", "With --on-broken reject: reject updates with a larger L2 norm. Default: no limit.", float
        ),
        RunOption(
            "clip_norm",
            "With --on-broken reject: scale updates with a larger L2 norm down to this norm. Default: no limit.",
            float,
        ),
    ),
    "Aggregation": (
        RunOption(
            "aggregator",
            "How the server combines the clients' updates. median and trimmed_mean work on all engines, the others "
            "with --engine tff. Default: the method's own sum or mean.",
            known=("median", "trimmed_mean", "clip", "zero", "robust", "compress", "dp", "dp_adaptive"),
        ),
        RunOption(
            "aggregator_args",
            "An argument of the aggregator, such as noise=1.0; may be repeated.",
            metavar="NAME=NUMBER",
            multiple=True,
        ),
        RunOption(
            "secure",
            "Clients send integers, as under secure aggregation, and the server has nothing but their sum. Live rounds "
            "(`tfpfl serve --secure`) also mask them.",
            bool,
        ),
        RunOption(
            "secure_clip",
            "With --secure: updates with a larger L2 norm are scaled down to this norm, at the client. Default: 100, "
            "far above most updates.",
            float,
        ),
        RunOption(
            "secure_noise",
            "With --secure: the noise multiplier of differential privacy. Every client adds its share of discrete "
            "Gaussian noise to its integers. Default: no noise.",
            float,
        ),
        RunOption(
            "secure_threshold",
            "With --secure: a client's masks can be opened if more than this part of the others stays. A round in "
            "which fewer come back changes nothing.",
            float,
        ),
    ),
}
OPTIONS = {option.name: option for section in SECTIONS.values() for option in section}
DATA_NAMES = tuple(option.name for option in SECTIONS["Data"] if option.name != "federation")


def usual_clients(dataset: str, partition: str) -> int | None:
    """The number of clients where none is given; None if the partition has a number of its own."""
    if partition in ("natural", "grouped_dominant"):
        return None
    return 20 if dataset == "digits" else 100
