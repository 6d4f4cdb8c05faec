"""One seed, two stacks: TensorFlow 2.14 with Keras 2, which TFF needs, and the newest with Keras 3.

TFPFL_OTHER_PYTHON names the Python of the other one (`make test-newest` makes one).
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
OTHER = os.environ.get("TFPFL_OTHER_PYTHON")


def results(python: str, path: Path) -> dict:
    done = subprocess.run(
        [python, "-m", "helpers.one_seed", path],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(path) as found:
        return dict(found)


@pytest.mark.skipif(not OTHER, reason="no other stack is named (set TFPFL_OTHER_PYTHON)")
def test_every_algorithm_ends_alike_on_both(tmp_path):
    ours, theirs = results(sys.executable, tmp_path / "ours.npz"), results(OTHER, tmp_path / "theirs.npz")
    stacks = str(ours.pop("stack")), str(theirs.pop("stack"))
    assert stacks[0] != stacks[1], "that is the same stack"
    assert ours.keys() == theirs.keys()
    differ = {name: float(np.abs(np.float64(ours[name]) - theirs[name]).max(initial=0)) for name in ours}
    worst = max(differ, key=differ.get)
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    assert differ[worst] < 1e-5, f"{stacks[0]} and {stacks[1]}: {worst} differs by {differ[worst]:.1e}"
