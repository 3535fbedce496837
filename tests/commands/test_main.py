"""The command line, run as a user runs it: in a process of its own."""

import importlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

import shardmap as sm
from shardmap.__main__ import COMMANDS
from tests.command_line import ROOT, call, python, shardmap

# Runs the command line, or other code, in a process that cannot import a module.
WITHOUT_MODULE = """
import runpy, sys
sys.modules[{module!r}] = None
{code}
"""
RUN = "sys.argv[1:] = {arguments!r}; runpy.run_module('shardmap', run_name='__main__')"


def without_module(module, *arguments, code=RUN):
    code = code.format(arguments=list(arguments))
    return python("-c", WITHOUT_MODULE.format(module=module, code=code))


def test_no_command_says_what_there_is():
    result = shardmap()
    assert result.returncode == 0
    assert result.stderr == ""
    assert "usage: python -m shardmap COMMAND" in result.stdout
    for name, command in COMMANDS.items():
        assert re.search(
            rf"^  {name} +{re.escape(command.summary)}$", result.stdout, re.M
        )
    assert shardmap("--help").stdout == result.stdout


def test_an_unknown_command_gets_one_line_and_code_2():
    result = shardmap("dmeo")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "python -m shardmap: unknown command 'dmeo' (did you mean demo?); the commands "
        "are: demo, picture, explain, run, old, doctor\n"
    )


def test_the_version():
    assert shardmap("--version").stdout == f"shardmap {sm.__version__}\n"


def test_help_imports_neither_jax_nor_numpy():
    program = (
        "import sys, runpy\n"
        "for argument in ['--help'], ['--version'], ['nothing'], []:\n"
        "    sys.argv[1:] = argument\n"
        "    try: runpy.run_module('shardmap', run_name='__main__')\n"
        "    except SystemExit: pass\n"
        "print({'jax', 'numpy', 'argparse'} & {*sys.modules}, file=sys.stderr)"
    )
    assert python("-c", program).stderr.endswith("set()\n")


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["doctor", "picture"])
def test_settings_that_jax_cannot_read_get_one_line_and_code_2(command):
    result = shardmap(command, "--help", JAX_NUM_CPU_DEVICES="x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"python -m shardmap: {command} cannot start: ValueError: Invalid value "
        '"x" for JAX flag jax_num_cpu_devices\n'
    )


def test_the_console_script_is_this_program():
    setup = (ROOT / "setup.py").read_text()
    assert '"shardmap = shardmap.__main__:console"' in setup
    program = "import sys; sys.argv[1:] = ['-V']; import shardmap.__main__ as m; {}"
    result = python("-c", program.format("m.console()"))
    assert (result.returncode, result.stdout) == (0, f"shardmap {sm.__version__}\n")


# Other tests run the commands of the other two.
@pytest.mark.deep
@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"demo", "doctor"}))
def test_the_examples_of_a_help_text_work(name, tmp_path):
    """In a folder with the script that they name, and nothing else."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv)")
    help_text = call(importlib.import_module(COMMANDS[name].module).main, "--help")
    assert (help_text.returncode, help_text.stderr) == (0, "")
    examples = re.findall(r"^  python -m (shardmap .*)$", help_text.stdout, re.M)
    assert examples
    for example in examples:
        result = shardmap(*shlex.split(example)[1:], cwd=tmp_path)
        if "--on" in example and result.returncode == 2:
            assert "pip install libtpu" in result.stderr  # It is not needed here.
            continue
        assert (result.returncode, result.stderr) == (0, ""), example
        assert result.stdout


def test_a_reader_that_goes_away_ends_it_quietly():
    """As `head` does, before anything is written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardmap"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(300) == 128 + signal.SIGPIPE
    process.stderr.close()


@pytest.mark.deep
def test_control_c_ends_it_quietly(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time; print('waiting', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "shardmap", "explain", f"{tmp_path}/slow.py:f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) == (b"", b"")
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.deep
def test_text_that_no_encoding_has_is_still_written():
    """A file name need not be text; shown on a terminal of ASCII it is escaped."""
    result = shardmap(
        *("picture", "P('é')", "--shape", "2", "--mesh", "é=1"),
        PYTHONIOENCODING="ascii",
    )
    assert result.stderr == ""
    assert result.stdout.startswith("P('\\xe9') on a mesh of \\xe9=1\n")


def test_a_missing_extra_gets_one_line_and_code_2():
    result = without_module("sklearn", "demo")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "python -m shardmap: demo needs sklearn, which is not installed; "
        "in a clone of shardmap, run: pip install '.[demo]'\n"
    )


@pytest.mark.deep
def test_help_needs_no_extra():
    result = without_module("sklearn", "demo", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--epochs" in result.stdout


@pytest.fixture(scope="module")
def demo():
    return shardmap("demo", "--epochs", "0")  # CI runs `make demo`.


@pytest.mark.deep
def test_the_demo_ends_with_what_to_do_next(demo):
    own, others = demo.stdout.splitlines()[-2:]
    assert own == "Next: read shardmap/demo.py, which is the whole program."
    assert others.startswith("For a function of yours: python -m shardmap explain ")


@pytest.mark.deep
def test_the_demo_fails_when_it_has_not_learnt(demo):
    assert demo.stderr == ""
    assert demo.returncode == 1
    assert "MISS held-out accuracy 0.000" in demo.stdout


@pytest.mark.deep
def test_the_demo_gives_jaxlib_threads_enough():
    """Before JAX asks for them."""
    result = python(
        "-c",
        "import os, sys; import shardmap.demo as demo\n"
        "demo.load_digits = lambda rng: sys.exit(os.environ['NPROC'])\n"
        "demo.main([])",
    )
    assert int(result.stderr) >= 64
