"""Starting a program of process_programs/ in several processes."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "process_programs"
SECONDS = 600


def start(count, devices, program, *arguments, **environment):
    """Runs a program in processes of its own, and gives what they wrote."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "shardmap", "run"),
            *("-n", str(count), "--devices-per-process", str(devices)),
            *("--grace", "3", str(PROGRAMS / program), *arguments),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
    )
