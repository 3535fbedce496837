"""Finds the values of indices, or that they count along an axis.

Indices that depend on no argument are evaluated with NumPy: JAX would compile each
equation, which takes some 40 ms. A column that counts along an axis of the indices is
recognized at any length: in ``x[jnp.arange(n), y]`` row ``i`` of the indices reads row
``i`` of ``x``, so both are one loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value, made_by


def known_columns(indices: Operand) -> list[np.ndarray | None]:
    """The columns of indices along their last axis, None where one is not known."""
    return [
        None if (known := evaluated(part)) is None else known[..., k]
        for part, k in _columns(indices)
    ]


def one_place(node: Node, columns: tuple[int, ...]) -> dict[int, int]:
    """The axes on which all indices are one known place, and that place.

    Args:
      node: its second operand has the indices, one column per coordinate.
      columns: the axis of the first operand that each column indexes.
    """
    return {
        axis: int(column.flat[0])
        for axis, column in zip(columns, known_columns(node.ins[1]), strict=True)
        if column is not None and column.size and (column == column.flat[0]).all()
    }


def counted(node: Node, columns: tuple[int, ...]) -> dict[int, int]:
    """The axes of a node's first operand that are one loop with one of its indices.

    Args:
      node: its second operand has the indices, one column per coordinate.
      columns: the axis of the first operand that each column indexes.

    Returns:
      Axis of the first operand -> axis of the indices.
    """
    shape, indices_shape = node.in_shapes[0], node.in_shapes[1]
    return {
        axis: along
        for axis, (part, _) in zip(columns, _columns(node.ins[1]), strict=False)
        if (along := _counts_along(part)) is not None
        and along < len(indices_shape) - 1
        and indices_shape[along] == shape[axis] > 1
    }


def _columns(indices: Operand) -> list[tuple[Operand, int]]:
    """For each column of indices, the operand that holds it, and its number there."""
    node, last = made_by(indices, p.concatenate_p), len(indices.shape) - 1
    if node is not None and node.params["dimension"] == last:
        return [column for part in node.ins for column in _columns(part)]
    return [(indices, k) for k in range(indices.shape[last])]


def _counts_along(operand: Operand) -> int | None:
    """The axis along which an operand counts 0, 1, 2, ...; None if it is not known."""
    node = operand.producer
    if node is None or not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    axis = None
    if node.primitive is p.iota_p:
        axis = node.params["dimension"]
    elif node.primitive is p.select_n_p:
        # JAX adds the size of the axis to negative indices.
        if _is_never_less(node.ins[0]):
            axis = _counts_along(node.ins[1])
    elif node.primitive is p.broadcast_in_dim_p:
        inner = _counts_along(node.ins[0])
        if inner is not None and node.in_shapes[0][inner] > 1:
            axis = node.params["broadcast_dimensions"][inner]
    elif node.primitive in MOVES:
        inner = _counts_along(node.ins[0])
        old, new = node.in_shapes[0], node.out_shapes[0]
        # Only axes of size 1 may come and go.
        kept, there = ([k for k, n in enumerate(s) if n != 1] for s in (old, new))
        if inner in kept and [old[k] for k in kept] == [new[k] for k in there]:
            axis = there[kept.index(inner)]
    if axis is None or operand.shape[axis] - 1 > jnp.iinfo(operand.aval.dtype).max:
        return None  # The last counts overflow.
    return int(axis)


MOVES = frozenset({p.convert_element_type_p, p.copy_p, p.reshape_p, p.squeeze_p})


def _is_never_less(operand: Operand) -> bool:
    """Returns True if an operand is ``counts < 0``, which holds nowhere."""
    node = made_by(operand, p.lt_p)
    if node is None:
        return False
    counts, bound = node.ins
    is_low = isinstance(bound, Scalar) and int(np.asarray(bound.value)) <= 0
    return is_low and _counts_along(counts) is not None


def scalar_of(operand: Operand) -> Operand | None:
    """The one value of all elements of an operand; None if it is not known."""
    if isinstance(operand, Scalar) or not operand.shape:
        return operand
    node = made_by(operand, p.broadcast_in_dim_p)
    return None if node is None else scalar_of(node.ins[0])


MOST_ELEMENTS = 2**20
"""The most elements of a constant, and of a value that is evaluated."""

MOST_NODES = 128
"""The most equations that are evaluated for one operand."""


def evaluated(operand: Operand) -> np.ndarray | None:
    """The values of integers that depend on no argument; None if they are not known."""
    if not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    made: dict[Value, np.ndarray | None] = {}

    def value(each: Operand) -> np.ndarray | None:
        if (known := constant(each)) is not None:
            return np.asarray(known, each.aval.dtype)
        if not isinstance(each, Value) or (node := each.producer) is None:
            return None
        if jnp.issubdtype(each.aval.dtype, jnp.inexact):
            return None
        if each in made or each.size > MOST_ELEMENTS or len(made) == MOST_NODES:
            return made.get(each)
        made[each] = None
        function = OF_ELEMENTS.get(node.primitive)
        if function is None and node.primitive in EVALUATORS:
            function = functools.partial(EVALUATORS[node.primitive], node.params)
        if function is None:
            return None
        arrays = [value(x) for x in node.ins]
        if all(array is not None for array in arrays):
            found = function(*arrays)
            made[each] = None if found is None else np.asarray(found, each.aval.dtype)
        return made[each]

    return value(operand)


def constant(operand: Operand) -> Any:
    """A literal, or a small array that the function closed over; None otherwise."""
    found = operand.value if isinstance(operand, Scalar) else operand.constant
    if isinstance(found, jax.core.Tracer):
        return None  # Traced by an outer transformation.
    return None if np.size(found) > MOST_ELEMENTS else found


def _quotient(a: np.ndarray, b: np.ndarray) -> Any:
    """Towards zero, as the division of integers is in JAX."""
    if a.dtype.kind not in "iu" or (b == 0).any():
        return None
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _remainder(a: np.ndarray, b: np.ndarray) -> Any:
    return None if a.dtype.kind not in "iu" or (b == 0).any() else np.fmod(a, b)


def _spread(params: Params, array: np.ndarray) -> Any:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    own = [1] * len(shape)
    for axis, size in zip(dims, array.shape, strict=True):
        own[axis] = size
    return np.broadcast_to(array.reshape(own), shape)


def _counts(params: Params) -> Any:
    shape, axis = params["shape"], params["dimension"]
    dims = {"shape": shape, "broadcast_dimensions": (axis,)}
    return _spread(dims, np.arange(shape[axis]))


def _part(params: Params, array: np.ndarray) -> Any:
    strides = params["strides"] or [1] * array.ndim
    limits = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return array[tuple(slice(*each) for each in limits)]


def _sums(params: Params, array: np.ndarray) -> Any:
    axis, dtype = params["axis"], array.dtype
    if params["reverse"]:
        return np.flip(np.cumsum(np.flip(array, axis), axis, dtype), axis)
    return np.cumsum(array, axis, dtype)


def _added(
    params: Params, array: np.ndarray, indices: np.ndarray, updates: np.ndarray
) -> Any:
    """Numbers added to a vector, as `jnp.nonzero` does."""
    places = indices[..., 0]
    if array.ndim != 1 or updates.size != places.size:
        return None
    inside = (places >= 0) & (places < len(array))
    found = array.copy()
    np.add.at(found, places[inside], updates.reshape(places.shape)[inside])
    return found


OF_ELEMENTS: dict[Any, Callable[..., Any]] = {
    p.add_p: np.add,
    p.and_p: np.bitwise_and,
    p.clamp_p: lambda low, x, high: np.minimum(np.maximum(x, low), high),
    p.convert_element_type_p: np.asarray,
    p.copy_p: np.asarray,
    p.div_p: _quotient,
    p.eq_p: np.equal,
    p.ge_p: np.greater_equal,
    p.gt_p: np.greater,
    p.le_p: np.less_equal,
    p.lt_p: np.less,
    p.max_p: np.maximum,
    p.min_p: np.minimum,
    p.mul_p: np.multiply,
    p.ne_p: np.not_equal,
    p.neg_p: np.negative,
    p.not_p: np.invert,
    p.or_p: np.bitwise_or,
    p.rem_p: _remainder,
    p.select_n_p: lambda which, *cases: np.choose(which.astype(np.int64), cases),
    p.sign_p: np.sign,
    p.sub_p: np.subtract,
}
"""The elementwise primitives that indices are usually made with."""

EVALUATORS: dict[Any, Callable[..., Any]] = {
    p.broadcast_in_dim_p: _spread,
    p.concatenate_p: lambda params, *x: np.concatenate(x, params["dimension"]),
    p.cumsum_p: _sums,
    p.iota_p: _counts,
    p.reduce_sum_p: lambda params, x: np.sum(x, params["axes"], x.dtype),
    p.reshape_p: lambda params, x: x.reshape(params["new_sizes"]),
    p.rev_p: lambda params, x: np.flip(x, params["dimensions"]),
    p.scatter_add_p: _added,
    p.slice_p: _part,
    p.squeeze_p: lambda params, x: np.squeeze(x, params["dimensions"]),
    p.transpose_p: lambda params, x: np.transpose(x, params["permutation"]),
}
"""The others, as functions of their parameters and operands."""
