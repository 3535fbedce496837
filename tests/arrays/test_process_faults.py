"""When a process fails the others: each row of the table in docs/processes.md."""

import json
import os
import re
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from shardmap.commands import run
from tests.arrays.start import PROGRAMS, ROOT, SECONDS, start

LOST = "total: a collective with the other processes failed. One of them has ended"
AT_ONCE = r"after \d s: "
WAITED = (
    r"after \d+ s: spmap of <lambda>: waited 2 s for the other processes to call it "
    r"too: <lambda>, "
)
TWO_SECONDS = {"SHARDMAP_PROCESS_TIMEOUT": "2"}


class Fault(NamedTuple):
    """A row of the table in docs/processes.md, and how it is tried.

    Attributes:
      row: how its first cell begins.
      says: how its second cell begins, the errors as they are printed.
      environment: what makes the time of its third cell short.
      message: what process 0 says, with the time that it has waited.
      code: the exit code of the command.
    """

    row: str
    says: str
    environment: dict[str, str]
    message: str
    code: int


FAULTS = {
    "calls another function": Fault(
        "calls another function",
        "RuntimeError in all of them, with what each called",
        {},
        AT_ONCE + r"spmap of <lambda>: the processes do not call the same function.*\n"
        r"  \* process 0: <lambda>, .*\n  \* process 1: <lambda>, ",
        3,
    ),
    "stays away from a new function": Fault(
        "has come to the end of its script, or does not come to the first call",
        "RuntimeError: waited ... s for the other processes",
        TWO_SECONDS,
        WAITED + r".*Processes \[0, 1\] take part",
        3,
    ),
    "stays away from a jit": Fault(
        "has come to the end of its script, or does not come to the first call",
        "RuntimeError: waited ... s for the other processes",
        TWO_SECONDS,
        WAITED,
        3,
    ),
    "killed": Fault(
        "has been killed",
        "RuntimeError: a collective with the other processes failed",
        {},
        AT_ONCE + LOST,
        137,
    ),
    "raises": Fault(
        "has raised an exception, under `python -m shardmap run`",
        "the same",
        {},
        AT_ONCE + LOST,
        1,
    ),
    "stays away from a known function": Fault(
        "does not come to a later call",
        "CPU: RuntimeError, a collective failed, because of a time-out",
        {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=2"},
        AT_ONCE + rf"{LOST}.*\nbecause of .*Timed out waiting 2000ms",
        3,
    ),
}
# Without `python -m shardmap run`, which would end the others itself.
FAULTS_ALONE = {
    **{
        what: Fault(
            "has raised an exception, or has come to the end of its script, under "
            "another launcher",
            "JAX ends the processes",
            {"INITIALIZE": json.dumps({"shutdown_timeout_seconds": 5})},
            r"DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown",
            -signal.SIGABRT,
        )
        for what in ("raises", "ends early")
    },
    "leaves at once": Fault(
        "has left by `os._exit`, under another launcher",
        "as if it were killed",
        {},
        AT_ONCE + LOST,
        3,
    ),
    "is stopped": Fault(
        "is stopped or cut off",
        "JAX ends the process",
        {"INITIALIZE": json.dumps({"heartbeat_timeout_seconds": 10})},
        r"heartbeat",
        -signal.SIGABRT,
    ),
}
MOST_OF_ALL = {"killed", "stays away from a new function"}


@pytest.mark.deep
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[] if what in MOST_OF_ALL else pytest.mark.deep)
        for what in FAULTS
    ],
)
def test_the_others_do_not_wait_for_ever(what):
    fault = FAULTS[what]
    result = start(2, 1, "failures.py", what, **fault.environment)
    lines = re.findall(r"^\[0\] (.*)", result.stdout, re.MULTILINE)
    assert re.search(fault.message, "\n".join(lines)), result.stdout + result.stderr
    assert result.returncode == fault.code


@pytest.mark.deep
@pytest.mark.parametrize("what", FAULTS_ALONE)
def test_the_others_do_not_wait_for_ever_under_another_launcher(what):
    fault = FAULTS_ALONE[what]
    port = run.free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "failures.py"), what],
            env=run.environment(
                process,
                2,
                1,
                port,
                os.environ | {"PYTHONPATH": str(ROOT)} | fault.environment,
            ),
            stdout=subprocess.DEVNULL if process else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for process in range(2)
    ]
    try:
        said, _ = started[0].communicate(timeout=SECONDS)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert re.search(fault.message, said), said
    assert started[0].returncode == fault.code, said


def test_every_row_of_the_page_is_tried():
    page = (ROOT / "docs" / "processes.md").read_text()
    _, after = page.split("| a process | the others | after |\n")
    _, *lines = after.partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    for faults in FAULTS, FAULTS_ALONE:
        for fault in faults.values():
            (row,) = [row for row in rows if row[0].startswith(fault.row)]
            assert row[1].startswith(fault.says)
    tried = {fault.row for fault in [*FAULTS.values(), *FAULTS_ALONE.values()]}
    assert [row[0] for row in rows if not row[0].startswith(tuple(tried))] == []
