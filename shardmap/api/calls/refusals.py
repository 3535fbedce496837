"""Errors of calls of a mapped function."""

import collections
from collections.abc import Callable, Sequence

import jax
import numpy as np

from shardmap._jax.types import Aval, Value
from shardmap.api.calls.statics import Static


def check_hashable(
    what: str, parameter: str, statics: Sequence[tuple[int, Static]]
) -> None:
    """Checks that static arguments are hashable.

    Args:
      what: the map, for the error.
      parameter: which names static arguments, for the error.
      statics: the arguments, by position.
    """
    bad = [
        f"argument {argnum} of type {type(static.value)}"
        for argnum, static in statics
        if not _is_hashable(static)
    ]
    if bad:
        raise ValueError(
            f"Non-hashable static arguments are not supported in {what}: "
            f"{', '.join(bad)}. What {parameter} names needs __hash__ and __eq__."
        )


def _is_hashable(value: Static) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def no_array(
    what: str, name: str, leaf: Value, aval: Aval | None, static_parameter: str
) -> TypeError:
    """The error for an argument that is not an array of numbers.

    Args:
      what: the map.
      name: of the argument.
      leaf: the argument.
      aval: what JAX takes it for, if it does.
      static_parameter: which names static arguments.
    """
    if aval is not None:
        text = (
            f"is a reference, {aval}, which a map does not take: its elements run on "
            "several devices. Pass its value, x[...], and return what to write to it."
        )
    elif isinstance(leaf, np.ndarray | np.generic):
        text = (
            f"is a NumPy array of dtype {leaf.dtype}, which JAX cannot compute with. "
            "Give numbers, such as x.astype('float32')."
        )
    else:
        text = (
            f"of type {type(leaf)} is not a valid JAX type. Give its position in "
            f"{static_parameter} if it is to be a compile-time constant."
        )
    return TypeError(f"{what} argument {name} {text}")


def check_there(
    what: str,
    leaves: Sequence[Value],
    donated: Sequence[bool],
    names: Callable[[], list[str]],
) -> None:
    """Checks that arrays are not deleted, and donated ones are passed once.

    Args:
      what: the map, for the error.
      leaves: its arguments.
      donated: which of them are donated.
      names: of the leaves, for the error.
    """
    gone = [
        k
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.is_deleted()
    ]
    if gone:
        listed = ", ".join(names()[k] for k in gone)
        raise RuntimeError(
            f"{what}: Array has been deleted: {listed}. Its memory was donated to an "
            "earlier call, or freed; use what that call returned."
        )
    arrays = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    twice = repeated([leaves[k] for k in arrays])
    for k in arrays:
        if donated[k] and id(leaves[k]) in twice:
            same = [names()[j] for j in arrays if leaves[j] is leaves[k]]
            raise ValueError(
                f"{what}: {names()[k]} is donated, and the same array is passed more "
                f"than once, as {', '.join(same)}: its memory can be used once. Pass a "
                "copy, such as x.copy()."
            )


def repeated(objects: Sequence[object]) -> frozenset[int]:
    """The `id` of each object that occurs more than once."""
    ids = list(map(id, objects))
    if len(set(ids)) == len(ids):
        return frozenset()
    return frozenset(k for k, count in collections.Counter(ids).items() if count > 1)
