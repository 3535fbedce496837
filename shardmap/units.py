"""Reading and writing sizes, times and values; checks of options."""

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable
from typing import Any

UNITS = {
    "": 1,
    **{unit: 1000**k for k, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**k for k, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
}

_LONGEST_SHOWN = 400
"""Characters of a value in an error message."""


def bytes_of(what: str, value: float | str) -> int:
    """A number of bytes that is given as one, such as ``2e9``, or as text.

    Raises:
      TypeError: it is neither.
      ValueError: it is not positive, or not such a text.

    >>> bytes_of("memory", "2 GB"), bytes_of("memory", "1.5 KiB"), bytes_of("memory", 3)
    (2000000000, 1536, 3)
    """
    count: float
    if isinstance(value, str):
        units = {unit.lower(): size for unit, size in UNITS.items()}
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in units:
            raise ValueError(
                f"{what} must be a number of bytes, or a text such as '2 GB', "
                f"'1.5 GiB' or '900MB', got {shown(value)}"
            )
        count = float(match[1]) * units[match[2].lower()]
    else:
        try:
            whole = isinstance(value, float) and value.is_integer()
            count = integer_of(what, int(value) if whole else value)
        except TypeError:
            raise TypeError(
                f"{what} must be a number of bytes or a text such as '2 GB', got "
                f"{shown(value)} of type {type(value).__name__}"
            ) from None
    if count < 1:
        raise ValueError(f"{what} must be at least one byte, got {shown(value)}")
    return int(count)


def shown(value: object) -> str:
    """``repr(value)`` for an error message, cut where it is long.

    >>> shown([0, 1]), len(shown(list(range(100_000)))) < 300
    ('[0, 1]', True)
    """
    try:
        text = repr(value)
    except Exception as error:  # Of the value's own, which must not hide the message.
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[: _LONGEST_SHOWN // 2]}... ({len(text):,} characters)"


def error_text(error: BaseException) -> str:
    """The type and the text of an error.

    >>> error_text(KeyError("x"))
    "KeyError: 'x'"
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def printable(text: str) -> str:
    """The text with control characters and direction marks written as escapes.

    >>> print(printable("a\\x1b[31m b\\u202e"))
    a\\x1b[31m b\\u202e
    """
    return "".join(
        c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode()
        for c in text
    )


def short_path(file: str) -> str:
    """The path of a file, relative to the working directory if it is below that."""
    return file.removeprefix(os.path.join(os.getcwd(), ""))


def integer_of(what: str, value: Any, least: int | None = None, why: str = "") -> int:
    """An integer, of NumPy or of Python.

    Raises:
      TypeError: it is none.
      ValueError: it is less than ``least``; the message ends with ``why``.

    >>> integer_of("retries", 2, least=0)
    2
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{what} must be an integer, got {shown(value)}")
    if least is not None and number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}{why}")
    return number


def is_integer(value: object) -> bool:
    """Whether a value is an int, of NumPy or of Python, and no bool.

    >>> is_integer(2), is_integer(True), is_integer(2.0)
    (True, False, False)
    """
    import numpy as np  # The command line's help does without it.

    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_bool(what: str, value: Any) -> None:
    """Raises a TypeError for what is no bool, of NumPy or of Python."""
    import numpy as np  # The command line's help does without it.

    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{what} must be True or False, got {shown(value)}")


def size(count: float) -> str:
    """A number of bytes for people.

    >>> size(1536), size(12)
    ('1.5 KiB', '12 B')
    """
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        amount /= 1024
    return f"{amount:.1f} TiB"


def size_of(part: int, whole: int) -> str:
    """A number of bytes out of others, for people.

    >>> size_of(3_435_973_837, 16_911_433_728), size_of(1536, 16_911_433_728)
    ('3.2 of 15.75 GiB', '1.5 KiB of 15.75 GiB')
    """
    units = [unit for unit in ("B", "KiB", "MiB", "GiB", "TiB") if UNITS[unit] <= whole]
    unit = units[-1] if units else "B"
    shown = size(part)
    if part >= 0.1 * UNITS[unit]:
        shown = f"{part / UNITS[unit]:,.1f}"
    return f"{shown} of {whole / UNITS[unit]:,.4g} {unit}"


def count(number: float) -> str:
    """A number of things for people.

    >>> count(12), count(2_150_000_000), count(999_999)
    ('12', '2.15 G', '1 M')
    """
    amount = number
    for unit in ("", " k", " M", " G", " T"):
        if amount < 999.5:
            return f"{amount:.3g}{unit}"
        amount /= 1000
    return f"{amount:.3g} P"


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.0000123), duration(2.5)
    ('12.3 us', '2.5 s')
    """
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


class WithOptions(functools.partial[Any]):
    """A decorator: a function transformation with its options.

    >>> def double(fun=None, *, times=1, strict=False):
    ...     return fun
    >>> WithOptions(double, times=2, strict=False)
    <decorator double(times=2)>
    """

    def __repr__(self) -> str:
        parameters = inspect.signature(self.func).parameters
        given = [
            f"{name}={shown(value)}"
            for name, value in self.keywords.items()
            if value is not parameters[name].default
        ]
        return f"<decorator {self.func.__name__}({', '.join(given)})>"


PIECES = "give the lengths of the pieces as in_slices, such as {0: Pieces(256)}"
STATIC = "give positions as static_broadcasted_argnums, as to jax.pmap"

INSTEAD = {
    "chunked": dict.fromkeys(("batch_size", "chunk_size", "chunks"), PIECES),
    "spmap": {
        **dict.fromkeys(("static_argnums", "static_argnames"), STATIC),
        **dict.fromkeys(("in_specs", "in_shardings"), "use mesh_map, for blocks"),
        "num_devices": "give devices=jax.devices()[:n]",
        "axis": "give in_axes=",
        "name": "give axis_name=",
        "chunk_size": "give batch_size=",
    },
}
"""By transformation, the options that others have -> what to write instead."""


def decorator_with_options(transformation: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function transformation be used as a decorator with options.

    >>> @decorator_with_options
    ... def double(fun=None, times=1):
    ...     return lambda x: times * fun(x)
    >>> double(abs, 2)(-3), double(times=2)(abs)(-3)
    (6, 6)
    """

    who = transformation.__name__
    instead = INSTEAD.get(who, {})
    by_position = [
        parameter.name
        for parameter in inspect.signature(transformation).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(transformation)
    def transform(fun: Any = None, *args: Any, **options: Any) -> Any:
        for option, text in instead.items():
            if option in options:
                raise TypeError(f"{who} has no {option}=: {text}")
        if len(args) >= len(by_position):
            raise TypeError(
                f"{who} takes {', '.join(by_position)} by position, and other options "
                "by keyword"
            )
        if fun is not None:
            return transformation(fun, *args, **options)
        try:
            given = inspect.signature(transformation).bind(None, *args, **options)
        except TypeError as error:
            raise TypeError(f"{who}() {error}") from None
        del given.arguments["fun"]
        return WithOptions(transform, **given.arguments)

    return transform


class Constant:
    """A constant of a module, which prints and pickles as its name."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name


class Auto(Constant):
    """Cuts an axis into as few pieces as fit into the given memory.

    Example:
      >>> import jax.numpy as jnp
      >>> import shardmap as sm
      >>> total = sm.chunked(lambda x: jnp.sin(x).sum(), {0: sm.AUTO}, memory="1 kB")
      >>> print(round(float(total(jnp.ones(1000))), 3))
      841.471
    """

    name = "AUTO"


AUTO = Auto()
"""As few pieces as fit into the memory that is given."""
