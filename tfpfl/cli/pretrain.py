"""The command pretrain, which trains a backbone on some classes of a data set."""

import click

from tfpfl.cli.ending import SAME_COMMAND, resumable
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, SectionedCommand


@main.command(
    cls=SectionedCommand,
    headings={
        "Data": ("dataset", "only_classes", "validation", "allow_download"),
        "Training": ("network", "epochs", "batch_size", "rate", "seed"),
    },
)
@click.argument("out", type=PATH)
@click.option("--dataset", default="omniglot", help="The data set, see `tfpfl datasets`.")
@click.option(
    "--only-classes",
    metavar="CLASSES",
    help="The classes to train on: first_half or second_half; for omniglot background (30 alphabets) or evaluation "
    "(the other 20); or names, such as cat,dog. Default: background for omniglot, otherwise first_half.",
)
@click.option(
    "--network",
    default="omniglot_4conv",
    help="A network of tfpfl, see `tfpfl run --help`, FILE.keras, whose weights are the first ones, or "
    "FILE.py:FUNCTION, a function that gives a Keras model.",
)
@click.option("--epochs", type=click.IntRange(1), default=10, help="Number of passes over the training examples.")
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Number of examples in a step of Adam.")
@click.option("--rate", type=float, default=1e-3, help="Learning rate of the optimizer, Adam.")
@click.option(
    "--validation",
    type=float,
    default=0.1,
    help="Fraction of the training examples of each class that is set aside, to choose the best epoch.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    help="Seed of the first weights, of the validation examples and of the order of examples.",
)
@click.option("--allow-download", is_flag=True, help="Let TensorFlow Datasets download the data set.")
def pretrain(out, dataset, only_classes, network, epochs, batch_size, rate, validation, seed, allow_download):
    """Train a backbone on some classes of a data set.

    It is written to the file OUT, which ends with .keras, for --network OUT in runs on the other classes: with the same
    --dataset and another --only-classes. A file .json beside it says how it was made; a run whose federation has
    classes of the backbone's training says so.

    You may interrupt it at any time: the same command goes on after the last finished epoch.
    """
    from tfpfl.data import load_source
    from tfpfl.models.network_file import check_new
    from tfpfl.runs.pretraining import Settings
    from tfpfl.runs.pretraining import pretrain as train

    check_new(out)  # before the data are read, which can take minutes
    settings = Settings(network, epochs, batch_size, rate, validation, seed)
    if only_classes is None:
        only_classes = "background" if dataset == "omniglot" else "first_half"
    augment = "none" if dataset == "omniglot" else "before_split"  # no rotations; other data sets have none anyway
    source = load_source(dataset, allow_download=allow_download, only_classes=only_classes, augment=augment)
    with resumable(SAME_COMMAND, lambda: "finished epochs are saved"):
        found = train(source, out, settings, click.echo)
    click.echo(
        f"{len(source.class_names)} classes of {dataset}: {100 * found['test_accuracy']:.1f} % of the test examples; "
        f"written to {out} and {out.with_suffix('.json')}"
    )
