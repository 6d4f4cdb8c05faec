"""One run of a study, in its own process: `python -m tfpfl.studies.study.worker`.

Its standard input is JSON, {"config": the entries of `RunConfig`, "folder": the run folder, "parent": the process
that starts it, "code": from `sent`, "path": the `sys.path` of that process}. It creates the run, or continues it. Exit
codes: 0 done, `DIVERGED` diverged; any other failed, and the last line on standard error says why.
"""

import base64
import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

DIVERGED = 3
_PR_SET_PDEATHSIG = 1


def sent(config: Any) -> list[dict]:
    """The code of the user's own method and metrics, as it was checked, for the process that does the run."""
    from tfpfl.runs.own_methods import code_of, metrics_of

    method = code_of(config)
    codes = [*([method] if method else []), *metrics_of(config).values()]
    return [
        {"entry": code.entry, "content": base64.b64encode(code.content).decode(), "path": str(code.path)}
        for code in codes
    ]


def _load(code: dict) -> None:
    from tfpfl.runs.own_methods import Code, again, metric_again

    is_metric = "direction" in code["entry"]
    found = Code(code["entry"], base64.b64decode(code["content"]), Path(code["path"]))
    metric_again(found) if is_metric else again(found)


def end_with_parent() -> None:
    """Lets the kernel kill this process when the thread ends that has started it: a study leaves no process behind.

    Only Linux can do so.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Does the run; returns the exit code."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = json.load(sys.stdin)
    if os.getppid() != asked["parent"]:
        return 1  # the study was killed before this process asked the kernel to end with it
    from tfpfl.algorithms.own import told  # only now, because they import TensorFlow
    from tfpfl.checks import TfpflError, one_line
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run
    from tfpfl.runs.training import DivergedError

    folder = Path(asked["folder"])
    sys.path += [place for place in asked["path"] if place not in sys.path]
    try:
        for code in asked["code"]:
            _load(code)
        config = RunConfig(**asked["config"])
        with Run.create_or_resume(config, folder) as run:
            if not run.is_complete:
                run.train()
    except DivergedError:
        return DIVERGED
    except (TfpflError, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    except Exception as error:
        traceback.print_exc()
        if short := told(error):  # the last line says why the run failed
            print(short, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
