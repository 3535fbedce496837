"""Tests that need the compilers of TPUs and GPUs: all are left out, loudly, without.

`pip install -e '.[tpu-compiler,gpu-compiler]'` brings them.
"""

import importlib.util
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def _is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


MISSING = [m for m in ("libtpu", "jax_plugins.xla_cuda12") if not _is_there(m)]
WHY = f"not installed: {', '.join(MISSING)}"


@pytest.hookimpl
def pytest_collection_modifyitems(items):
    for item in items:
        if MISSING and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(WHY))


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.section("NOTHING IN tests/compilers RAN", red=True, bold=True)
        terminalreporter.line(WHY)
