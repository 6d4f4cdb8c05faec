"""The command line. TensorFlow is imported only by the commands that need it, so that `--help` answers at once."""

from tfpfl.cli import (  # noqa: F401
    advice,
    backbone,
    data,
    device,
    flower,
    live,
    machines,
    models,
    pretrain,
    reproduce,
    runs,
    studies,
    study,
    suite,
)
from tfpfl.cli.group import main

__all__ = ["main"]
