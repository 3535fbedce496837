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

Description: TypeAlias = Mapping[str, Any]
"""Where a value is, in JSON's types only."""

Describe: TypeAlias = Callable[[Any], Description | None]
Reopen: TypeAlias = Callable[[Description, bool], Any]
Grain: TypeAlias = Callable[[Any], Sequence[int] | None]


class Opener(NamedTuple):
    """How values of one type are described and opened. See `register_shard_handler`."""

    name: str
    describe: Describe
    reopen: Reopen
    grain: Grain | None = None


class RemoteRef(NamedTuple):
    """A description of a value for another process.

    Attributes:
      kind: the name of its type.
      description: the description.
      reopen: the function that opens it, for processes without the registered type.
      grain: the lengths of the cells that one process at a time may write, per axis;
        None if other processes may not write it.
    """

    kind: str
    description: Description
    reopen: Reopen
    grain: tuple[int, ...] | None

    def open(self, writable: bool = False) -> Any:
        return self.reopen(self.description, writable)

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
        return (
            f"{self.kind} {json.dumps(self.description.get('place'), sort_keys=True)}"
        )


_openers: dict[str, Opener] = {}


def register_opener(cls: str, opener: Opener) -> None:
    """Registers a type by its name, as it may not be imported yet."""
    _openers[cls] = opener


def type_name(cls: type) -> str:
    """The name of a type: its package, and its name there.

    >>> import numpy as np
    >>> type_name(np.memmap)
    'numpy.memmap'
    """
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def opener_named(name: str) -> Opener | None:
    """The opener of this name."""
    return next((opener for opener in _openers.values() if opener.name == name), None)


def remote_ref(value: object) -> RemoteRef | None:
    """The description of a value; None if other processes cannot open it."""
    for cls in type(value).__mro__:
        opener = _openers.get(type_name(cls))
        if opener is None:
            continue
        description = opener.describe(value)
        if description is None:
            return None
        try:
            json.dumps(description)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"describe of {type_name(cls)} must give what JSON can hold, got "
                f"{shown(description)}: {error}"
            ) from None
        cells = None if opener.grain is None else opener.grain(value)
        grain = None if cells is None else tuple(map(int, cells))
        return RemoteRef(opener.name, description, opener.reopen, grain)
    return None
