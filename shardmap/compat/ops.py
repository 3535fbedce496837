"""Functions that ``jax.ops`` and ``jax.lax`` had in their first years."""

import functools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardmap._jax.types import PyTree

T = TypeVar("T")

__all__ = [
    "NINF",
    "NZERO",
    "PZERO",
    "disable_x64",
    "index_add",
    "index_max",
    "index_min",
    "index_mul",
    "index_update",
    "pdot",
    "tie_in",
    "to_dlpack",
    "xeinsum",
    "xla_computation",
]


NINF, NZERO, PZERO = -jnp.inf, -0.0, 0.0

disable_x64 = functools.partial(jax.enable_x64, False)


def to_dlpack(x: jax.Array, **_: object) -> Any:
    """The array as a capsule of DLPack."""
    return x.__dlpack__()


def _update(name: str, method: str) -> Callable[..., jax.Array]:
    def update(
        x: ArrayLike, idx: Any, y: ArrayLike, *_: object, **__: object
    ) -> jax.Array:
        updated: jax.Array = getattr(jnp.asarray(x).at[idx], method)(y)
        return updated

    update.__name__ = update.__qualname__ = name
    update.__doc__ = f"``x.at[idx].{method}(y)``."
    return update


index_update = _update("index_update", "set")
index_add = _update("index_add", "add")
index_mul = _update("index_mul", "multiply")
index_min = _update("index_min", "min")
index_max = _update("index_max", "max")


def tie_in(x: object, y: T) -> T:
    """Returns ``y``. Until JAX 0.2 it made ``y`` depend on ``x``.

    >>> tie_in(1, 2)
    2
    """
    return y


def pdot(
    x: ArrayLike,
    y: ArrayLike,
    axis_name: Hashable,
    pos_contract: Sequence[Sequence[int]] = ((), ()),
    pos_batch: Sequence[Sequence[int]] = ((), ()),
    precision: Any = None,
) -> jax.Array:
    """The product of two arrays, summed over named axes and dimensions.

    Args:
      x: the first array.
      y: the second.
      axis_name: the name of a mapped axis, or several.
      pos_contract: the dimensions of ``x`` and of ``y`` to sum over.
      pos_batch: the batch dimensions of both.
      precision: as in `jax.lax.dot_general`.

    >>> product = jax.vmap(lambda x, y: pdot(x, y, "i"), axis_name="i", out_axes=None)
    >>> print(product(jnp.arange(3), jnp.arange(3)))
    5
    """
    names = tuple(axis_name) if isinstance(axis_name, list | tuple) else (axis_name,)
    (contract_x, contract_y), (batch_x, batch_y) = pos_contract, pos_batch
    product = jax.lax.dot_general(
        jnp.asarray(x),
        jnp.asarray(y),
        ((contract_x, contract_y), (batch_x, batch_y)),
        precision=precision,
    )
    return jax.lax.psum(product, names)


def xeinsum(spec: str, *operands: ArrayLike) -> jax.Array:
    """`jax.numpy.einsum`, in which ``{i,j}`` are names of mapped axes.

    Args:
      spec: for example ``"ab{i},bc{i}->ac"``. Named axes that the result does not have
        are summed over.
      *operands: the arrays.

    >>> inner = lambda x, y: xeinsum("{i},{i}->", x, y)
    >>> product = jax.vmap(inner, axis_name="i", out_axes=None)
    >>> print(product(jnp.arange(3), jnp.arange(3)))
    5
    """
    inputs, _, output = spec.replace(" ", "").partition("->")
    of_inputs, of_output = (
        [name for names in re.findall("{(.*?)}", part) for name in names.split(",")]
        for part in (inputs, output)
    )
    product = jnp.einsum(re.sub("{.*?}", "", f"{inputs}->{output}"), *operands)
    summed = dict.fromkeys(name for name in of_inputs if name not in of_output)
    return jax.lax.psum(product, tuple(summed)) if summed else product


def xla_computation(
    fun: Callable[..., PyTree], *_: object, **options: Any
) -> Callable[..., Any]:
    """Returns a function that returns the XLA program, which has ``as_hlo_text``.

    Args:
      fun: the function.
      **options: ``static_argnums`` and ``donate_argnums`` are those of `jax.jit`.

    >>> "HloModule" in xla_computation(jnp.sin)(1.0).as_hlo_text()
    True
    """
    known = {
        name: options[name]
        for name in ("static_argnums", "donate_argnums")
        if name in options
    }
    jitted = jax.jit(fun, **known)

    def computation(*args: PyTree, **kwargs: PyTree) -> Any:
        return jitted.lower(*args, **kwargs).compiler_ir("hlo")

    return computation
