"""Loops that run until all of their rows are done, as libraries write them.

``while_loop(lambda x: go(x).any(), lambda x: where(go(x), step(x), x), x)`` is a loop
of each row, as ``vmap(while_loop)`` is. `by_rows` finds such loops, where it can prove
that the body leaves a row as it is that does not go on, and that this row never goes on
again: a shard may stop when its own rows are done. Those of equinox are of this kind.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import AnyJaxpr
from shardmap._jax.walk import equations
from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.jaxpr_key import key_of
from shardmap.planning.engine.nodes import (
    Calls,
    Graph,
    Node,
    Operand,
    PlanPrimitive,
    Scalar,
    flatten,
    made_by,
)
from shardmap.planning.engine.recipe import needed
from shardmap.planning.engine.rules import Cut, Factor, Forward
from shardmap.planning.lax.indexed import known

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


def unvmapped(graph: Graph, node: Node) -> Sequence[Operand] | None:
    """Keeps the primitives of `UNVMAPPED` as they are."""
    primitive = PlanPrimitive(node.name)
    if primitive not in UNVMAPPED:
        return None
    return graph.add(primitive, {}, node.ins, [out.aval for out in node.outs])


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
            contracted=[each._replace(outs={}) for each in forward.contracted]
        )


SAME = frozenset({p.convert_element_type_p, p.copy_p, p.stop_gradient_p})
"""Primitives whose result is their operand, if it has the same dtype."""

ELEMENTWISE = frozenset(
    getattr(p, f"{name}_p")
    for name in """
        abs add and convert_element_type div eq ge gt is_finite le lt max min mul ne neg
        not or select_n sub
    """.split()
)
"""Primitives of one value in all elements that give one value in all elements."""

Literals = frozenset[tuple[int, bool]]
"""Truth values by number, and whether each is to be true: all of them at once."""


def by_rows(graph: Graph) -> None:
    """Replaces the loops of a graph that run until each of their rows is done."""
    terms = Terms()

    def written(node: Node) -> Sequence[Operand] | None:
        if node.primitive is p.scan_p and (loop := _bounded(node)):
            return graph.call(loop, node.ins)[1:]
        if node.primitive is not p.while_p:
            return None
        condition = node.params["cond_jaxpr"]
        test = flatten(condition, graph.calls)
        if test.outputs[0].shape or not conditions(test)[0].shape:
            return None
        is_unvmapped = has_unvmapped(condition)
        kept = _Loop(node, graph.calls, terms).kept(is_unvmapped)
        users = {*graph.ahead(), *map(graph.current, graph.outputs)}
        used = {k for k, out in enumerate(node.outs) if out in users and k not in kept}
        if not kept or (used and not is_unvmapped):
            return None
        params = {**node.params, "used": tuple(used)}
        return graph.add(ROWS, params, node.ins, [out.aval for out in node.outs])

    graph.rewrite(written)


def has_unvmapped(jaxpr: AnyJaxpr) -> bool:
    """Whether a jaxpr asks whether any row of a batch goes on, as equinox does."""
    return any(e.primitive.name == UNVMAP_ANY.name for e in equations(jaxpr))


def _bounded(node: Node) -> Callable[..., list[jax.Array]] | None:
    """A scan that stays as it is once a condition of rows fails, as a ``while``.

    equinox writes loops of a bounded number of steps so, for their gradients.
    """
    closed, length = node.params["jaxpr"], node.params["length"]
    consts, carries = scan_counts(node.params)
    if len(node.ins) > consts + carries or len(node.outs) > carries:
        return None
    inner = closed.jaxpr
    last = inner.eqns[-1] if inner.eqns else None
    if last is None or last.primitive is not p.cond_p or not has_unvmapped(inner):
        return None
    stays, goes = last.params["branches"][0], last.params["branches"][-1]
    kept = dict(zip(stays.jaxpr.invars, last.invars[1:], strict=True))
    if (
        len(last.params["branches"]) != 2
        or inner.outvars != last.outvars
        or [kept.get(var) for var in stays.jaxpr.outvars] != inner.invars[consts:]
    ):
        return None
    # A truth value chooses the branch.
    chosen = (e.invars for e in inner.eqns if e.outvars == last.invars[:1])
    before = inner.replace(
        eqns=inner.eqns[:-1], outvars=[*next(chosen), *last.invars[1:]]
    )
    operands = jex_core.jaxpr_as_fun(closed.replace(jaxpr=before))

    def call(*ins: jax.Array) -> list[jax.Array]:
        fixed = ins[:consts]

        def cond(state: list[jax.Array]) -> jax.Array:
            return operands(*fixed, *state[1:])[0] & (state[0] < length)

        def body(state: list[jax.Array]) -> list[jax.Array]:
            _, *given = operands(*fixed, *state[1:])
            return [state[0] + 1, *jex_core.jaxpr_as_fun(goes)(*given)]

        first: list[jax.Array] = [jnp.int32(0), *ins[consts:]]
        return lax.while_loop(cond, body, first)

    return call


def conditions(graph: Graph) -> list[Operand]:
    """What a condition is made of: whether each row goes on, and what holds for all.

    Returns:
      The rows' truth values, of which one has to hold; then scalars, which all have to.
      The condition alone, if it is not of this kind.
    """
    rows: list[Operand] = []
    others: list[Operand] = []
    stack = list(graph.outputs)
    while stack:
        x = same(stack.pop())
        node = x.producer
        primitive = None if node is None else node.primitive
        if node is None:
            others.append(x)
        elif primitive is p.and_p:
            stack += node.ins
        elif primitive in (p.reduce_or_p, UNVMAP_ANY):
            rows.append(node.ins[0])
        elif primitive is p.not_p and (
            every := made_by(same(node.ins[0]), p.reduce_and_p)
        ):
            rows += graph.call(jnp.logical_not, every.ins)
        else:
            others.append(x)
    return [*rows, *others] if len(rows) == 1 else graph.outputs


def same(x: Operand) -> Operand:
    """The operand that this one is a copy of, or itself."""
    while (node := x.producer) is not None and node.primitive in SAME:
        if node.ins[0].aval.dtype != x.aval.dtype:
            break
        x = node.ins[0]
    return x


class Terms:
    """Numbers of expressions: values with equal numbers are equal, once broadcast."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.known: dict[Operand, int] = {}

    def number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def assume(self, inputs: Iterable[Operand], numbers: Iterable[int]) -> None:
        """Says what the inputs of a graph are."""
        self.known.update(zip(inputs, numbers, strict=True))

    def of(self, operand: Operand) -> int:
        stack = [operand]
        while stack:
            x = stack[-1]
            node = x.producer
            if x in self.known:
                stack.pop()
            elif node is None:
                constant = x.value if isinstance(x, Scalar) else x.constant
                if not x.shape and known.constant(x) is not None:
                    constant = np.asarray(constant, x.aval.dtype)
                self.known[x] = self.number(x if constant is None else key_of(constant))
            elif ahead := [y for y in node.ins if y not in self.known]:
                stack += ahead
            elif same(x) is not x or (
                node.primitive is p.broadcast_in_dim_p and node.in_shapes[0] == ()
            ):
                self.known[x] = self.known[node.ins[0]]
            else:
                ins = tuple(self.known[y] for y in node.ins)
                # One value in all elements has a number whatever its shape.
                shapes = () if node.primitive in ELEMENTWISE else node.in_shapes
                key = node.primitive, key_of(node.params), ins, tuple(shapes)
                for k, out in enumerate(node.outs):
                    self.known[out] = self.number((key, k))
        return self.known[operand]

    def literals(self, x: Operand, holds: bool = True) -> Literals:
        """What has to hold at once so that a truth value does, or does not."""
        x = same(x)
        while (node := made_by(x, p.broadcast_in_dim_p)) and not node.in_shapes[0]:
            x = same(node.ins[0])
        if node := made_by(x, p.not_p):
            return self.literals(node.ins[0], not holds)
        if node := made_by(x, p.and_p if holds else p.or_p):
            return frozenset().union(*(self.literals(y, holds) for y in node.ins))
        return frozenset({(self.of(x), holds)})


class _Loop:
    """A ``while`` of which something is to be proved.

    Args:
      node: the ``while``.
      calls: what its jaxprs call.
      terms: the numbers of the values around it.
    """

    def __init__(self, node: Node, calls: Calls, terms: Terms) -> None:
        self._calls, self._terms = calls, terms
        self._condition = node.params["cond_jaxpr"]
        self._tests = node.params["cond_nconsts"]
        front = self._tests + node.params["body_nconsts"]
        self._given = [*map(terms.of, node.ins)]
        self._begins = node.ins[front:]
        self._carried = [terms.number((node, k)) for k in range(len(node.outs))]
        body = flatten(node.params["body_jaxpr"], calls)
        self._outs = list(map(same, body.outputs))
        terms.assume(body.inputs, [*self._given[self._tests : front], *self._carried])

    def kept(self, is_flagged: bool) -> frozenset[int]:
        """The carried values that stay as they are in rows that do not go on.

        Args:
          is_flagged: whether a flag that keeps them says which rows go on, as in loops
            of equinox. Otherwise this is proved.

        Returns:
          Their places; none if it cannot be proved that such rows never go on again.
        """
        test, rows, going_on = self._tested(self._carried)
        _, read = needed([rows], frozenset(test.inputs))
        looked = {k for k, x in enumerate(test.inputs[self._tests :]) if x in read}
        steps = self._steps(going_on)
        if rows.shape and looked <= steps.keys():
            return frozenset(steps)
        # Or a flag of each row says so: it implies that the row goes on, in each step
        # that makes it, and in the first one.
        outs = [self._terms.of(out) for out in self._outs]
        for k, out in enumerate(self._outs):
            if out.aval.dtype != bool or not out.shape:
                continue
            for holds in (True, False):
                steps = self._steps(frozenset({(self._carried[k], holds)}))
                if not {k, *looked} <= steps.keys():
                    continue
                new = [steps.get(j, number) for j, number in enumerate(outs)]
                after = self._terms.literals(out, holds)
                first = self._terms.literals(self._begins[k], holds)
                if is_flagged or (
                    any(self._tested(values)[2] <= after for values in (new, outs))
                    and self._tested(self._given[-len(outs) :])[2] <= first
                ):
                    return frozenset(steps)
        return frozenset()

    def _tested(self, carried: Sequence[int]) -> tuple[Graph, Operand, Literals]:
        """The condition for carried values, its rows, and when a row goes on."""
        test = flatten(self._condition, self._calls)
        self._terms.assume(test.inputs, [*self._given[: self._tests], *carried])
        rows = conditions(test)[0]
        return test, rows, self._terms.literals(rows)

    def _steps(self, active: Literals) -> dict[int, int]:
        """The carried values that stay in rows that are not active.

        Returns:
          Their places -> the numbers of what they become in rows that are.
        """
        terms, steps = self._terms, dict[int, int]()
        for k, (old, out) in enumerate(zip(self._carried, self._outs, strict=True)):
            number, node = terms.of(out), made_by(out, p.select_n_p)
            if number == old or active in _kept_true(old, out, terms):
                steps[k] = number
            elif node is not None and len(node.ins) == 3:
                which, *cases = node.ins
                for place, case in enumerate(cases):
                    chosen = terms.literals(_unbroadcast(which), place == 0)
                    if terms.of(case) == old and chosen >= active:
                        other = terms.of(cases[1 - place])
                        steps[k] = other if chosen == active else number
        return steps


def _kept_true(old: int, out: Operand, terms: Terms) -> Iterator[Literals]:
    """What a carried truth value says that stays false once it is false."""
    if out.aval.dtype == bool:
        for holds in (True, False):
            if (old, holds) in terms.literals(out, holds):
                yield frozenset({(old, holds)})


def _unbroadcast(x: Operand) -> Operand:
    while node := made_by(x := same(x), p.broadcast_in_dim_p):
        x = node.ins[0]
    return x
