"""The table of all rules, and of the calls whose bodies are inlined."""

import collections
import functools
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import primitives as p

from shardmap._jax.effects import AXIS_EFFECT
from shardmap._jax.primitives import (
    EXPANDABLE,
    PURE_CALLBACK,
    axis_names,
    branch_of_platform,
    expansion,
    linear_solve,
)
from shardmap._jax.rules import Vmap
from shardmap._jax.walk import equations
from shardmap.map.collectives.split import vectorized
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p
from shardmap.planning.engine.factors import Factors, taken_whole
from shardmap.planning.engine.nodes import (
    Graph,
    Node,
    Operand,
    PlanPrimitive,
    Refused,
    Rewrite,
)
from shardmap.planning.engine.rules import (
    Factor,
    Reason,
    RuleMaker,
    RuleTable,
    Stages,
)
from shardmap.planning.lax import (
    batched,
    per_piece,
    pointwise,
    random,
    reduce,
    reshape,
    shape,
    window,
)
from shardmap.planning.lax.control import loops, rows
from shardmap.planning.lax.indexed import gather, scatter
from shardmap.planning.lax.primitives import CUSTOM_VMAP
from shardmap.planning.lax.staged import barrier, matched, monoids, pieces, split_scan


def expanded(graph: Graph, node: Node) -> list[Operand] | None:
    """Writes newer primitives as others, as JAX itself does."""
    function = expansion(node.params)
    return None if function is None else graph.call(function, node.ins)


def solved(graph: Graph, node: Node) -> list[Operand]:
    """Writes a linear solve as its solver: nothing is differentiated after this."""
    jaxpr, operands = linear_solve(node.params, len(node.ins))
    return graph.inline(jaxpr, [node.ins[k] for k in operands])


def chosen(graph: Graph, node: Node) -> list[Operand] | None:
    """Writes a choice between platforms as the branch of this one."""
    branch = branch_of_platform(node.params)
    return None if branch is None else graph.inline(branch, node.ins[1:])


def implemented(graph: Graph, node: Node) -> Sequence[Operand] | None:
    """Writes a primitive of another library, without a rule, as it implements it.

    Many, such as ``unvmap_any`` of equinox, are a function of JAX that differs under
    transformations only.
    """
    function = node.primitive.impl
    if node.primitive in TABLE.makers or node.primitive in COLLECTIVES:
        return None
    if not isinstance(function, types.FunctionType):
        return None  # JAX's own way to run a primitive.
    if function.__module__.partition(".")[0] in ("jax", "jaxlib", "shardmap"):
        return None

    def call(*operands: jax.Array) -> Any:
        return function(*operands, **node.params)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in node.ins]
    try:
        jaxpr = jax.make_jaxpr(call)(*shapes)
    except Exception:  # It is not JAX code: the primitive is taken whole.
        return None
    if any(e.primitive is node.primitive for e in equations(jaxpr)):
        return None
    return graph.inline(jaxpr, node.ins)


def of_rows(graph: Graph, node: Node) -> Sequence[Operand] | None:
    """Keeps what rows are told of all rows, inside of a loop of rows."""
    primitive = PlanPrimitive(node.name)
    if primitive not in rows.UNVMAPPED:
        return implemented(graph, node)
    return graph.add(primitive, {}, node.ins, [out.aval for out in node.outs])


def mapped(graph: Graph, node: Node) -> list[Operand]:
    """Writes a map as one vectorized function."""
    params = node.params
    axis = Vmap(params["axis_name"], params["axis_size"])
    ins, outs = params["in_axes"], list(params["out_axes"])
    function = vectorized(params["call_jaxpr"], axis, ins, outs)
    return graph.call(function, node.ins, fixed=False)


DECOMPOSITIONS: dict[Any, Rewrite] = {
    p.cond_p: chosen,
    p.linear_solve_p: solved,
    p.while_p: rows.vmapped,
    **dict.fromkeys([spmap_p, MapPrimitive], mapped),
    **({} if EXPANDABLE is None else {EXPANDABLE: expanded}),
}

TALKS = Reason(
    "it talks to the other elements of a mapped axis", "cut an axis that is not mapped"
)
TRANSPOSED = Reason("it is a placeholder that only differentiation puts in")


def collective(node: Node) -> Factors:
    """The rule of a collective over a mapped axis; any other primitive has none."""
    entry = COLLECTIVES.get(node.primitive)
    if entry is None:
        why = f"there is no rule for {node.name}"
        remedy = "register_rule gives it one; spmap(batch_size=) needs none"
        return taken_whole(node, Reason(why, remedy))
    # A batched collective combines along axes of its operands, as a reduction does.
    over = [k for k in axis_names(node.params) if isinstance(k, int)]
    reduction = entry.combiner if entry.is_reduction else None
    if not entry.is_elementwise or (over and not reduction):
        return taken_whole(node, TALKS)
    axes = [[(k, axis) for axis in range(len(s))] for k, s in enumerate(node.in_shapes)]
    outs = [[name for name in row if name[1] not in over] for row in axes]
    summed: dict[Factor, str] = {
        name: reduction for row in axes for name in row if reduction and name[1] in over
    }

    def passes(combiner: str, pending: frozenset[int]) -> str | None:
        every = len(pending) == len(node.ins)
        return combiner if combiner == reduction and every else None

    return Factors(node, axes, outs, summed, passes=passes, cheap=False)


def stateful(node: Node) -> Factors:
    draws = node.primitive is p.rng_uniform_p
    remedy = ": draw with jax.random.uniform and a key" if draws else ""
    raise Refused(
        f"{node.name} at {node.source} reads or changes state, and shards run in any "
        f"order{remedy}"
    )


STATEFUL = [p.after_all_p, p.create_token_p, p.get_p, p.rng_uniform_p, p.swap_p]

WHOLE_OR_REFUSED: dict[Any, RuleMaker] = {
    **dict.fromkeys(STATEFUL, stateful),
    PURE_CALLBACK: per_piece.rule,
    p.custom_lin_p: functools.partial(taken_whole, reason=TRANSPOSED),
}

OF_CALLS = [p.call_p, p.closed_call_p, p.custom_jvp_call_p, p.custom_vjp_call_p]
LOOKED_THROUGH = {
    **dict.fromkeys(OF_CALLS, "call_jaxpr"),
    **dict.fromkeys([p.jit_p, p.remat_p], "jaxpr"),
    CUSTOM_VMAP: "call",
}
"""The calls that are inlined, and the parameter that holds the jaxpr."""

TABLE = RuleTable(
    LOOKED_THROUGH,
    {
        **gather.REWRITES,
        **reduce.REWRITES,
        **reshape.REWRITES,
        **scatter.REWRITES,
        **shape.REWRITES,
        **DECOMPOSITIONS,
    },
    implemented,
    # It marks equations inside of a map, whose rules handle it.
    (AXIS_EFFECT,),
    collective,
)

OF_ROWS = replace(TABLE, otherwise=of_rows)
"""The table inside of a loop of rows, see `rows`."""

STAGES: dict[Any, Stages] = {**batched.STAGES, **matched.STAGES}
"""The rewrites of equations at which cuts end."""


def control(table: RuleTable) -> dict[Any, RuleMaker]:
    """The rules of what holds jaxprs, whose equations have the rules of a table."""
    return {
        p.cond_p: lambda node: loops.Cond(node, table),
        p.scan_p: lambda node: loops.Scan(node, table),
        split_scan.PIECE: lambda node: split_scan.Piece(node, table),
        split_scan.JOINED: split_scan.Joined,
        p.while_p: lambda node: loops.While(node, table),
        rows.ROWS: lambda node: loops.While(node, OF_ROWS),
    }


KINDS: dict[str, dict[Any, RuleMaker]] = {
    "elementwise": pointwise.RULES,
    "shape": shape.RULES | barrier.RULES,
    "reshape": reshape.RULES,
    "reductions and contractions": reduce.RULES | monoids.RULES,
    "cumulative reductions": batched.CUMULATIVE,
    "sliding windows": window.RULES,
    "indexing": gather.RULES | scatter.RULES,
    "batched": batched.RULES | pieces.RULES,
    "random bits": random.RULES,
    "whole or refused": WHOLE_OR_REFUSED,
    "loops and branches": control(TABLE),
}

for rules in KINDS.values():
    TABLE.makers.update(rules)
of_rows_only: dict[Any, RuleMaker] = {
    **control(OF_ROWS),
    **dict.fromkeys(rows.UNVMAPPED, rows.OfRows),
}
OF_ROWS.makers = collections.ChainMap(of_rows_only, TABLE.makers)
