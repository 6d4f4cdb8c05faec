"""The command line. TensorFlow is imported only by the commands that need it, so that `--help` answers at once."""

from tfpfl.cli import advice, backbone, data, flower, live, machines, models, reproduce, runs, studies, study, suite  # noqa: F401
from tfpfl.cli.group import main
from tfpfl.cli.runs import run

__all__ = ["main", "run"]
