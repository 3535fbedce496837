"""What rules of loops and branches say of the axes of their bodies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.engine.nodes import flatten
from shardmap.plan.engine.rules import Cut
from shardmap.plan.lax.table import CALLS, TABLE

X = jax.ShapeDtypeStruct((4, 6, 6), np.float32)
CUT = Cut((2,), False, frozenset({(0, 0)}))


def rule_of(fun, *avals, name):
    graph = flatten(jax.make_jaxpr(fun)(*avals), CALLS)
    [node] = [node for node in graph.nodes if node.name == name]
    return TABLE.rule(node)


def forward(rule, operand, *axes):
    """What becomes of cuts of an operand's axes."""
    cuts = [[Cut() for _ in shape] for shape in rule.node.in_shapes]
    for axis in axes:
        cuts[operand][axis] = CUT
    return rule.forward(cuts)


def scanned(body):
    def fun(x):
        return lax.scan(lambda c, row: (c, body(row)), 0.0, x)

    rule = rule_of(fun, X, name="scan")
    operand = rule.node.in_shapes.index((4, 6, 6))
    return rule, operand


def test_an_axis_that_the_body_treats_index_by_index_passes():
    rule, x = scanned(lambda row: jnp.sin(row) * 2)
    found = forward(rule, x, 1)
    [out] = [outs for outs in found.outs if len(outs) == 3]
    assert [cut.at for cut in out] == [(), (2,), ()]
    assert not found.lost
    assert not found.contracted


def test_an_axis_that_the_body_mixes_names_the_operation():
    rule, x = scanned(lambda row: jnp.cumsum(row, 0))
    found = forward(rule, x, 1, 2)
    [lost] = found.lost
    assert "mixes this axis at cumsum (" in lost.reason.why
    assert "test_inner.py" in lost.reason.why
    assert "treats index by index" in lost.reason.remedy
    [out] = [outs for outs in found.outs if len(outs) == 3]
    assert [cut.at for cut in out] == [(), (), (2,)]


def test_a_transpose_links_axes_of_operands_and_results():
    rule, x = scanned(lambda row: row.T)
    found = forward(rule, x, 1)
    [out] = [outs for outs in found.outs if len(outs) == 3]
    assert [cut.at for cut in out] == [(), (), (2,)]


@pytest.mark.parametrize(("how", "combiner"), [(jnp.sum, "add"), (jnp.max, "max")])
def test_what_the_body_sums_over_gives_parts(how, combiner):
    rule, x = scanned(lambda row: how(row, 0))
    found = forward(rule, x, 1)
    [contraction] = found.contracted
    assert (contraction.operand, contraction.axis, contraction.size) == (x, 1, 6)
    [number] = [k for k, shape in enumerate(rule.node.out_shapes) if shape == (4, 6)]
    assert contraction.of(number) == combiner
    others = [k for k in range(len(rule.node.outs)) if k != number]
    assert [contraction.of(k) for k in others] == [None] * len(others)


def test_one_loop_that_is_summed_over_twice_is_whole():
    """Pieces of it would meet only the same pieces of it."""
    rule, x = scanned(lambda row: (row * row.T).sum((0, 1)))
    found = forward(rule, x, 1)
    assert "mixes this axis at reduce_sum" in found.lost[0].reason.why
    assert not found.contracted


def test_branches_that_differ_in_what_they_sum_over_give_no_parts():
    def fun(flag, x):
        return lax.cond(flag, lambda x: x.sum(0), lambda x: x.max(0), x)

    rule = rule_of(fun, jax.ShapeDtypeStruct((), bool), X, name="cond")
    x = rule.node.in_shapes.index((4, 6, 6))
    assert forward(rule, x, 0).lost
    found = forward(rule, x, 1)
    assert not found.lost
    assert [cut.at for cut in found.outs[0]] == [(2,), ()]


def test_loops_that_run_over_a_part_are_told_from_those_that_do_not():
    rule, x = scanned(lambda row: row * 2)
    _, rows, columns = rule.ins[x]
    assert rule.limited({rows: (0, 6), columns: (2, 4)}) == {columns: (2, 4)}
