"""Finds the values of indices.

JAX itself evaluates what depends on no argument, all that a graph needs in one call.
"""

import math
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.context import configuration
from shardmap._jax.primitives import PURE_CALLBACK, axis_names
from shardmap._jax.types import is_inexact
from shardmap._jax.walk import jaxprs_in
from shardmap.planning.engine.factors import bind
from shardmap.planning.engine.jaxpr_key import key_of
from shardmap.planning.engine.nodes import Graph, Node, Operand, Scalar, Value, made_by
from shardmap.planning.lax.primitives import OPTIMIZATION_BARRIER, SCATTER_SUB
from shardmap.planning.lax.staged.barrier import BARRIER

Shape: TypeAlias = tuple[int, ...]

MOST_ELEMENTS = 2**20
"""The most elements of a constant, and of a value that is evaluated."""

MOST_NODES = 128
"""The most equations that are evaluated for one operand."""

SECOND = [p.gather_p, p.scatter_p, p.scatter_add_p, p.scatter_max_p, p.scatter_min_p]
INDICES: Mapping[Any, slice] = {
    **dict.fromkeys([*SECOND, p.scatter_mul_p, SCATTER_SUB], slice(1, 2)),
    p.dynamic_update_slice_p: slice(2, None),
}
"""The operands that are indices."""

ELEMENTWISE = frozenset(
    {
        *(p.add_p, p.and_p, p.clamp_p, p.convert_element_type_p, p.copy_p, p.div_p),
        *(p.eq_p, p.ge_p, p.gt_p, p.le_p, p.lt_p, p.max_p, p.min_p, p.mul_p, p.ne_p),
        *(p.neg_p, p.not_p, p.or_p, p.rem_p, p.select_n_p, p.sign_p, p.sub_p, BARRIER),
    }
)
"""What indices are made of, element by element."""

NOT_EVALUATED = frozenset({PURE_CALLBACK, OPTIMIZATION_BARRIER})
"""Code outside of JAX runs with the program only; steps of loops are not followed."""


def fold(graph: Graph) -> Graph:
    """Evaluates what the indices of a graph are made of, as far as it can be known.

    Indices that are made of floats, such as ``floor(scale * arange(n) + 0.5)``, become
    constants first: XLA fuses a product with a sum, or does not, so that shards could
    round to another integer than the whole function does.
    """
    rounded: dict[Operand, None] = {}
    seen: set[Operand] = set()
    stack = _indices(graph)
    while stack:
        operand = stack.pop()
        node = operand.producer
        if node is None or operand in seen:
            continue
        seen.add(operand)
        if not any(is_inexact(x.aval) for x in node.ins):
            stack += node.ins
        elif len(node.outs) == 1:
            rounded[operand] = None
    _evaluate(rounded)

    def replaced(graph: Graph, node: Node) -> Sequence[Operand] | None:
        [out, *_] = node.outs
        if out not in rounded or out.size > MOST_ELEMENTS:
            return None
        known = evaluated(out)
        return None if known is None else [graph.constant(known)]

    if rounded:
        graph = graph.rewritten(replaced)
    _evaluate(part for x in _indices(graph) for part, _ in _columns(x))
    return graph


def _indices(graph: Graph) -> list[Operand]:
    """The operands of a graph that are indices."""
    nothing = slice(0)
    return [x for n in graph.nodes for x in n.ins[INDICES.get(n.primitive, nothing)]]


def known_columns(indices: Operand) -> list[np.ndarray | None]:
    """The columns of indices along their last axis, None where one is not known.

    A column has length 1 along axes along which its indices are made to be the same.
    """
    return [
        None if known is None else known[..., min(k, known.shape[-1] - 1)]
        for part, k in _columns(indices)
        for known in [None if 0 in part.shape else _known(part)]
    ]


def _columns(indices: Operand) -> list[tuple[Operand, int]]:
    """For each column of indices, the operand that holds it, and its number there."""
    node, last = made_by(indices, p.concatenate_p), len(indices.shape) - 1
    if node is not None and node.params["dimension"] == last:
        return [column for part in node.ins for column in _columns(part)]
    return [(indices, k) for k in range(indices.shape[last] if indices.shape else 1)]


def constant(operand: Operand) -> Any:
    """A literal, or a small array that the function closed over; None otherwise."""
    value = operand.value if isinstance(operand, Scalar) else operand.constant
    if isinstance(value, jax.core.Tracer):
        return None  # Traced by an outer transformation.
    return None if np.size(value) > MOST_ELEMENTS else value


def evaluated(operand: Operand) -> np.ndarray | None:
    """The values of integers that depend on no argument; None if they are not known."""
    known = _known(operand)
    return None if known is None else np.broadcast_to(known, operand.shape)


def _known(operand: Operand) -> np.ndarray | None:
    """The same, with length 1 along axes along which they are made to be the same."""
    if not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    if (known := constant(operand)) is not None:
        return np.asarray(known, operand.aval.dtype)
    if not isinstance(operand, Value):
        return None
    if operand not in _VALUES:
        _evaluate([operand])
    return _VALUES[operand]


_VALUES: "weakref.WeakKeyDictionary[Value, np.ndarray | None]"
_VALUES = weakref.WeakKeyDictionary()
"""What was evaluated, None where that cannot be."""

_COMPILED: dict[Hashable, Any] = {}
"""The programs that evaluate, by what they compute."""

MOST_PROGRAMS = 256


def _evaluate(operands: Iterable[Operand]) -> None:
    """Evaluates operands in one call of JAX, and keeps their values."""
    nodes: dict[Node, list[Shape]] = {}
    wanted: list[Value] = []
    for operand in operands:
        if isinstance(operand, Value) and operand not in _VALUES:
            _VALUES[operand] = None
            value_of = _nodes_of(operand)
            if value_of and jnp.issubdtype(operand.aval.dtype, jnp.integer):
                nodes |= value_of
                wanted.append(operand)
    if not wanted:
        return
    leaves = dict.fromkeys(
        x
        for node in nodes
        for x in node.ins
        if isinstance(x, Value) and x.producer is None
    )

    def values(*arrays: jax.Array) -> list[Any]:
        value_of: dict[Operand, Any] = dict(zip(leaves, arrays, strict=True))
        for node, [shape, *_] in nodes.items():
            ins = [value_of[x] if x in value_of else constant(x) for x in node.ins]
            outs = _computed(node, ins, shape)
            value_of.update(zip(node.outs, outs, strict=True))
        return [value_of[x] for x in wanted]

    with jax.ensure_compile_time_eval():
        arrays = [jax.device_put(constant(x)) for x in leaves]
    key = key_of(jax.make_jaxpr(values)(*arrays)), configuration()
    if key not in _COMPILED:
        if len(_COMPILED) == MOST_PROGRAMS:
            _COMPILED.clear()
        # Compiled ahead, it runs now, even if an outer function is being traced.
        _COMPILED[key] = jax.jit(values).lower(*arrays).compile()
    for value, known in zip(wanted, _COMPILED[key](*arrays), strict=True):
        _VALUES[value] = np.asarray(jax.device_get(known))


def _knows_axes(node: Node) -> bool:
    """Whether a node depends on the axes of a map around the function."""
    names = any(not isinstance(k, int | None) for k in axis_names(node.params))
    is_named = node.primitive is p.axis_index_p or names
    return is_named or any(jaxpr.effects for jaxpr in jaxprs_in(node.params))


def _shapes(node: Node, nodes: Mapping[Node, list[Shape]]) -> list[Shape]:
    """The shapes of results, with 1 for axes along which they are made to be the same.

    So indices of a large array, such as those of `jnp.nanmedian`, are a few lines.
    """
    out, ins = node.outs[0], [_shape(x, nodes) for x in node.ins]
    shape = [1] * len(out.shape)
    if node.primitive is p.iota_p:
        axis = node.params["dimension"]
        shape[axis] = out.shape[axis]
    elif node.primitive is p.broadcast_in_dim_p:
        for axis, length in zip(
            node.params["broadcast_dimensions"], ins[0], strict=True
        ):
            shape[axis] = length
    elif node.primitive in ELEMENTWISE:
        shape = [*np.broadcast_shapes(shape, *ins)]
    else:
        return list(node.out_shapes)
    return [tuple(shape)]


def _shape(operand: Operand, nodes: Mapping[Node, list[Shape]]) -> Shape:
    node = operand.producer
    return operand.shape if node is None else nodes[node][node.outs.index(operand)]


def _computed(node: Node, ins: Sequence[Any], shape: Shape) -> Sequence[Any]:
    """The results of a node in the shapes of `_shapes`."""
    params = node.params
    if node.primitive is p.iota_p:
        axis = params["dimension"]
        return [lax.broadcasted_iota(params["dtype"], shape, axis)]
    if node.primitive is p.broadcast_in_dim_p:
        return [lax.broadcast_in_dim(ins[0], shape, params["broadcast_dimensions"])]
    if node.primitive is BARRIER:
        return ins
    is_compact = node.primitive in ELEMENTWISE
    full = [shape if is_compact and x.shape else x.shape for x in node.ins]
    pairs = zip(ins, full, strict=True)
    ins = [x if np.shape(x) == each else jnp.broadcast_to(x, each) for x, each in pairs]
    return bind(node, ins, params)


def _nodes_of(value: Value) -> dict[Node, list[Shape]] | None:
    """The nodes that make a value, first to last, and the shapes of `_shapes`.

    Returns:
      None if it depends on an argument, is large, or takes long.
    """
    nodes: dict[Node, list[Shape]] = {}
    stack = [value.producer]
    while stack:
        node = stack[-1]
        if node is None or node in nodes:
            stack.pop()
        elif (
            len(stack) + len(nodes) > MOST_NODES
            or node.primitive in NOT_EVALUATED
            or (
                not isinstance(node.primitive, jex_core.Primitive)
                and node.primitive is not BARRIER
            )
            or _knows_axes(node)
            or any(x.producer is None and constant(x) is None for x in node.ins)
        ):
            return None
        elif ahead := [n for x in node.ins if (n := x.producer) and n not in nodes]:
            stack += ahead
        else:
            nodes[node] = _shapes(node, nodes)
            if max(map(math.prod, nodes[node])) > MOST_ELEMENTS:
                return None
    return nodes
