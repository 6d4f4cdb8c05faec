"""Writes a Flower app for a run: its rounds on Flower's nodes, with the server step and the device of live rounds.

The app's files stand in the folder flower_app as they are written; only its settings are added.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path

from tfpfl.checks import InvalidArgument
from tfpfl.live.asking import Asking
from tfpfl.live.rules import Rules
from tfpfl.live.serve import TOKENS

FILES = ("pyproject.toml", "README.md", "server_app.py", "client_app.py")
_TEMPLATES = Path(__file__).with_name("flower_app")


def write_app(run, out: Path, rules: Rules, patience: float = 120.0) -> None:
    """Writes the app, and makes the bundles and the tokens of the run, which nodes need before the server starts.

    Args:
        run: an open `tfpfl.runs.run.Run` of PFLEGO; its rounds so far are continued.
        out: the folder to make; it may be there and empty.
        rules: how rounds are run.
        patience: seconds after which a node that has not answered is asked again.

    Raises:
        InvalidArgument: devices cannot take part in this run, `out` is not empty, or `patience` is not positive.
    """
    if not 0 < patience < 1e9:
        raise InvalidArgument(f"patience must be a positive number of seconds, found {patience}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(f"{out} is there already: name a folder that is not")
    with closing(Asking(run, rules)):  # refuses what cannot be done
        pass
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(_TEMPLATES / name, out / name)
    settings = {
        "run": str(run.folder.resolve()),
        "wait-for": rules.wait_for,
        "deadline": float(rules.deadline),
        "quorum": float(rules.quorum),
        "payload": rules.payload,
        "max-norm": float(rules.max_norm or 0.0),  # 0: any gradient is taken
        "patience": float(patience),
    }
    with open(out / "pyproject.toml", "a", encoding="utf-8") as file:
        file.writelines(f"{name} = {toml_of(value)}\n" for name, value in settings.items())


def toml_of(value) -> str:
    """A text or a number as TOML has it: JSON, but that characters beyond U+FFFF stand for themselves."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def next_steps(run, out: Path) -> str:
    """What to do with the app, as a text of a few lines."""
    return (
        f"{out} is a Flower app; its README.md says how it is started. Tokens for the nodes: {run.folder / TOKENS}\n"
        "Flower reports its use and looks for new versions; to switch that off, set FLWR_TELEMETRY_ENABLED=0 and "
        "FLWR_DISABLE_UPDATE_CHECK=1."
    )
