"""Runs commands: in a process of its own, as a user does, or here, which is quicker."""

import contextlib
import io
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
# Users choose their devices, and their programs broadcast and promote, as the libraries
# do that they use.
SETTINGS = (
    *("XLA_FLAGS", "JAX_PLATFORMS"),
    *("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION"),
)


def python(*arguments, cwd=ROOT, timeout=300, without=SETTINGS, **environment):
    """Runs Python with this repository, without some of the settings of tests."""
    kept = {k: v for k, v in os.environ.items() if k not in without}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
    )


def shardmap(*arguments, cwd=ROOT, **environment):
    return python("-m", "shardmap", *arguments, cwd=cwd, **environment)


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def call(main, *arguments):
    """What a command does with arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    return Result(code, out.getvalue(), err.getvalue())


def refusal(main, *arguments):
    """The reason why a command refuses its arguments, after checking how it does so."""
    result = call(main, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    start = f"python -m shardmap {main.__module__.rpartition('.')[2]}: "
    assert line.startswith(start)
    return line.removeprefix(start)
