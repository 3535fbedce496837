"""A value on the first element of a mapped axis, and zeros on the others.

It is how the cotangent of a result that all elements share is given to one of them. As
a linear primitive it keeps no mask between forward and backward.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir

from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Value

first_element_p = jex_core.Primitive("first_element")


def on_first_element(value: Value, axis_name: Hashable) -> Any:
    """``value`` on the first element along the axis, zeros on the others."""
    return first_element_p.bind(value, axes=(axis_name,))


def first_of(value: Value, indices: Value) -> Any:
    """``value`` where ``indices`` are 0, else zeros; indices go along its axis 0."""
    is_first = jnp.expand_dims(indices == 0, range(jnp.ndim(indices), value.ndim))
    return jnp.where(is_first, value, jnp.zeros((), value.dtype))


def _on_this_device(value: Value, *, axes: tuple[Hashable, ...]) -> Any:
    return first_of(value, jax.lax.axis_index(axes))


def _batching_rule(
    vmap: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axes: tuple[Hashable, ...],
) -> tuple[Any, int | None]:
    [value], [dim] = args, dims
    if vmap.name not in axes:
        return first_element_p.bind(value, axes=axes), dim
    if dim is None:
        block = jnp.broadcast_to(value, (vmap.size, *jnp.shape(value)))
    else:
        block = jnp.moveaxis(value, dim, 0)
    return first_of(block, np.arange(vmap.size)), 0


def _transpose_rule(
    cotangent: Any, _: object, *, axes: tuple[Hashable, ...]
) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [first_element_p.bind(cotangent, axes=axes)]


first_element_p.def_abstract_eval(lambda value, *, axes: value)
first_element_p.def_impl(_on_this_device)
def_batching(first_element_p, _batching_rule)
ad.deflinear2(first_element_p, _transpose_rule)
mlir.register_lowering(
    first_element_p, mlir.lower_fun(_on_this_device, multiple_results=False)
)
