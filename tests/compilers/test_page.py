"""The output on the page "Before you have the machine" is that of its command."""

import os
import re
import shlex
import sys

from tests.command_line import ROOT, python

PAGE = (ROOT / "docs/before_the_machine.md").read_text()
PROGRAM, _ = re.findall(r"(?s)^```py\n(.*?)^```", PAGE, re.M)
(TABLE,) = re.findall(r"(?s)^```text\n(.*?)^```", PAGE, re.M)


def without_peaks(text):
    """The compilers of JAX 0.10 and 0.12 take up to a tenth more or less memory."""
    return re.sub(r"[\d.]+ of ", "of ", text)


def test_the_command_prints_the_table(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command, _, table = TABLE.partition("\n")
    words = shlex.split(command.removeprefix("$ python "))
    path = os.pathsep.join(sys.path)
    environment = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "COLUMNS": "80"}
    result = python(*words, cwd=tmp_path, timeout=1800, **environment)
    assert without_peaks(result.stdout) == without_peaks(table), result.stderr
    assert result.returncode == 0
