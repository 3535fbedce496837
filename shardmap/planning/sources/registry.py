"""How values of a type are put on devices, and opened in other processes.

A type is registered with two functions: one describes a value, the other opens it.
"""

import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shardmap.arrays import array_likes
from shardmap.arrays.array_likes import Handler
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


def register_shard_handler(
    cls: type,
    handler: Handler | None = None,
    *,
    describe: Describe | None = None,
    reopen: Reopen | None = None,
    grain: Grain | None = None,
) -> None:
    """Registers how values of a type are put on devices and opened in other processes.

    Maps then accept such values as arrays. `numpy.memmap` and other values with
    ``shape``, ``dtype`` and ``__getitem__`` need no handler: each device reads its own
    slice. `plan` accepts both; a shard reads its own slices if it can.

    Args:
      cls: the type. It also applies to derived types without a handler of their own.
        Its values have ``shape`` and ``dtype``.
      handler: ``handler(value, sharding)`` returns a `jax.Array` with the shape of
        ``value`` and this `jax.sharding.Sharding`. `jax.make_array_from_callback` reads
        the part of one device at a time. A later handler for the same type replaces it.
      describe: ``describe(value)`` returns a dict, which pickle can send, that says
        where the value is stored, or None if other processes cannot open it. Its
        ``"place"`` is equal for equal values. Shards of a plan in other processes then
        read the value themselves. `numpy.memmap`, h5py and zarr need no such function.
      reopen: ``reopen(said, writable)`` opens the value in another process. It must be
        a function of a module, because it is pickled by name.
      grain: ``grain(value)`` returns, for each axis, the length of the cells that one
        process at a time may write, or None if other processes may not write. Without
        it, the process that runs the plan writes.

    Raises:
      TypeError: ``cls`` is not a type, another argument is not callable, or ``handler``
        does not take two arguments.
      ValueError: JAX itself shards values of ``cls``.

    Example:
      >>> from shardmap.arrays.array_likes import device_put_array_like
      >>> class Squares:
      ...     shape, dtype = (4,), np.dtype("int32")
      >>> def put(value, sharding):
      ...     def part(index):
      ...         return np.arange(4, dtype=value.dtype)[index] ** 2
      ...     return jax.make_array_from_callback(value.shape, sharding, part)
      >>> register_shard_handler(Squares, put)
      >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> device_put_array_like(Squares(), sharding)
      Array([0, 1, 4, 9], dtype=int32)
    """
    if not inspect.isclass(cls):
        raise TypeError(f"register_shard_handler takes a type, got {shown(cls)}.")
    travels = describe is not None and reopen is not None
    functions = {"describe": describe, "reopen": reopen, "grain": grain}
    for name, function in functions.items():
        if not (function is None or callable(function)):
            raise TypeError(
                f"register_shard_handler takes a function as {name}, got "
                f"{shown(function)} for {cls.__name__}."
            )
    if not travels and any(functions.values()):
        missing = "reopen" if reopen is None else "describe"
        raise TypeError(
            f"register_shard_handler got no {missing} for {cls.__name__}: give both "
            "describe and reopen, or neither."
        )
    if not (callable(handler) or (handler is None and travels)):
        raise TypeError(
            "register_shard_handler takes a function of a value and a sharding, got "
            f"{shown(handler)} for {cls.__name__}."
        )
    if handler is not None and not takes(2, handler):
        raise TypeError(
            "register_shard_handler takes a function of a value and a sharding, but "
            f"the one for {cls.__name__} takes {inspect.signature(handler)}. A handler "
            "of a value, devices and indices, as JAX had them, is registered by "
            f"shardmap.compat.shard_arg_handlers[{cls.__name__}] = handler."
        )
    if issubclass(cls, jax.Array | np.generic | bool | int | float | complex) or (
        cls is np.ndarray
    ):
        raise ValueError(
            f"register_shard_handler cannot change how {cls.__name__} is laid out: JAX "
            "does that itself. Register a type of your own."
        )
    if handler is not None:
        array_likes.HANDLERS[cls] = handler
    if describe is not None and reopen is not None:
        name = type_name(cls)
        register_opener(name, Opener(name, describe, reopen, grain))


def takes(count: int, function: Callable[..., object]) -> bool:
    """Whether a function can be called with so many positional arguments.

    >>> takes(2, lambda value, sharding: value), takes(2, lambda x, devices, indices: x)
    (True, False)
    """
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # It has no signature.
        return True
    except TypeError:
        return False
    return True
