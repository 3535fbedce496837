"""The line of the user's program that made an equation."""

import functools
import inspect
import pathlib
import re
import sys
import sysconfig
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from shardmap._jax.primitives import calls_of, frames_of
from shardmap._jax.types import Equation
from shardmap.units import short_path

# Frames of these folders are not the user's.
_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        pathlib.Path(jax.__file__).parent,
        pathlib.Path(__file__).parent,
    )
)
# Installed packages, such as a library of layers.
_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")}
)


def source_of(equation: Equation, around: str = "") -> str | None:
    """The innermost line of the user's program, as ``file:line (function)``.

    Args:
      equation: the equation.
      around: the line of the call that it is inside of, which is better than one of an
        installed package.
    """
    return user_line(frames_of(equation, _is_of_a_library), around)


def call_of(equation: Equation) -> Hashable:
    """The user's calls that made an equation: the same in each step of a loop."""
    return tuple(calls_of(equation, _is_of_a_library))


@functools.lru_cache(maxsize=1024)
def _is_of_a_library(file_name: str) -> bool:
    return not file_name or file_name.startswith((*_LIBRARIES, "<frozen"))


def user_line(stack: Iterable[tuple[str, int, str]], around: str = "") -> str | None:
    """The innermost line of the user's code, or else of an installed package.

    Args:
      stack: file, line and function of each frame, innermost first.
      around: what to return in place of a line of an installed package.
    """
    installed = None
    for file_name, number, function in stack:
        if _is_of_a_library(file_name):
            continue
        if not file_name.startswith(_INSTALLED):
            return _line(file_name, number, function)
        installed = installed or (file_name, number, function)
    return around or (None if installed is None else _line(*installed))


def definition_of(fun: Callable[..., Any]) -> str | None:
    """The line where a function is defined; None for functions of JAX or C."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if code is None:
        return None
    return user_line([(code.co_filename, code.co_firstlineno, code.co_name)])


def _line(file_name: str, number: int, function: str) -> str:
    """The line, with the file relative to the current directory if inside."""
    function = function.replace(".<locals>", "")
    if (cell := _cell(file_name)) is not None:
        return f"{cell}:{number} ({function})"
    return f"{short_path(file_name)}:{number} ({function})"


def _cell(file_name: str) -> str | None:
    """The name of a notebook's cell, such as ``In[2]``; None for a file."""
    named = re.match(r"<ipython-input-(\d+)-", file_name)
    if named is not None:
        return f"In[{named[1]}]"
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # Older versions have no such names.
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    name = None if name_of is None else name_of(file_name)
    return None if name is None else str(name[1])
