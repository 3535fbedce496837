"""Columns of indices that count along an axis of the indices.

In ``x[jnp.arange(n), y]`` row ``i`` of the indices looks at row ``i`` of ``x``: what is
written as an index is one loop over both.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value


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
        return _columns(node.ins[0]) if _is_integer(node.ins[0]) else []
    if node is not None and node.primitive is p.concatenate_p:
        if node.params["dimension"] == last:
            return [column for part in node.ins for column in _columns(part)]
    return [iota_of(indices)] * indices.shape[last]


def _is_integer(operand: Operand) -> bool:
    return bool(jnp.issubdtype(operand.aval.dtype, jnp.integer))


def iota_of(operand: Operand) -> Iota | None:
    """What an operand counts along, None if that is not known."""
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
