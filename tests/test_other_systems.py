"""Systems other than Linux, as far as Linux can play them: what they lack is not asked for, or one line says so."""

import os
import subprocess
import sys

from tfpfl.engines.graphs import default_threads
from tfpfl.studies.study import worker


def test_cores_are_counted_where_the_system_does_not_say_which_a_process_may_use(monkeypatch):
    assert default_threads() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert default_threads() == os.cpu_count()


def test_a_run_of_a_study_starts_where_no_kernel_ends_it_with_its_parent(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(worker.ctypes, "CDLL", None)  # no library has prctl there
    worker.end_with_parent()


def test_on_windows_one_line_says_what_to_do():
    program = "import sys; sys.platform = 'win32'; import tfpfl"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: tfpfl does not run on Windows itself: install it in")
