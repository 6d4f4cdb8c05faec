"""One run of a study, in its own process: `python -m tfpfl.studies.study.worker`.

Its standard input is JSON, {"config": the entries of `RunConfig`, "folder": the run folder, "parent": the process
that starts it}. It creates the run, or continues it. Exit codes: 0 done, `DIVERGED` diverged; any other failed, and the
last line on standard error says why.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

DIVERGED = 3
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Does the run; returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a study that is killed leaves no runs behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = json.load(sys.stdin)
    if os.getppid() != asked["parent"]:
        return 1  # the study was killed before this process asked the kernel to end with it
    from tfpfl.checks import TfpflError, one_line  # only now, because they import TensorFlow
    from tfpfl.runs.config import RunConfig
    from tfpfl.runs.run import Run
    from tfpfl.runs.training import DivergedError

    folder = Path(asked["folder"])
    try:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
