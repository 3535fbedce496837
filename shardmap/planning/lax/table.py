"""The table of all rules, and of the calls whose bodies are inlined."""

from typing import Any

from jax.extend.core import primitives as p

from shardmap._jax.effects import AXIS_EFFECT
from shardmap._jax.primitives import (
    EXPANDABLE,
    branch_of_platform,
    expansion,
    linear_solve,
)
from shardmap.planning.engine.factors import RuleTable
from shardmap.planning.engine.nodes import (
    Calls,
    Graph,
    Node,
    Operand,
    Rewrite,
)
from shardmap.planning.engine.rules import RuleMaker, Stages
from shardmap.planning.lax import (
    batched,
    maps,
    pointwise,
    prefix,
    random,
    reduce,
    reshape,
    shape,
    special,
    window,
)
from shardmap.planning.lax.control import branches, loops
from shardmap.planning.lax.indexed import dynamic, gather, scatter
from shardmap.planning.lax.primitives import CUSTOM_VMAP
from shardmap.planning.lax.staged import (
    barrier,
    blocks,
    matched,
    monoids,
    split_scan,
    tall_qr,
    top_k,
)


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


DECOMPOSITIONS: dict[Any, Rewrite] = {
    p.cond_p: chosen,
    p.linear_solve_p: solved,
    **({} if EXPANDABLE is None else {EXPANDABLE: expanded}),
}

LOOKED_THROUGH = {
    p.call_p: "call_jaxpr",
    p.closed_call_p: "call_jaxpr",
    p.custom_jvp_call_p: "call_jaxpr",
    p.custom_vjp_call_p: "call_jaxpr",
    p.jit_p: "jaxpr",
    p.remat_p: "jaxpr",
    CUSTOM_VMAP: "call",
}
"""The calls that are inlined, and the parameter that holds the jaxpr."""

CALLS = Calls(
    LOOKED_THROUGH,
    {
        **reduce.REWRITES,
        **reshape.REWRITES,
        **scatter.REWRITES,
        **shape.REWRITES,
        **maps.REWRITES,
        **DECOMPOSITIONS,
    },
    # It marks equations inside of a map, whose rules handle it.
    (AXIS_EFFECT,),
)

STAGES: dict[Any, Stages] = {
    **batched.STAGES,
    **gather.STAGES,
    **matched.STAGES,
    **prefix.STAGES,
    **tall_qr.STAGES,
    **top_k.STAGES,
}
"""The rewrites of equations at which cuts end."""

TABLE = RuleTable(special.collective, CALLS)

KINDS: dict[str, dict[Any, RuleMaker]] = {
    "elementwise": pointwise.RULES,
    "shape": shape.RULES | barrier.RULES,
    "reshape": reshape.RULES,
    "reductions and contractions": reduce.RULES | monoids.RULES,
    "cumulative reductions": prefix.RULES,
    "sliding windows": window.RULES,
    "indexing": gather.RULES | scatter.RULES | dynamic.RULES,
    "batched": batched.RULES | blocks.RULES,
    "random bits": random.RULES,
    "whole or refused": special.RULES,
    "loops and branches": {
        p.cond_p: lambda node: branches.Cond(node, TABLE),
        p.scan_p: lambda node: loops.Scan(node, TABLE),
        split_scan.PIECE: lambda node: split_scan.Piece(node, TABLE),
        split_scan.JOINED: split_scan.Joined,
        p.while_p: lambda node: loops.While(node, TABLE),
    },
}

TABLE.makers |= {q: rule for rules in KINDS.values() for q, rule in rules.items()}

BUILT_IN = frozenset(TABLE.makers)
"""The primitives that are known here; `register_rule` adds others."""
