"""The command line. TensorFlow is imported only by the commands that need it, so that `--help` answers at once."""

import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow starts; inherited by TFF's worker
logging.getLogger("tensorflow").setLevel(logging.ERROR)

from tfpfl.cli import data, machines, models, runs, studies, study  # noqa: E402, F401
from tfpfl.cli.group import main  # noqa: E402
from tfpfl.cli.runs import run  # noqa: E402

__all__ = ["main", "run"]
