"""What ``jax.ops`` and ``jax.lax`` had in their first years."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardmap._jax.types import PyTree

T = TypeVar("T")

__all__ = [
    "index_add",
    "index_max",
    "index_min",
    "index_mul",
    "index_update",
    "tie_in",
    "xla_computation",
]


def index_update(
    x: ArrayLike, idx: Any, y: ArrayLike, *_: object, **__: object
) -> jax.Array:
    """``x.at[idx].set(y)``.

    >>> index_update(jnp.zeros(3), 1, 5)
    Array([0., 5., 0.], dtype=float32)
    """
    return jnp.asarray(x).at[idx].set(y)


def index_add(
    x: ArrayLike, idx: Any, y: ArrayLike, *_: object, **__: object
) -> jax.Array:
    """``x.at[idx].add(y)``."""
    return jnp.asarray(x).at[idx].add(y)


def index_mul(
    x: ArrayLike, idx: Any, y: ArrayLike, *_: object, **__: object
) -> jax.Array:
    """``x.at[idx].multiply(y)``."""
    return jnp.asarray(x).at[idx].multiply(y)


def index_min(
    x: ArrayLike, idx: Any, y: ArrayLike, *_: object, **__: object
) -> jax.Array:
    """``x.at[idx].min(y)``."""
    return jnp.asarray(x).at[idx].min(y)


def index_max(
    x: ArrayLike, idx: Any, y: ArrayLike, *_: object, **__: object
) -> jax.Array:
    """``x.at[idx].max(y)``."""
    return jnp.asarray(x).at[idx].max(y)


def tie_in(x: object, y: T) -> T:
    """``y``, of which ``x`` was to be a part until JAX 0.2.

    >>> tie_in(1, 2)
    2
    """
    return y


def xla_computation(
    fun: Callable[..., PyTree], *_: object, **options: Any
) -> Callable[..., Any]:
    """What gives the XLA program of a function, which has ``as_hlo_text``.

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
