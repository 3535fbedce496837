"""JAX's and XLA's errors whose texts are read; their classes alone do not tell them."""

import contextlib
import re
from collections.abc import Collection, Hashable, Iterator
from traceback import walk_tb

import jax
import numpy as np

from shardmap._jax.types import PyTree

_UNBOUND = re.compile(r"(?:Found an )?(unbound axis name: (.*?))(?:\. To fix this.*)?")
_REMEDY = ". Give the map that is meant this axis_name"
_BOUND = ", or use one that is bound here: "


@contextlib.contextmanager
def explained_axis_names(
    *bound: Hashable, mesh_axes: Collection[str] = ()
) -> Iterator[None]:
    """Context in which JAX's error for an unbound axis name lists the bound ones.

    JAX's own text advises `jax.shard_map`. Its error for a `jax.lax.pcast` and the
    like, whose result has a type that only a mesh allows, names the class of that type.

    Args:
      *bound: the names that are bound here.
      mesh_axes: those that the map is laid over, which collectives do not know.
    """
    try:
        yield
    except NameError as error:
        text = str(error)
        if (unbound := _UNBOUND.fullmatch(text)) is None:
            raise
        if unbound[2] in mesh_axes:
            instead = [repr(name) for name in bound]
            write = f"Write {instead[0]}, or pass" if instead else "Pass"
            error.args = (
                f"{unbound[2]!r} is a mesh axis: collectives in spmap use axis_name. "
                f"{write} axis_name={unbound[2]!r}",
            )
            raise
        if _REMEDY not in text:
            text = unbound[1] + _REMEDY
        for name in bound:
            text += f"{', ' if _BOUND in text else _BOUND}{name!r}"
        error.args = (text,)
        raise
    except (AssertionError, ValueError) as error:
        a_type = jax.core.ShapedArray((), np.dtype(bool)).manual_axis_type
        if type(a_type).__name__ not in str(error):
            raise
        called = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
        what, remedy = "jax.lax.pcast and jax.lax.pvary are", "the cast out"
        if "all_gather" in called:  # Of JAX 0.10; 0.12 needs no type there.
            what, remedy = "to= of jax.lax.all_gather is", "to= out"
        raise ValueError(
            f"{what} for jax.shard_map: in a map no value is typed by the axes that it "
            f"differs along. Leave {remedy}; the value is the same."
        ) from error


def prefix_error(prefix: PyTree, tree: PyTree, name: str) -> str:
    """How JAX says that ``prefix``, called ``name``, is no prefix of ``tree``."""
    try:
        jax.tree.broadcast(prefix, tree)
    except ValueError as error:
        return str(error).replace("broadcast_prefix prefix_tree", name)
    return ""


def is_lost_connection(error: Exception) -> bool:
    """Whether an error of a run means that another process cannot be reached.

    XLA's errors have one class. On CPU, those of a collective name the library that
    connects the processes.
    """
    return "gloo" in str(error).lower()


def is_too_large(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether a compiler refuses a program for which a device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error)
