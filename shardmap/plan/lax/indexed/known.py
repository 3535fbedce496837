"""What is known of indices when a plan is made.

Columns that depend on no argument are computed, with NumPy: JAX would compile each of
their equations. A column that counts along an axis of the indices is found in the
equations that make it, however long it is: in ``x[jnp.arange(n), y]`` row ``i`` of the
indices looks at row ``i`` of ``x``, so that both are one loop.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value

T = TypeVar("T")


def known_columns(indices: Operand) -> list[np.ndarray | None]:
    """The columns of indices along their last axis, None where one is not known."""

    def known(part: Operand) -> list[np.ndarray | None] | None:
        whole = evaluated(part)
        return None if whole is None else [*np.moveaxis(whole, -1, 0)]

    return _by_column(indices, known)


def counted(node: Node, columns: tuple[int, ...]) -> dict[int, int]:
    """The axes of a node's first operand that are one loop with one of its indices.

    Args:
      node: its second operand has the indices, one column per coordinate.
      columns: the axis of the first operand that each column is a place of.

    Returns:
      Axis of the first operand -> axis of the indices.
    """
    shape, indices_shape = node.in_shapes[0], node.in_shapes[1]

    def known(part: Operand) -> list[int | None] | None:
        along = _counts_along(part)
        return None if along is None else [along] * part.shape[-1]

    return {
        axis: along
        for axis, along in zip(columns, _by_column(node.ins[1], known), strict=False)
        if along is not None
        and along < len(indices_shape) - 1
        and indices_shape[along] == shape[axis] > 1
    }


def _by_column(
    indices: Operand, known: Callable[[Operand], list[T | None] | None]
) -> list[T | None]:
    """What is known of each column of indices, along their last axis."""
    found, last = known(indices), len(indices.shape) - 1
    if found is not None:
        return found
    node = indices.producer if isinstance(indices, Value) else None
    if node is not None and node.primitive is p.concatenate_p:
        if node.params["dimension"] == last:
            return [each for part in node.ins for each in _by_column(part, known)]
    return [None] * indices.shape[last]


def _counts_along(operand: Operand) -> int | None:
    """The axis along which an operand counts from 0 on, None if that is not known."""
    node = operand.producer if isinstance(operand, Value) else None
    if node is None or not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    axis = None
    if node.primitive is p.iota_p:
        axis = node.params["dimension"]
    elif node.primitive is p.select_n_p:
        # JAX adds the size of the axis to indices that are negative.
        if _is_never_less(node.ins[0]):
            axis = _counts_along(node.ins[1])
    elif node.primitive is p.broadcast_in_dim_p:
        inner = _counts_along(node.ins[0])
        if inner is not None and node.in_shapes[0][inner] > 1:
            axis = node.params["broadcast_dimensions"][inner]
    elif node.primitive in MOVES:
        inner = _counts_along(node.ins[0])
        old, new = node.in_shapes[0], node.out_shapes[0]
        # Only axes of size 1 come and go.
        kept, there = ([k for k, n in enumerate(s) if n != 1] for s in (old, new))
        if inner in kept and [old[k] for k in kept] == [new[k] for k in there]:
            axis = there[kept.index(inner)]
    if axis is None or operand.shape[axis] - 1 > jnp.iinfo(operand.aval.dtype).max:
        return None  # The last of these numbers are others.
    return int(axis)


MOVES = frozenset({p.convert_element_type_p, p.copy_p, p.reshape_p, p.squeeze_p})


def _is_never_less(operand: Operand) -> bool:
    """Whether an operand says of counts that they are less than 0."""
    node = operand.producer if isinstance(operand, Value) else None
    if node is None or node.primitive is not p.lt_p:
        return False
    counts, bound = node.ins
    is_low = isinstance(bound, Scalar) and int(np.asarray(bound.value)) <= 0
    return is_low and _counts_along(counts) is not None


def scalar_of(operand: Operand) -> Operand | None:
    """What all elements of an operand are, None if that is not known."""
    if isinstance(operand, Scalar) or not operand.shape:
        return operand
    node = operand.producer
    if node is None or node.primitive is not p.broadcast_in_dim_p:
        return None
    return scalar_of(node.ins[0])


MOST_ELEMENTS = 2**20
"""Up to how many elements of a constant, and of indices, are looked at."""

MOST_NODES = 128
"""How many equations that make indices are evaluated."""


def evaluated(operand: Operand) -> np.ndarray | None:
    """Indices that depend on no argument; None if they do, or it is not known how."""
    if not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    nodes: dict[int, Node] = {}
    stack = [operand]
    while stack:
        each = stack.pop()
        if constant(each) is not None:
            continue
        node = each.producer if isinstance(each, Value) else None
        if node is None or node.primitive not in EVALUATORS:
            return None
        if any(out.size > MOST_ELEMENTS for out in node.outs):
            return None
        if node.number not in nodes:
            nodes[node.number] = node
            stack += node.ins
        if len(nodes) > MOST_NODES:
            return None
    made: dict[Value, np.ndarray] = {}

    def value(each: Operand) -> np.ndarray:
        if isinstance(each, Value) and each in made:
            return made[each]
        return np.asarray(constant(each), each.aval.dtype)

    for _, node in sorted(nodes.items()):
        arrays = [value(each) for each in node.ins]
        [out] = node.outs
        found = EVALUATORS[node.primitive](node.params, *arrays)
        if found is None:
            return None
        made[out] = np.asarray(found, out.aval.dtype)
    return value(operand)


def constant(operand: Operand) -> Any:
    """A literal, or a small array that the function closed over; else None."""
    found = operand.value if isinstance(operand, Scalar) else operand.constant
    if isinstance(found, jax.core.Tracer):
        return None  # Of a function around this one.
    return None if np.size(found) > MOST_ELEMENTS else found


def _of_elements(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *arrays: function(*arrays)


def _quotient(a: np.ndarray, b: np.ndarray) -> Any:
    """Towards zero, as the division of integers is in JAX."""
    if a.dtype.kind not in "iu" or (b == 0).any():
        return None
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _remainder(a: np.ndarray, b: np.ndarray) -> Any:
    return None if a.dtype.kind not in "iu" or (b == 0).any() else np.fmod(a, b)


def _selected(params: Params, which: np.ndarray, *cases: np.ndarray) -> Any:
    return np.choose(which.astype(np.int64), cases)


def _spread(params: Params, array: np.ndarray, *sizes: np.ndarray) -> Any:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    own = [1] * len(shape)
    for axis, size in zip(dims, array.shape, strict=True):
        own[axis] = size
    return np.broadcast_to(array.reshape(own), shape)


def _counts(params: Params) -> Any:
    shape, axis = params["shape"], params["dimension"]
    own = [size if k == axis else 1 for k, size in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[axis]).reshape(own), shape)


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
    if array.ndim != 1 or params["dimension_numbers"].update_window_dims:
        return None
    places = indices[..., 0]
    inside = (places >= 0) & (places < len(array))
    found = array.copy()
    np.add.at(found, places[inside], updates[inside])
    return found


EVALUATORS: dict[Any, Callable[..., Any]] = {
    p.add_p: _of_elements(np.add),
    p.and_p: _of_elements(np.bitwise_and),
    p.broadcast_in_dim_p: _spread,
    p.clamp_p: _of_elements(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    p.concatenate_p: lambda params, *x: np.concatenate(x, params["dimension"]),
    p.convert_element_type_p: lambda params, x: x,
    p.copy_p: _of_elements(np.asarray),
    p.cumsum_p: _sums,
    p.div_p: _of_elements(_quotient),
    p.eq_p: _of_elements(np.equal),
    p.ge_p: _of_elements(np.greater_equal),
    p.gt_p: _of_elements(np.greater),
    p.iota_p: _counts,
    p.le_p: _of_elements(np.less_equal),
    p.lt_p: _of_elements(np.less),
    p.max_p: _of_elements(np.maximum),
    p.min_p: _of_elements(np.minimum),
    p.mul_p: _of_elements(np.multiply),
    p.ne_p: _of_elements(np.not_equal),
    p.neg_p: _of_elements(np.negative),
    p.not_p: _of_elements(np.invert),
    p.or_p: _of_elements(np.bitwise_or),
    p.reduce_sum_p: lambda params, x: np.sum(x, params["axes"], x.dtype),
    p.rem_p: _of_elements(_remainder),
    p.reshape_p: lambda params, x, *sizes: x.reshape(params["new_sizes"]),
    p.rev_p: lambda params, x: np.flip(x, params["dimensions"]),
    p.scatter_add_p: _added,
    p.select_n_p: _selected,
    p.sign_p: _of_elements(np.sign),
    p.slice_p: _part,
    p.squeeze_p: lambda params, x: np.squeeze(x, params["dimensions"]),
    p.sub_p: _of_elements(np.subtract),
    p.transpose_p: lambda params, x: np.transpose(x, params["permutation"]),
}
"""Those of which indices are usually made, each of its parameters and operands."""
