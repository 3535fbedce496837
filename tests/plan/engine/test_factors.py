"""Rules as data: what a cut becomes, what a box needs, what a shard computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import BESIDE, Factors, RuleTable, taken_whole
from shardmap.plan.engine.nodes import Calls, flatten
from shardmap.plan.engine.rules import Cut, Link, Reason, Windowed
from shardmap.plan.engine.slices import Window

CUT = Cut((2,), False, frozenset({(0, 0)}))
WHOLE = Reason("because")


def node_of(fun, *shapes):
    avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    graph = flatten(jax.make_jaxpr(fun)(*avals), Calls({p.jit_p: "jaxpr"}, {}))
    return graph.nodes[-1]


def dot():
    node = node_of(jnp.dot, (4, 6), (6, 5))
    return Factors(node, ["ik", "kj"], ["ij"], contracted={"k": "add"}, cheap=False)


def shifted():
    """``x[1:]`` of six elements."""
    node = node_of(lambda x: x[1:], (6,))
    return Factors(node, [[Windowed("i", Window(6, pad=-1))]], ["i"])


def test_a_cut_of_what_is_summed_over_says_all_that_the_engine_asks():
    forward = dot().forward([[Cut(), Cut()], [CUT, Cut()]])
    [contraction] = forward.contracted
    assert contraction == ("k", "add", 6, 0, 1, CUT, None)
    assert forward.outs == [[Cut(), Cut()]]
    assert forward.lost == []


def test_what_no_result_has_and_nothing_combines_is_whole():
    node = node_of(lambda x: jnp.sum(x, 0), (4, 6))
    rule = Factors(node, ["ij"], ["j"])
    [lost] = rule.forward([[CUT, Cut()]]).lost
    assert "depends on the whole axis" in lost.reason.why
    assert str(rule) == "* a -> a"


def test_a_cut_beside_a_window_is_lost():
    rule = shifted()
    beside = Cut((1,), False, frozenset({(0, 0)}))
    assert [lost.reason for lost in rule.forward([[beside]]).lost] == [BESIDE]
    [[moved]] = rule.forward([[CUT]]).outs
    assert (moved.at, moved.soft, moved.origins) == ((1,), True, CUT.origins)


def test_a_box_needs_the_box_behind_its_window():
    need = shifted().backward([((2, 4),)], {})
    assert need.boxes == (((3, 5),),)
    assert need.static.sizes == (2,)


def test_a_loop_over_a_part_needs_that_part():
    need = dot().backward([((0, 4), (1, 3))], {"k": (2, 4)})
    assert need.boxes == (((0, 4), (2, 4)), ((2, 4), (1, 3)))


def test_axes_under_one_name_are_linked():
    links = dot().links()
    assert [Link("in", 0, 0), Link("out", 0, 0)] in links
    assert [Link("in", 0, 1), Link("in", 1, 0)] in links


def test_the_work_of_a_contraction_is_more_than_its_operands():
    assert dot().elements() == 4 * 6 * 5
    assert shifted().elements() == 6 + 5


def test_a_rule_prints_itself():
    assert str(dot()) == "a b, b c -> a c; b add"
    assert str(shifted()) == "a~ -> a"
    assert str(taken_whole(node_of(jnp.sin, (2, 3)), WHOLE)) == "* * -> * *"


def test_operands_in_two_boxes_are_emitted_for_both_and_cropped():
    """``x + y`` of results whose boxes differ: the hull is made, and cropped."""
    rule = Factors(node_of(jnp.add, (6,), (6,)), ["i", "i"], ["i"])
    need = rule.backward([((1, 3),)], {"i": (0, 5)})
    x = np.arange(6, dtype=np.float32)
    assert need.boxes == (((0, 5),), ((0, 5),))
    starts = [jnp.int32(s) for s in need.starts]
    [result] = rule.emit([x[:5], x[:5]], need.static, starts)
    np.testing.assert_array_equal(result, (x + x)[1:3])


def test_a_table_takes_whole_what_it_does_not_know():
    rule = RuleTable().rule(node_of(jnp.sin, (2,)))
    [lost] = rule.forward([[Cut((1,), False, frozenset({(0, 0)}))]]).lost
    assert "no rule for sin" in lost.reason.why


def test_axes_of_different_sizes_are_no_one_factor():
    with pytest.raises(AssertionError, match="dot_general"):
        Factors(node_of(jnp.dot, (4, 6), (6, 5)), ["ik", "kk"], ["ik"])
