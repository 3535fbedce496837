"""The command line, run as a user runs it: in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Runs the command line, or other code, in a process that cannot import a module.
WITHOUT_MODULE = """
import runpy, sys
sys.modules[{module!r}] = None
{code}
"""
RUN = "sys.argv[1:] = {arguments!r}; runpy.run_module('shardmap', run_name='__main__')"


def python(*arguments):
    """Runs Python here, without the settings that the tests themselves run under."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=env,
    )


def shardmap(*arguments):
    return python("-m", "shardmap", *arguments)


def without_module(module, *arguments, code=RUN):
    code = code.format(arguments=list(arguments))
    return python("-c", WITHOUT_MODULE.format(module=module, code=code))


def test_no_command_says_what_there_is():
    result = shardmap()
    assert result.returncode == 0
    assert result.stderr == ""
    assert "usage: python -m shardmap COMMAND" in result.stdout
    assert re.search(r"^  demo +train a digit classifier", result.stdout, re.M)
    assert shardmap("--help").stdout == result.stdout


def test_an_unknown_command_gets_one_line_and_code_2():
    result = shardmap("dmeo")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "python -m shardmap: unknown command 'dmeo'; the commands are: demo\n"
    )


def test_a_missing_extra_gets_one_line_and_code_2():
    result = without_module("sklearn", "demo")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "python -m shardmap: demo needs sklearn, which is not installed; "
        "pip install 'shardmap[demo]' brings it\n"
    )


def test_the_missing_extra_is_what_makes_the_difference():
    """The test above takes sklearn away, and does nothing else to the process."""
    result = without_module("sklearn", code="import sklearn")
    assert "ModuleNotFoundError: import of sklearn halted" in result.stderr
    assert without_module("no_such_module", "demo", "--help").returncode == 0


def test_everything_but_the_demo_works_without_extras():
    assert without_module("sklearn").returncode == 0


@pytest.fixture(scope="module")
def demo():
    return shardmap("demo")


def test_the_demo_passes_its_own_checks(demo):
    assert demo.stderr == ""
    assert demo.returncode == 0
    accuracy = re.search(r"^ok   held-out accuracy (\S+),", demo.stdout, re.M)
    assert float(accuracy[1]) >= 0.95
    difference = re.search(r"^ok   .* at most (\S+) from the same", demo.stdout, re.M)
    assert float(difference[1]) < 1e-5


def test_the_demo_shows_progress(demo):
    epochs = re.findall(r"^  epoch +(\d+) of 20 .* loss \d", demo.stdout, re.M)
    assert [int(epoch) for epoch in epochs] == list(range(1, 21))


def test_the_demo_shows_the_layout_that_the_readme_shows(demo):
    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"^```text\n(images\n.*?)^```", readme, re.M | re.S)
    assert shown in demo.stdout


def test_the_demo_shows_the_spec_and_the_proto_of_the_batch(demo):
    shown = demo.stdout.partition("The images' spec\n")[2].split("\n\n")[0]
    assert [line.strip() for line in shown.splitlines()] == [
        "ShardingSpec((Chunked((8,)), None, None), (ShardedAxis(0),))",
        "and its OpSharding proto",
        "type: OTHER",
        "tile_assignment_dimensions: 8",
        "tile_assignment_dimensions: 1",
        "tile_assignment_dimensions: 1",
        "iota_reshape_dims: 8",
        "iota_transpose_perm: 0",
    ]


def test_the_demo_fails_when_it_has_not_learnt():
    result = shardmap("demo", "--epochs", "0")
    assert result.returncode == 1
    assert "MISS held-out accuracy 0.000" in result.stdout
