"""The outputs on the page "Before you have the machine" are those of its programs."""

import contextlib
import io
import os
import re
import shlex
import sys

from tests.command_line import ROOT, python

PAGE = (ROOT / "docs/before_the_machine.md").read_text()
(PROGRAM,) = re.findall(r"(?s)^```py\n(.*?)^```", PAGE, re.M)
OUTPUT, TABLE = re.findall(r"(?s)^```text\n(.*?)^```", PAGE, re.M)


def test_the_program_prints_what_the_page_shows():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(PROGRAM, "page", "exec"), {})
    assert printed.getvalue() == OUTPUT


def test_the_command_prints_the_table(tmp_path):
    # Alone, the program has nothing to print.
    (tmp_path / "train.py").write_text(PROGRAM.partition("report =")[0])
    command, _, table = TABLE.partition("\n")
    words = shlex.split(command.removeprefix("$ python "))
    path = os.pathsep.join(sys.path)
    result = python(*words, cwd=tmp_path, PYTHONPATH=path, JAX_PLATFORMS="cpu")
    assert result.stdout == table, result.stderr
    assert result.returncode == 0
