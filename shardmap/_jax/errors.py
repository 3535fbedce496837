"""JAX's and XLA's errors whose texts are read; their classes alone do not tell them."""

import contextlib
import linecache
import re
from collections.abc import Collection, Hashable, Iterator
from traceback import walk_tb

import jax
import jax.numpy as jnp
import numpy as np

_UNBOUND = re.compile(r"(?:Found an )?(unbound axis name: (.*?))(?:\. To fix this.*)?")
_REMEDY = ". Give the map that is meant this axis_name"
_BOUND = ", or use one that is bound here: "

_WITHOUT_VALUES = {
    jax.errors.TracerBoolConversionError: " Use jax.numpy.where or jax.lax.cond.",
    jax.errors.TracerIntegerConversionError: " For a loop, use jax.lax.fori_loop.",
    jax.errors.NonConcreteBooleanIndexError: ": use jax.numpy.where(mask, x, 0)",
    jax.errors.ConcretizationTypeError: "",
}
"""What a traced function cannot do -> what to do instead."""


@contextlib.contextmanager
def explained_errors(
    *bound: Hashable, mesh_axes: Collection[str] = ()
) -> Iterator[None]:
    """Context in which JAX's errors of a traced function say what to do.

    JAX's text for an unbound axis name advises `jax.shard_map`; here it lists those
    that are ``bound``, and knows the ``mesh_axes`` that a map is laid over. Its error
    for a `jax.lax.pcast` and the like names the class of a type.
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
    except jax.errors.TracerArrayConversionError as error:
        error.args = (_numpy_called(error),)
        raise
    except tuple(_WITHOUT_VALUES) as error:
        text, *_ = str(error).partition("\nSee https://")
        text = text.strip().replace("\n\n", "\n")
        error.args = (text + _WITHOUT_VALUES[type(error)],)
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


def _numpy_called(error: Exception) -> str:
    """Where a traced function calls NumPy, and what to do."""
    where, line = "", ""
    for frame, number in walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("jax", "jaxlib", "numpy", "shardmap"):
            file = frame.f_code.co_filename
            where, line = f" at {file}:{number}", linecache.getline(file, number)
    called = re.search(r"\bnp\.(\w+)\(", line)
    of_jax = called and hasattr(jnp, called[1]) and f", as jnp.{called[1]}"
    return (
        f"the function calls NumPy{where}, which needs the values of its arrays before "
        f"they are known: write it with jax.numpy{of_jax or ''}"
    )


def is_lost_connection(error: Exception) -> bool:
    """Whether an error of a run means that another process cannot be reached.

    XLA's errors have one class. Those of a collective on CPU name their library.
    """
    return "gloo" in str(error).lower()


def is_too_large(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether a compiler refuses a program for which a device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error)
