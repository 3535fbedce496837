"""Where in the user's program an equation was written."""

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from shardmap._jax.types import Equation

# Frames in here are not the user's.
_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        pathlib.Path(jax.__file__).parent,
        pathlib.Path(__file__).parents[2],
    )
)


def source_of(equation: Equation) -> str | None:
    """The innermost line of the user's program, as ``file:line (function)``."""
    traceback: Any = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*_LIBRARIES, "<frozen")):
            return _line(frame.file_name, frame.line_num, frame.function_name)
    return None


def definition_of(fun: Callable[..., Any]) -> str | None:
    """Where a function is defined, in the same way; None if it is not in Python."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if code is None:
        return None
    return _line(code.co_filename, code.co_firstlineno, code.co_name)


def _line(file_name: str, number: int, function: str) -> str:
    """The line, the file relative to the current directory if it is inside it."""
    path = pathlib.Path(file_name)
    if path.is_relative_to(pathlib.Path.cwd()):
        path = path.relative_to(pathlib.Path.cwd())
    return f"{path}:{number} ({function})"
