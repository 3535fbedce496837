"""Which line of the user's something is of."""

import functools
import inspect
import pathlib
import sys
import sysconfig
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap
import shardmap as sm
from shardmap.source import definition_of, user_line

JAX = f"{pathlib.Path(jax.__file__).parent}/_src/numpy/lax_numpy.py"
OURS = f"{pathlib.Path(shardmap.__file__).parent}/api/spmap.py"
INSTALLED = f"{sysconfig.get_path('purelib')}/flax/linen/linear.py"
USERS = "/home/user/train.py"


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ([(USERS, 3, "step")], f"{USERS}:3 (step)"),
        ([(JAX, 9, "dot"), (USERS, 3, "step")], f"{USERS}:3 (step)"),
        ([(OURS, 9, "spmap"), (USERS, 3, "step")], f"{USERS}:3 (step)"),
        ([(INSTALLED, 9, "call"), (USERS, 3, "step")], f"{USERS}:3 (step)"),
        ([(USERS, 5, "inner"), (USERS, 3, "step")], f"{USERS}:5 (inner)"),
        ([("<frozen runpy>", 1, "run"), (USERS, 3, "step")], f"{USERS}:3 (step)"),
        ([("", 0, ""), (USERS, 3, "step")], f"{USERS}:3 (step)"),
        ([(JAX, 1, "f"), (INSTALLED, 9, "call")], f"{INSTALLED}:9 (call)"),
        ([(INSTALLED, 9, "one"), (INSTALLED, 8, "two")], f"{INSTALLED}:9 (one)"),
        ([(JAX, 9, "dot"), (OURS, 9, "spmap")], None),
        ([], None),
    ],
)
def test_the_innermost_line_of_the_users(stack, line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # What is installed may be below the current folder.
    assert user_line(stack) == line


def test_files_below_the_current_folder_are_relative_to_it():
    inside = pathlib.Path.cwd() / "models" / "net.py"
    assert user_line([(str(inside), 7, "call")]) == "models/net.py:7 (call)"


class Shell:
    """What `IPython.get_ipython` gives in a notebook, as far as it is asked."""

    cells: ClassVar = {"/tmp/ipykernel_7/123.py": 2}

    class compile:
        @staticmethod
        def format_code_name(name):
            number = Shell.cells.get(name)
            return None if number is None else ("Cell", f"In[{number}]")


def test_cells_of_a_notebook_are_called_as_there(monkeypatch):
    notebook = types.SimpleNamespace(get_ipython=Shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    for name, called in (
        ("/tmp/ipykernel_7/123.py", "In[2]"),
        ("<ipython-input-5-0a1b2c>", "In[5]"),
        (USERS, USERS),
    ):
        assert user_line([(name, 3, "step")]) == f"{called}:3 (step)"
    # IPython may be imported where no notebook is.
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)
    assert user_line([(USERS, 3, "step")]) == f"{USERS}:3 (step)"


def test_plans_name_cells_of_a_notebook(monkeypatch):
    notebook = types.SimpleNamespace(get_ipython=Shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    cell = compile(
        "def f(x):\n    return x.sum(0) + 1", "/tmp/ipykernel_7/123.py", "exec"
    )
    exec(cell, names := {})
    plan = sm.plan(names["f"], np.ones((4, 2), np.float32), in_slices={0: 2})
    assert "reduce_sum of shape (2,) (In[2]:2 (f))" in str(plan.explain())


def test_a_function_is_defined_where_it_is_written_whatever_wraps_it():
    def fun(x):
        return x

    @functools.wraps(fun)
    def wrapper(x):
        return fun(x)

    _, start = inspect.getsourcelines(fun)
    for each in (fun, wrapper, jax.jit(fun)):
        assert f"{pathlib.Path(__file__).name}:{start} (fun)" in definition_of(each)


@pytest.mark.parametrize("fun", [jnp.sin, abs, functools.partial(abs)])
def test_what_the_user_has_not_written_has_no_line(fun):
    assert definition_of(fun) is None


def test_what_jax_keeps_without_lines_is_of_the_line_around_it():
    """Such as the rule of a `jax.custom_vjp` under `jax.checkpoint`."""

    @jax.custom_vjp
    def fun(x):
        return sm.spmap(lambda y: lax.pmean(y, ("i", "j")) * y, "j")(x)

    def backward(x, ct):
        return (sm.spmap(lambda y, c: lax.psum(y * c, "i"), "j")(x, ct),)

    fun.defvjp(lambda x: (fun(x), x), backward)
    mapped = sm.spmap(jax.checkpoint(fun), "i")
    report = sm.explain(jax.grad(lambda x: mapped(x).sum()))(jnp.ones((2, 4)))
    sources = [each.source for each in (*report.collectives, *report.axes)]
    assert len(sources) >= 3
    here = f"{pathlib.Path(__file__).relative_to(pathlib.Path.cwd())}:"
    assert [each for each in sources if not (each or "").startswith(here)] == []
