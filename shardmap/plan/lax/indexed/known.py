"""What is known of indices when a plan is made.

Columns that depend on no argument are computed, with NumPy: JAX would compile each of
their equations. A column that counts along an axis of the indices is found in the
equations that make it, however long it is: in ``x[jnp.arange(n), y]`` row ``i`` of the
indices looks at row ``i`` of ``x``, so that both are one loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value


def known_columns(indices: Operand) -> list[np.ndarray | None]:
    """The columns of indices along their last axis, None where one is not known."""
    whole = evaluated(indices)
    if whole is not None:
        return [whole[..., k] for k in range(whole.shape[-1])]
    last = len(indices.shape) - 1
    node = indices.producer if isinstance(indices, Value) else None
    if node is not None and node.primitive is p.concatenate_p:
        if node.params["dimension"] == last:
            return [column for part in node.ins for column in known_columns(part)]
    return [None] * indices.shape[last]


class Iota(NamedTuple):
    """An array whose elements are their place along an axis, plus an offset."""

    axis: int
    offset: int


def counted(node: Node, columns: tuple[int, ...]) -> dict[int, int]:
    """The axes of a node's first operand that are one loop with one of its indices.

    Args:
      node: its second operand has the indices, one column per coordinate.
      columns: the axis of the first operand that each column is a place of.

    Returns:
      Axis of the first operand -> axis of the indices.
    """
    shape, indices_shape = node.in_shapes[0], node.in_shapes[1]
    found = {}
    for axis, iota in zip(columns, _columns(node.ins[1]), strict=False):
        if iota is None or iota.offset or iota.axis == len(indices_shape) - 1:
            continue
        if indices_shape[iota.axis] == shape[axis] > 1:
            found[axis] = iota.axis
    return found


def _columns(indices: Operand) -> list[Iota | None]:
    """What is known of each column, along the last axis."""
    last = len(indices.shape) - 1
    node = indices.producer if isinstance(indices, Value) else None
    if node is not None and node.primitive is p.convert_element_type_p:
        return [each and _held(each, indices) for each in _columns(node.ins[0])]
    if node is not None and node.primitive is p.concatenate_p:
        if node.params["dimension"] == last:
            return [column for part in node.ins for column in _columns(part)]
    return [iota_of(indices)] * indices.shape[last]


def _is_integer(operand: Operand) -> bool:
    return bool(jnp.issubdtype(operand.aval.dtype, jnp.integer))


def _held(iota: Iota, operand: Operand) -> Iota | None:
    """What an operand counts along if its type holds all these numbers."""
    limits, last = jnp.iinfo(operand.aval.dtype), operand.shape[iota.axis] - 1
    is_held = limits.min <= iota.offset and iota.offset + last <= limits.max
    return iota if is_held else None


def iota_of(operand: Operand) -> Iota | None:
    """What an operand counts along, None if that is not known."""
    found = _iota_of(operand)
    return found and _held(found, operand)


def _iota_of(operand: Operand) -> Iota | None:
    node = operand.producer if isinstance(operand, Value) else None
    if node is None or not _is_integer(operand):
        return None
    if node.primitive is p.iota_p:
        return Iota(node.params["dimension"], 0)
    if node.primitive is p.select_n_p:
        which = _truth(node.ins[0])
        return None if which is None else iota_of(node.ins[1 + which])
    if node.primitive is p.add_p:
        return _plus(*node.ins) or _plus(*reversed(node.ins))
    if node.primitive not in MOVES:
        return None
    inner = iota_of(node.ins[0])
    if inner is None:
        return None
    old, new = node.in_shapes[0], node.out_shapes[0]
    if node.primitive is p.broadcast_in_dim_p:
        axis = node.params["broadcast_dimensions"][inner.axis]
        return inner._replace(axis=axis) if new[axis] == old[inner.axis] else None
    # Only axes of size 1 come and go.
    kept = [axis for axis, size in enumerate(old) if size != 1]
    there = [axis for axis, size in enumerate(new) if size != 1]
    if inner.axis not in kept or [old[k] for k in kept] != [new[k] for k in there]:
        return None
    return inner._replace(axis=there[kept.index(inner.axis)])


MOVES = frozenset(
    {p.broadcast_in_dim_p, p.convert_element_type_p, p.copy_p, p.reshape_p, p.squeeze_p}
)


def _plus(operand: Operand, number: Operand) -> Iota | None:
    inner = iota_of(operand)
    if inner is None or not isinstance(number, Scalar):
        return None
    return inner._replace(offset=inner.offset + int(number.value))


def _truth(operand: Operand) -> bool | None:
    """The one value of all elements of a comparison, None if that is not known."""
    node = operand.producer if isinstance(operand, Value) else None
    if node is None or node.primitive is not p.lt_p:
        return None
    left, right = node.ins
    inner = iota_of(left)
    if inner is None or not isinstance(right, Scalar):
        return None
    least = inner.offset
    most = least + left.shape[inner.axis] - 1
    bound = int(np.asarray(right.value))
    return False if least >= bound else True if most < bound else None


def scalar_of(operand: Operand) -> Operand | None:
    """What all elements of an operand are, None if that is not known."""
    if isinstance(operand, Scalar) or not operand.shape:
        return operand
    node = operand.producer
    if node is None or node.primitive is not p.broadcast_in_dim_p:
        return None
    return scalar_of(node.ins[0])


MOST_ELEMENTS = 2**20
"""Up to how many elements of indices, and of what they are made of, are looked at."""

MOST_NODES = 128
"""Of how many equations."""


def evaluated(operand: Operand) -> np.ndarray | None:
    """Indices that depend on no argument; None if they do, or it is not known how."""
    if not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    nodes: dict[int, Node] = {}
    stack = [operand]
    while stack:
        each = stack.pop()
        if _constant(each) is not None:
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
        return np.asarray(_constant(each), each.aval.dtype)

    for _, node in sorted(nodes.items()):
        arrays = [value(each) for each in node.ins]
        [out] = node.outs
        found = EVALUATORS[node.primitive](node.params, *arrays)
        if found is None:
            return None
        made[out] = np.asarray(found, out.aval.dtype)
    return value(operand)


def _constant(operand: Operand) -> Any:
    """A literal, or an array that the function closed over."""
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
