"""Loops that run until all of their rows are done: a shard stops when its own are.

These are ``vmap(while_loop)``, and what libraries write in its place, such as
``while_loop(lambda x: go(x).any(), lambda x: where(go(x), step(x), x), x)``. `by_rows`
finds the latter, where it can prove that the body leaves a row as it is that does not
go on, and that this row never goes on again. Those of equinox are of this kind.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import AnyJaxpr
from shardmap._jax.walk import equations
from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.jaxpr_key import share_equal
from shardmap.planning.engine.nodes import (
    Calls,
    Graph,
    Node,
    Operand,
    PlanPrimitive,
    Value,
    made_by,
)
from shardmap.planning.engine.recipe import needed
from shardmap.planning.engine.rules import Cut, Factor, Forward

ROWS = PlanPrimitive("while")
"""A ``while`` that stops where none of its rows goes on, see `conditions`.

Its parameter ``used`` has the results of which equinox alone says that their rows stay
as they are, such as what is saved at some steps."""

UNVMAP_ANY = PlanPrimitive("unvmap_any")

UNVMAPPED: dict[PlanPrimitive, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    UNVMAP_ANY: ("or", jnp.any),
    PlanPrimitive("unvmap_all"): ("and", jnp.all),
    PlanPrimitive("unvmap_max"): ("max", jnp.max),
}
"""What equinox tells rows of all rows of a batch; the results of a row do not depend on
which others are in it. Inside of a loop of rows, a shard looks at its own."""


class OfRows(Factors):
    """``i j ->`` of the rows of a shard: the result is no part of another one."""

    def __init__(self, node: Node) -> None:
        combiner, reduce = UNVMAPPED[node.primitive]
        axes = range(len(node.in_shapes[0]))
        summed: dict[Factor, str] = dict.fromkeys(axes, combiner)

        def emitter(local: Local) -> Sequence[jax.Array]:
            return [reduce(local.values[0])]

        super().__init__(node, [axes], [[]], summed, emitter=emitter)

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        forward = super().forward(cuts)
        return forward._replace(
            contracted=[each._replace(combiners={}) for each in forward.contracted]
        )


def vmapped(graph: Graph, node: Node) -> Sequence[Operand] | None:
    """Writes a ``while`` whose condition has leading axes as JAX runs it, by rows."""
    params = node.params
    if not params["cond_jaxpr"].out_avals[0].shape:
        return None
    tests = params["cond_nconsts"]
    front = tests + params["body_nconsts"]
    cond = jex_core.jaxpr_as_fun(params["cond_jaxpr"])
    body = jex_core.jaxpr_as_fun(params["body_jaxpr"])

    def loop(*ins: jax.Array) -> list[jax.Array]:
        def goes_on(carried: list[jax.Array]) -> jax.Array:
            return cond(*ins[:tests], *carried)[0]

        def step(carried: list[jax.Array]) -> list[jax.Array]:
            mask = goes_on(carried)

            def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
                here = lax.broadcast_in_dim(mask, old.shape, range(mask.ndim))
                return lax.select(here, new, old)

            return list(map(chosen, body(*ins[tests:front], *carried), carried))

        return lax.while_loop(lambda x: goes_on(x).any(), step, list(ins[front:]))

    outs = graph.call(loop, node.ins)
    place = max(k for k, n in enumerate(graph.nodes) if n.primitive is p.while_p)
    params = {**graph.nodes[place].params, "used": ()}
    graph.nodes[place] = replace(graph.nodes[place], primitive=ROWS, params=params)
    return outs


Literals = frozenset[tuple[Operand, bool]]
"""Truth values, and whether each is to be true: all of them at once."""


def by_rows(graph: Graph) -> Graph:
    """Replaces the loops of a graph that run until each of their rows is done."""

    def written(graph: Graph, node: Node) -> Sequence[Operand] | None:
        if node.primitive is p.scan_p and (loop := _bounded(node)):
            return graph.call(loop, node.ins)[1:]
        if node.primitive is not p.while_p:
            return None
        is_unvmapped = has_unvmapped(node.params["cond_jaxpr"])
        kept = _kept(node, graph.calls, is_unvmapped)
        used = {k for k, x in enumerate(node.outs) if graph.users(x)} - kept
        if not kept or (used and not is_unvmapped):
            return None
        params = {**node.params, "used": tuple(used)}
        return graph.add(ROWS, params, node.ins, [out.aval for out in node.outs])

    return graph.rewritten(written)


def has_unvmapped(jaxpr: AnyJaxpr) -> bool:
    """Whether a jaxpr asks whether any row of a batch goes on, as equinox does."""
    return any(e.primitive.name == UNVMAP_ANY.name for e in equations(jaxpr))


def _bounded(node: Node) -> Callable[..., list[jax.Array]] | None:
    """A scan that stays as it is once a condition of rows fails, as a ``while``.

    equinox writes loops of a bounded number of steps so, for their gradients.
    """
    params, closed = node.params, node.params["jaxpr"]
    consts, carries = scan_counts(params)
    inner, first = closed.jaxpr, closed.jaxpr.invars[consts:]
    if not has_unvmapped(inner) or len(first) > carries or len(node.outs) > carries:
        return None
    last = next((e for e in inner.eqns if e.outvars == inner.outvars), None)
    if last is None or last.primitive is not p.cond_p:
        return None
    stays, goes = last.params["branches"]
    kept = dict(zip(stays.jaxpr.invars, last.invars[1:], strict=True))
    if [kept.get(var) for var in stays.jaxpr.outvars] != first:
        return None
    # A truth value chooses the branch.
    chosen = (e.invars for e in inner.eqns if e.outvars == last.invars[:1])
    outs = [*next(chosen), *last.invars[1:]]
    eqns = [e for e in inner.eqns if e is not last]
    before = closed.replace(jaxpr=inner.replace(eqns=eqns, outvars=outs))

    def call(*ins: jax.Array) -> list[jax.Array]:
        def operands(state: list[jax.Array]) -> list[jax.Array]:
            return jex_core.jaxpr_as_fun(before)(*ins[:consts], *state[1:])

        def cond(state: list[jax.Array]) -> jax.Array:
            return operands(state)[0] & (state[0] < params["length"])

        def body(state: list[jax.Array]) -> list[jax.Array]:
            return [state[0] + 1, *jex_core.jaxpr_as_fun(goes)(*operands(state)[1:])]

        return lax.while_loop(cond, body, [jnp.int32(0), *ins[consts:]])

    return call


def conditions(graph: Graph) -> list[Operand]:
    """Whether each row goes on, and the scalars that have to hold for all of them.

    It is the condition alone, if it is not made of these.
    """
    rows: list[Operand] = []
    others: list[Operand] = []
    stack = graph.outputs[:1]
    while stack:
        x = stack.pop()
        node = x.producer
        primitive = None if node is None else node.primitive
        if node is None:
            others.append(x)
        elif primitive is p.and_p:
            stack += node.ins
        elif primitive in (p.reduce_or_p, UNVMAP_ANY):
            rows.append(node.ins[0])
        elif primitive is p.not_p and (every := made_by(node.ins[0], p.reduce_and_p)):
            rows += graph.call(jnp.logical_not, every.ins)
        else:
            others.append(x)
    return [*rows, *others] if len(rows) == 1 else graph.outputs[:1]


def _kept(node: Node, calls: Calls, is_flagged: bool) -> frozenset[int]:
    """The places of the carried values that stay in rows that do not go on.

    There are none if it cannot be proved that such rows never go on again. As in loops
    of equinox, a carried flag may say which do, in place of the condition.
    """
    params, graph = node.params, Graph(calls)
    tests = params["cond_nconsts"]
    # Condition and body in one graph: what is equal in both is one value.
    outer: dict[Operand, Operand] = {}
    outer |= {x: graph.value(x.aval) for x in node.ins if isinstance(x, Value)}
    given = [outer.get(x, x) for x in node.ins[: tests + params["body_nconsts"]]]
    carried = [graph.value(out.aval) for out in node.outs]
    graph.outputs = graph.inline(params["cond_jaxpr"], [*given[:tests], *carried])
    if not conditions(graph)[0].shape:
        return frozenset()
    graph.outputs += graph.inline(params["body_jaxpr"], [*given[tests:], *carried])
    graph = share_equal(graph)
    rows = conditions(graph)[0]
    _, looked = needed(graph, [rows], frozenset(carried))
    active = literals(rows)
    tried = [(active, looked)]
    if is_flagged:
        flags = [x for x in carried if x.aval.dtype == bool and x.shape]
        tried += [
            (frozenset({(x, holds)}), looked | {x})
            for x in flags
            for holds in (True, False)
        ]
    for active, least in tried:
        pairs = enumerate(zip(carried, graph.outputs[1:], strict=True))
        kept = {k for k, (old, new) in pairs if _stays(old, new, active)}
        if {carried[k] for k in kept} >= least:
            return frozenset(kept)
    return frozenset()


def literals(x: Operand, holds: bool = True) -> Literals:
    """What has to hold at once so that a truth value does, or does not."""
    while node := made_by(x, p.broadcast_in_dim_p):
        x = node.ins[0]
    if node := made_by(x, p.not_p):
        return literals(node.ins[0], not holds)
    if node := made_by(x, p.and_p if holds else p.or_p):
        return frozenset().union(*(literals(y, holds) for y in node.ins))
    return frozenset({(x, holds)})


def _stays(old: Value, new: Operand, active: Literals) -> bool:
    """Whether a carried value stays as it is in rows that are not active."""
    if new is old or any(
        active == {(old, holds)} <= literals(new, holds) for holds in (True, False)
    ):
        return True
    select = made_by(new, p.select_n_p)
    if select is None or len(select.ins) != 3:
        return False
    which, *cases = select.ins
    return any(
        case is old and literals(which, place == 0) >= active
        for place, case in enumerate(cases)
    )
