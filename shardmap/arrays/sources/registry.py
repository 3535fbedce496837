"""Descriptions of values, by which another process can open them.

A value in a file or a store is sent to other processes as a description, such as a path
and an offset, and they read and write it themselves. A type is registered with two
functions: one describes a value, the other opens it.
"""

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shardmap.units import error_text, shown

About: TypeAlias = Mapping[str, Any]
"""Where a value is, in JSON's types only."""

Describe: TypeAlias = Callable[[Any], About | None]
Reopen: TypeAlias = Callable[[About, bool], Any]
Grain: TypeAlias = Callable[[Any], Sequence[int] | None]


class Kind(NamedTuple):
    """How values of one type are described and opened. See `register_shard_handler`."""

    name: str
    describe: Describe
    reopen: Reopen
    grain: Grain | None = None


class Away(NamedTuple):
    """A description of a value for another process.

    Attributes:
      kind: the name of its type.
      about: the description.
      reopen: the function that opens it, for processes without the registered type.
      grain: the lengths of the cells that one process at a time may write, per axis;
        None if other processes may not write it.
    """

    kind: str
    about: About
    reopen: Reopen
    grain: tuple[int, ...] | None

    def open(self, writable: bool = False) -> Any:
        return self.reopen(self.about, writable)

    def check_pickles(self) -> None:
        """Raises a TypeError if a process of a pool cannot import ``reopen``."""
        main = sys.modules["__main__"]
        module = getattr(self.reopen, "__module__", None)
        is_typed_in = module == main.__name__ and not hasattr(main, "__file__")
        try:
            pickle.dumps(self.reopen)
        except Exception as error:
            why = f" ({error_text(error)})"
        else:
            why = ""
        if why or is_typed_in:
            raise TypeError(
                f"register_shard_handler: other processes cannot import reopen of "
                f"{self.kind}, {shown(self.reopen)}{why}. Define the function at the "
                "top of a module or script."
            )

    @property
    def place(self) -> str:
        """A key that is equal for the same file or dataset."""
        return f"{self.kind} {json.dumps(self.about.get('place'), sort_keys=True)}"


_kinds: dict[str, Kind] = {}


def register_kind(cls: str, kind: Kind) -> None:
    """Registers a type by its name, as it may not be imported yet."""
    _kinds[cls] = kind


def type_name(cls: type) -> str:
    """The name of a type: its package, and its name there.

    >>> import numpy as np
    >>> type_name(np.memmap)
    'numpy.memmap'
    """
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def kind_named(name: str) -> Kind | None:
    """The registered kind of this name."""
    return next((kind for kind in _kinds.values() if kind.name == name), None)


def away(value: object) -> Away | None:
    """The description of a value; None if other processes cannot open it."""
    for cls in type(value).__mro__:
        kind = _kinds.get(type_name(cls))
        if kind is None:
            continue
        about = kind.describe(value)
        if about is None:
            return None
        try:
            json.dumps(about)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"describe of {type_name(cls)} must give what JSON can hold, got "
                f"{shown(about)}: {error}"
            ) from None
        cells = None if kind.grain is None else kind.grain(value)
        grain = None if cells is None else tuple(map(int, cells))
        return Away(kind.name, about, kind.reopen, grain)
    return None
