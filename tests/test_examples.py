"""The programs in examples/, run as a user runs them, at a small size.

Each compares itself with a reference and says so in its exit code.
"""

import pathlib
import re

import pytest

from tests.command_line import python

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs/examples.md").read_text()
SMALL = {
    "chains": ["--chains", "12", "--steps", "100"],
    "data_parallel": ["--epochs", "4"],
    "heat": ["--size", "128", "--steps", "50"],
    "pca": ["--rows", "20000", "--pieces", "7"],
    "population": ["--steps", "200"],
    "small_pmap": [],
}
SAYS = {
    "chains": r"the last chain draws the same alone",
    "data_parallel": r"held-out accuracy (0\.9[5-9]|1\.0)",
    "heat": r"a block of \(32, 64\) on each of 8 devices",
    "pca": r"stage 0: 7 shards make .* reads args\[0\] once",
    "small_pmap": r"vmap: the same as spmap",
    "population": r"all of them together: (0\.9[3-9]|1\.0)",
}
SLOW = {"chains", "data_parallel"}
# What is broken, in one line, for each program's checks to find.
BROKEN = {
    "heat": "program.with_halo = lambda block, name, dimension: program.jnp.pad("
    "block, [(1, 1), (0, 0)] if dimension == 0 else [(0, 0), (1, 1)])",
}
# tests/plan/run/disk/test_checkpoint.py runs this one, which is meant to be killed.
ELSEWHERE = {"resume"}


def test_every_program_is_tried():
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert programs - ELSEWHERE == set(SMALL) == set(SAYS)
    assert programs == set(re.findall(r"^\| \[(\w+)\.py\]", PAGE, re.M))
    assert programs == set(re.findall(r"^## (\w+)\.py$", PAGE, re.M))


def without_numbers(line):
    return re.sub(r"-?\d[\d.e+-]*", "#", line).split()


def shown(name):
    """The output of a program on the page of examples, with this size."""
    command = " ".join(["python", f"examples/{name}.py", *SMALL[name]])
    _, _, after = PAGE.partition(f"```bash\n{command}\n```\n\n```text\n")
    output, _, _ = after.partition("```")
    return [line for line in output.splitlines() if line != "..."]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] if name in SLOW else [])
        for name in SMALL
    ],
)
def test_a_program_agrees_with_its_reference(name):
    result = python("-W", "error", ROOT / "examples" / f"{name}.py", *SMALL[name])
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert re.search(SAYS[name], result.stdout)
    printed = [without_numbers(line) for line in result.stdout.splitlines()]
    assert shown(name)
    assert [x for x in shown(name) if without_numbers(x) not in printed] == []


@pytest.mark.deep
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_says_so(name):
    code = (
        f"import sys; from examples import {name} as program; {BROKEN[name]}; "
        f"sys.exit(program.main({SMALL[name]}))"
    )
    result = python("-W", "error", "-c", code)
    assert result.returncode == 1, result.stderr[-2000:]
    assert "Traceback" not in result.stderr
