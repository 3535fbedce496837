"""The table of all rules, and the calls that are looked through."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import primitives as p

from shardmap._jax.effects import AXIS_EFFECT
from shardmap._jax.lax_primitives import (
    CUSTOM_VMAP,
    EXPANDABLE,
    expansion,
    expansion_tree,
    linear_solve,
)
from shardmap._jax.types import AnyJaxpr, Equation
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.plan.engine.factors import BESIDE, RuleTable
from shardmap.plan.engine.nodes import (
    Calls,
    Graph,
    Node,
    Operand,
    PlanPrimitive,
    Rewrite,
    flatten,
)
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut, RuleMaker
from shardmap.plan.lax import (
    batched,
    pointwise,
    prefix,
    random,
    reduce,
    reshape,
    shape,
    special,
    window,
)
from shardmap.plan.lax.control import along, branches, loops, mapped, written_out
from shardmap.plan.lax.control.inner import ALONG
from shardmap.plan.lax.indexed import dynamic, gather, one_window, scatter
from shardmap.plan.lax.staged import barrier, counting, sort, tall, top
from shardmap.plan.lax.staged.chosen import Chosen, layered
from shardmap.plan.lax.staged.one_pass import products, statistics

StandsFor: TypeAlias = tuple[AnyJaxpr, Sequence[int]]
"""What an equation stands for, and which of its operands that takes."""


Written: TypeAlias = dict[int, tuple[Equation, StandsFor]]
"""What was found, by the id of an equation."""


def _expanded(equation: Equation, ins: Sequence[Operand]) -> StandsFor | None:
    """Newer JAX has primitives that are written in terms of others."""
    function = expansion(equation)
    if function is None:
        return None
    avals = [jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in ins]
    arguments = jax.tree.unflatten(expansion_tree(equation), avals)
    return jax.make_jaxpr(function)(*arguments), range(len(ins))


def _solved(equation: Equation, ins: Sequence[Operand]) -> StandsFor:
    """A linear solve is what it solves with: differentiation is over by now."""
    return linear_solve(equation)


STANDING: dict[Any, Callable[[Equation, Sequence[Operand]], StandsFor | None]] = {
    p.linear_solve_p: _solved,
    **({} if EXPANDABLE is None else {EXPANDABLE: _expanded}),
}


def _written(calls: Callable[[], Calls], known: Written) -> dict[Any, Rewrite]:
    """Rewrites equations as what they stand for, the same each time.

    Args:
      calls: how that is looked through.
      known: what was found before, which is added to.
    """

    def write(
        graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
    ) -> list[Operand] | None:
        if id(equation) not in known:
            found = STANDING[equation.primitive](equation, ins)
            if found is None:
                return None
            known[id(equation)] = equation, found
        _, (jaxpr, operands) = known[id(equation)]
        return graph.inline(jaxpr, [ins[k] for k in operands], source, calls())

    return dict.fromkeys(STANDING, write)


def _inside(
    graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
) -> Sequence[Operand] | None:
    """In the body of a loop nothing is chosen anew, and nothing is to be known."""
    write = _written(lambda: CALLS, {})[equation.primitive]
    return write(graph, equation, ins, source)


LOOKED_THROUGH = {
    p.call_p: "call_jaxpr",
    p.closed_call_p: "call_jaxpr",
    p.custom_jvp_call_p: "call_jaxpr",
    p.custom_vjp_call_p: "call_jaxpr",
    p.jit_p: "jaxpr",
    p.remat_p: "jaxpr",
    CUSTOM_VMAP: "call",
}
"""Calls, and which parameter holds what is called."""

CALLS = Calls(
    LOOKED_THROUGH,
    shape.REWRITES | reshape.REWRITES | dict.fromkeys(STANDING, _inside),
    # Says that an equation is inside a map; its rule knows what to do about it.
    (AXIS_EFFECT,),
)

# What is written as other primitives where a cut would end at it, or gives parts of it.
WHEN_CUT = one_window.WHEN_CUT | {
    p.argmax_p: reduce.arg_reduction(largest=True),
    p.argmin_p: reduce.arg_reduction(largest=False),
}

WHEN_PARTIAL = {
    p.conv_general_dilated_p: reduce.wide_sum,
    p.dot_general_p: reduce.dot,
    p.reduce_sum_p: reduce.wide_sum,
}

TABLE = RuleTable(otherwise=special.collective)

KINDS: dict[str, dict[Any, RuleMaker]] = {
    "each element from those at its place": pointwise.RULES,
    "moved, shifted, repeated": shape.RULES | barrier.RULES,
    "merged and split axes": reshape.RULES,
    "reductions and contractions": reduce.RULES | counting.RULES,
    "running reductions": prefix.RULES,
    "sliding windows": window.RULES,
    "places given by indices": gather.RULES | scatter.RULES | dynamic.RULES,
    "batch axes before core axes": batched.RULES
    | tall.RULES
    | top.RULES
    | sort.RULES
    | statistics.RULES
    | products.RULES,
    "random bits": random.RULES,
    "whole or refused": special.RULES,
    "loops, branches and maps": {
        p.cond_p: lambda node: branches.Cond(node, TABLE, CALLS),
        p.scan_p: lambda node: loops.Scan(node, TABLE, CALLS),
        along.PIECE: lambda node: along.Piece(node, TABLE, CALLS),
        along.JOINED: along.Joined,
        p.while_p: lambda node: loops.While(node, TABLE, CALLS),
        spmap_p: lambda node: mapped.Map(node, TABLE, CALLS),
    },
}

TABLE.makers |= {q: rule for rules in KINDS.values() for q, rule in rules.items()}


def by_kind() -> dict[str, list[str]]:
    """The names of all primitives that have a rule, by kind.

    >>> by_kind()["merged and split axes"]
    ['reshape']
    """
    kinds: dict[str, Any] = {
        **KINDS,
        "whole or refused": {*special.RULES, *COLLECTIVES},
        "looked through": CALLS.jaxprs,
        "written as others": CALLS.rewrites,
    }
    return {
        kind: sorted({str(q) for q in rules if not isinstance(q, PlanPrimitive)})
        for kind, rules in kinds.items()
    }


MOST_ROUNDS = 8
"""How often a graph is written anew: a cut that goes on may meet a next end."""


def analysed(
    closed: AnyJaxpr,
    cuts: list[list[Cut]],
    partial: bool,
    out_cuts: list[list[Cut]] | None = None,
    effects: Rewrite | None = None,
    keeps: bool = True,
) -> Analysis:
    """The analysis of a graph in which what could be cut is written so that it is.

    Args:
      closed: the jaxpr.
      cuts: of the arguments.
      partial: whether to cut what is summed over.
      out_cuts: of the results, besides those that reach them.
      effects: what becomes of equations with effects; None: they are refused.
      keeps: whether what could be computed again may be kept instead.
    """
    own = CALLS._replace(effects=effects)
    written: Written = {}

    def opened_at(nodes: Sequence[Node]) -> Analysis:
        return _analysed(closed, cuts, partial, nodes, out_cuts, own, keeps, written)

    best = trial = opened_at([])
    opened: list[Node] = []
    for _ in range(MOST_ROUNDS if partial else 0):
        # Loops, branches and maps at which cuts end are written out if that helps,
        # perhaps only with another one, as the gradient of a loop is a loop.
        more = [
            each.node
            for each in trial.ended
            if each.node.primitive in written_out.WRITERS and each.reason != ALONG
        ]
        known = {id(node.params) for node in opened}
        more = [node for node in more if id(node.params) not in known]
        if not more:
            break
        opened += more
        trial = opened_at(opened)
        if _ends(trial) < _ends(best):
            best = trial
    return best


def _ends(analysis: Analysis) -> set[Any]:
    """The cuts of arguments that end somewhere for a reason of the operation."""
    found: set[Any] = set()
    for each in analysis.ended:
        if each.reason not in (BESIDE, ALONG) and not each.reason.in_stages:
            found |= each.origins
    return found


def _analysed(
    closed: AnyJaxpr,
    cuts: list[list[Cut]],
    partial: bool,
    opened: Sequence[Node],
    out_cuts: list[list[Cut]] | None,
    plain: Calls,
    keeps: bool,
    written: Written,
) -> Analysis:
    """The analysis, with these loops, branches and maps written out."""
    calls = plain
    standing = _written(lambda: calls, written)
    fixed: dict[Any, Rewrite] = written_out.rewrite(opened, lambda: calls)
    chosen = Chosen()

    def transformed(
        graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
    ) -> list[Operand] | None:
        return batched.axis_by_axis(graph, equation, ins, source, calls)

    for _ in range(MOST_ROUNDS):
        # Only where a cut ends is an equation written as others: uncut, one argmax is
        # better than the comparison and the two reductions that it would become.
        tables = [plain.rewrites, standing, fixed, *chosen.rewrites()]
        calls = plain._replace(rewrites=layered(tables))
        graph = flatten(closed, calls)
        if out_cuts is not None:
            barrier.ask(graph, out_cuts)
        analysis = Analysis(graph, TABLE, cuts, partial, keeps)
        ended = [ended.node for ended in analysis.ended]
        summed = [graph.nodes[each.node] for each in analysis.reductions]
        found = {n.primitive: WHEN_CUT.get(n.primitive) for n in ended}
        if any(n.primitive is p.fft_p for n in ended):
            found[p.fft_p] = transformed
        found |= {n.primitive: WHEN_PARTIAL.get(n.primitive) for n in summed}
        new = {q: write for q, write in found.items() if write and q not in fixed}
        if not partial or not (chosen.more(analysis) or new):
            break
        fixed |= new
    return analysis
