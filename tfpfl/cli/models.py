"""The commands model and predict, which give a client's personal model to others, or use it."""

from pathlib import Path

import click

from tfpfl.checks import InvalidArgument
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH
from tfpfl.cli.options import allow_code_option, open_run

SHOWN = 20  # examples that are printed if there is no --out

_decoded = click.option(
    "--decoded",
    is_flag=True,
    help="The examples are decoded already, as scale and shift of the federation say. Default: they are raw, as the "
    "federation stores them, such as pixels from 0 to 255.",
)


@main.command()
@click.argument("run", type=PATH)
@click.option("--client", help="The client whose model is written: its number, from 0, or its name.")
@click.option("--out", type=PATH, help="The file to write, FILE.keras. Default: client_ID.keras.")
@click.option(
    "--all",
    "folder",
    type=PATH,
    help="Write the models of all clients to this new folder, as client_ID.keras. It replaces --client and --out.",
)
@click.option("--logits", is_flag=True, help="The model shall give logits. Default: probabilities of the classes.")
@_decoded
@allow_code_option
def model(run, client, out, folder, logits, decoded, allow_code):
    """Write the personal model of a client of RUN as a Keras file.

    The file needs nothing of tfpfl: keras.models.load_model reads it, with the major version of Keras that wrote it. A
    file of the same name that ends in .json says which classes the outputs stand for.
    """
    from tfpfl.runs.client_model import ClientModels, check_new_file

    if (client is None) == (folder is None):
        raise click.UsageError("give either --client, for one model, or --all FOLDER, for those of all clients")
    if folder is not None and out is not None:
        raise click.UsageError("--out is for one client: with --all, the folder says where the models are written")
    if out is not None:
        check_new_file(out)
    how = {"inputs": "decoded" if decoded else "raw", "outputs": "logits" if logits else "probabilities"}
    with open_run(run, allow_code, engine="local") as opened:
        models = ClientModels(opened)
        if folder is not None:
            written = models.save_all(folder, **how)
            never = 0 if opened.took_part is None else len(written) - len(opened.took_part)
            told = f", {never} of them of clients that never took part" if never else ""
            click.echo(f"Written to {folder}: {len(written)} models{told}")
            return
        made = models.keras_model(client, **how)
        out = out or Path(f"client_{made.about['client']}.keras")
        card = made.save(out)
        click.echo(f"{_named(made.about)} after round {made.about['round']}, {made.about['algorithm']}; {made.story}")
        taken, given = (made.about[what] for what in ("input", "output"))
        click.echo(f"{how['inputs']} examples {_shapes(taken)} -> {given} of {_outputs(made)}")
        click.echo(f"Written to {out} and {card}")


@main.command()
@click.argument("run", type=PATH)
@click.option("--client", required=True, help="The client whose model predicts: its number, from 0, or its name.")
@click.option(
    "--input",
    "file",
    type=PATH,
    required=True,
    help="The examples: .npy, an array [N, ...]; .npz, with an array x and perhaps labels y; .csv or .parquet, one "
    "example in each row, with the columns that `tfpfl partition --from` read; or a picture, .png or .jpg.",
)
@click.option(
    "--out",
    type=PATH,
    help="Write the probabilities of all classes to this CSV file. Default: only the most probable class is printed.",
)
@_decoded
@allow_code_option
def predict(run, client, file, out, decoded, allow_code):
    """Predict with the personal model of a client of RUN."""
    from tfpfl.runs.client_model import ClientModels
    from tfpfl.runs.files import csv_text, write_csv
    from tfpfl.runs.inputs import PICTURES, check_tokens, label_outputs, looks_decoded, read_examples

    if decoded and file.suffix.lower() in PICTURES:
        raise click.UsageError(f"--decoded is for arrays: {file} is a picture, whose pixels are raw. Leave it out")
    if out is not None:
        _check_table(out)
    with open_run(run, allow_code, engine="local") as opened:
        federation = opened.federation
        x, y = read_examples(file, federation)
        check_tokens(x, opened.whole, file)
        made = ClientModels(opened).keras_model(client, inputs="decoded" if decoded else "raw")
        classes = made.about["classes"]
        kind = opened.model.kind.label
        is_classes = kind.is_classes
        wanted = None if y is None or not is_classes else label_outputs(y, classes, federation.class_names, file)
        if y is not None and not is_classes:
            click.echo(f"the labels y in {file} are not compared: this run predicts numbers, and no classes", err=True)
        if not made.about["took_part"]:
            click.echo(f"{_named(made.about)}: {made.story}", err=True)
        if not decoded and looks_decoded(x, federation):
            click.echo(
                f"no number in {file} is above 1, but raw examples of this run go up to "
                f"{(1 - made.about['input']['shift']) / made.about['input']['scale']:.4g}. If the examples are decoded "
                "already, add --decoded",
                err=True,
            )
    found = made.model.predict(x, batch_size=256, verbose=0)
    if not (found == found).all():
        raise InvalidArgument(f"the model of {_named(made.about)} gives NaN for some of the examples in {file}")
    best = found.argmax(1)
    columns = [f"p({name})" for name in classes]
    rows = [
        {"example": i, "class": classes[k], "probability": float(p[k])}
        for i, (k, p) in enumerate(zip(best.tolist(), found, strict=True))
    ]
    if not is_classes:
        columns = [f"p({name})" if kind.name == "multilabel" else f"predicted {name}" for name in classes]
        rows = [{"example": i} | dict(zip(columns, map(float, p), strict=True)) for i, p in enumerate(found)]
    if out is not None:
        full = [row | dict(zip(columns, map(float, p), strict=True)) for row, p in zip(rows, found, strict=True)]
        write_csv(out, list(full[0]), full)
        click.echo(f"Written to {out}")
    else:
        shown = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows[:SHOWN]]
        click.echo(csv_text(list(rows[0]), shown).replace("\r\n", "\n"), nl=False)
        if len(rows) > SHOWN:
            click.echo(f"... and {len(rows) - SHOWN} more: --out FILE.csv writes all of them")
    if wanted is not None:
        click.echo(f"{(best == wanted).mean():.2%} of the {len(rows)} labels in {file} are predicted")


def _check_table(out):
    """Checks, before any work, that a table can be written to `out` and that nothing is lost by it."""
    from tfpfl.runs.files import check_is_text

    check_is_text(out)
    if out.is_dir() or not out.parent.is_dir():
        what = f"{out} is a folder" if out.is_dir() else f"{out.parent} is not a folder"
        raise InvalidArgument(f"--out {out} cannot be written: {what}. Give the name of a file in a folder that exists")
    if out.is_file() and out.stat().st_size:
        raise InvalidArgument(f"{out} exists already: take another name, or remove it")


def _named(about):
    name = about["client_name"]
    return f"client {about['client']}" + ("" if name == str(about["client"]) else f" ({name})")


def _shapes(taken):
    """The shape of an example, or of each of its arrays."""
    if "shape" in taken:
        return taken["shape"]
    return ", ".join(f"{array['name']} {array['shape']}" for array in taken["arrays"])


def _outputs(made):
    names = made.about["classes"]
    what = "outputs" if "kind" in made.about else "classes"  # of classes, nothing is said of the kind
    return f"{len(names)} {what}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
