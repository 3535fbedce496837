"""Descriptions of values in files and stores, by which other processes open them.

A type is registered with two functions: one describes a value, the other opens it.
"""

import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shardmap.units import error_text, shown

Description: TypeAlias = Mapping[str, Any]
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
    """A value for another process, which may not know its type.

    Attributes:
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
        main, why = sys.modules["__main__"], ""
        module = getattr(self.reopen, "__module__", None)
        is_typed_in = module == main.__name__ and not hasattr(main, "__file__")
        try:
            pickle.dumps(self)
        except Exception as error:
            why = f" ({error_text(error)})"
        if why or is_typed_in:
            raise TypeError(
                f"register_shard_handler: other processes cannot import reopen of "
                f"{self.kind}, {shown(self.reopen)}{why}. Define the function at the "
                "top of a module or script."
            )

    @property
    def place(self) -> tuple[str, Any]:
        """It is equal for the same file or dataset."""
        return self.kind, self.description.get("place")


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


def pickled(place: Any, value: Any) -> Description:
    """The description of a value that knows by itself how it is opened elsewhere."""
    return {"place": place, "pickle": pickle.dumps(value)}


def unpickled(description: Description, writable: bool) -> Any:
    return _unpickled(description["pickle"])


@functools.lru_cache(maxsize=256)
def _unpickled(content: bytes) -> Any:
    return pickle.loads(content)


def remote_ref(value: object) -> RemoteRef | None:
    """The description of a value; None if other processes cannot open it."""
    for cls in type(value).__mro__:
        opener = _openers.get(type_name(cls))
        if opener is None:
            continue
        description = opener.describe(value)
        if description is None:
            return None
        cells = None if opener.grain is None else opener.grain(value)
        grain = None if cells is None else tuple(map(int, cells))
        return RemoteRef(opener.name, description, opener.reopen, grain)
    return None
