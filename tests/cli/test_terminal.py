"""Terminals that do not know all characters are shown what they can show."""

import io
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tfpfl.cli import main
from tfpfl.cli.terminal import show_what_it_can

SHOW = """
from tfpfl.cli.group import main
@main.command()
def show():
    print("96.34 \\u00b1 0.43")
main(["show"])
"""


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_a_command_in_a_locale_of_ascii_ends_well(locale):
    """As in cron and in small containers, for a Python that does not take UTF-8 by itself there."""
    environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    found = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, check=False)
    assert (found.returncode, found.stdout) == (0, b"96.34 +- 0.43\n"), found.stderr.decode()


@pytest.mark.slow
def test_the_tables_of_a_run(a_run):
    found = [CliRunner(charset=charset).invoke(main, ["evaluate", str(a_run)]) for charset in ("ascii", "utf-8")]
    assert [done.exit_code for done in found] == [0, 0], found
    texts = [done.output.replace("±", "+-").replace("│", " ").replace("|", " ") for done in found]
    numbers = [[line.split() for line in text.splitlines() if " +- " in line] for text in texts]
    assert numbers[0] == numbers[1] and len(numbers[0]) > 5


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("±×–…", "ascii", b"+-x-..."),
        ("±×–…", "latin-1", b"\xb1\xd7-..."),
        ("café ﬁt 漢 ٣", "ascii", b"cafe fit ? ?"),
        ("runs/\udcff", "utf-8", b"runs/\xff"),
        ("\ud800", "utf-8", b"?"),
        ("all of it: ± 漢", "utf-8", "all of it: ± 漢".encode()),
    ],
)
def test_characters_that_are_not_there(text, encoding, shown):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show_what_it_can(file, io.StringIO())
    file.write(text)
    file.flush()
    assert file.buffer.getvalue() == shown
