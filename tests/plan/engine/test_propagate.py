"""The engine, with a table of two toy rules: it knows no primitive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives as p

from shardmap.plan.engine import propagate
from shardmap.plan.engine.factors import Factors, RuleTable
from shardmap.plan.engine.nodes import Calls, Refused, Value, flatten
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut, Reason, meet
from shardmap.plan.engine.stages import stages_of


def same(node):
    axes = range(len(node.out_shapes[0]))
    ins = [range(len(shape)) for shape in node.in_shapes]
    return Factors(node, ins, [axes])


def total(node):
    axes = range(len(node.in_shapes[0]))
    gone = node.params["axes"]
    out = [axis for axis in axes if axis not in gone]
    return Factors(
        node, [axes], [out], contracted=dict.fromkeys(gone, "add"), cheap=False
    )


TOY = RuleTable({p.sin_p: same, p.add_p: same, p.reduce_sum_p: total})
CALLS = Calls({p.jit_p: "jaxpr"}, {})
CUT = Cut((2, 4), False, frozenset({(0, 0)}))
NOT = Cut()


def analysed(fun, *shapes, cuts, partial=True):
    avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    program = flatten(jax.make_jaxpr(fun)(*avals), CALLS)
    return Analysis(program, TOY, cuts, partial)


def test_cuts_pass_through_calls():
    found = analysed(
        lambda x: jax.jit(lambda y: jnp.sin(y))(x), (6, 2), cuts=[[CUT, NOT]]
    )
    [out] = found.program.outputs
    assert found.cuts[out] == [CUT, NOT]
    assert [node.name for node in found.program.nodes] == ["sin"]
    [stage] = stages_of(found)
    assert stage.num_shards == 3


def test_a_primitive_that_is_not_in_the_table_ends_a_cut_with_a_reason():
    found = analysed(lambda x: jnp.cos(jnp.sin(x)), (6,), cuts=[[CUT]])
    [ended] = found.ended
    assert ended.node.name == "cos"
    assert "no rule for cos" in ended.reason.why
    assert "register_rule" in ended.reason.remedy
    assert ended.origins == {(0, 0)}
    assert "test_propagate.py" in ended.node.source
    assert stages_of(found)[0].num_shards == 1


def test_a_cut_sum_is_pending_and_ends_its_stage_before_what_is_not_linear():
    found = analysed(lambda x: jnp.sin(jnp.sum(x, 0)), (6, 2), cuts=[[CUT, NOT]])
    summed = found.program.nodes[0].outs[0]
    assert found.pending[summed].combiner == "add"
    assert list(found.kept) == [summed]
    first, second = stages_of(found)
    assert [r.combiner for r in first.results] == ["add"]
    assert (first.num_shards, second.num_shards) == (3, 1)


def test_without_partial_results_a_sum_is_whole():
    found = analysed(
        lambda x: jnp.sin(jnp.sum(x, 0)), (6, 2), cuts=[[CUT, NOT]], partial=False
    )
    assert not found.pending
    [ended] = found.ended
    assert "partial=True" in ended.reason.remedy
    assert len(stages_of(found)) == 1


def test_different_cuts_are_refined():
    other = Cut((3,), False, frozenset({(1, 0)}))
    found = analysed(lambda x, y: x + y, (6,), (6,), cuts=[[CUT], [other]])
    [out] = found.program.outputs
    assert found.cuts[out][0].at == (2, 3, 4)
    assert found.cuts[out][0].origins == {(0, 0), (1, 0)}


def test_a_soft_cut_gives_way():
    soft = Cut((1, 3, 5), True, frozenset({(1, 0)}))
    assert meet([CUT, soft]).at == CUT.at
    assert meet([soft, Cut((2,), True)]).at == soft.at
    assert meet([NOT, soft]) == soft
    assert meet([]) == NOT


def test_one_axis_twice_in_a_result_gives_two_loops():
    def with_transpose(x):
        return x + x

    found = analysed(with_transpose, (6, 6), cuts=[[CUT, CUT]])
    found.classes.unite(
        (found.program.inputs[0].number, 0), (found.program.inputs[0].number, 1)
    )
    [stage] = stages_of(found)
    assert stage.num_shards == 9


def test_results_with_different_loops_do_not_multiply():
    found = analysed(
        lambda x, y: (jnp.sin(x), jnp.sin(y)), (6,), (4,), cuts=[[CUT], [CUT]]
    )
    [stage] = stages_of(found)
    assert stage.num_shards == 6
    made = [stage.recipe(k)[0] for k in range(6)]
    assert all(sum(box is not None for box in boxes) == 1 for boxes in made)


@pytest.mark.parametrize(
    ("fun", "shapes", "stages"),
    [
        # A shard sums the columns that it needs, but all of the second operand.
        (lambda x, w: x + jnp.sum(w, 0), [(6,), (5, 6)], [3]),
        (lambda x, w: x + jnp.sin(jnp.sum(w)), [(6,), (4, 5)], [1, 3]),
        # Nothing is known of cos: it needs the whole of its operand.
        (lambda x, w: x + jnp.sin(jnp.cos(w)), [(6,), (6,)], [1, 3]),
    ],
)
def test_what_every_shard_would_repeat_is_computed_once(
    monkeypatch, fun, shapes, stages
):
    cuts = [[CUT], [NOT] * len(shapes[1])]

    def found():
        return [s.num_shards for s in stages_of(analysed(fun, *shapes, cuts=cuts))]

    assert found() == [3]
    monkeypatch.setattr(propagate, "WORTH_KEEPING", 1)
    assert found() == stages


def test_two_runs_give_the_same_plan():
    def run():
        found = analysed(
            lambda x, y: jnp.sin(jnp.sum(x + y, 0)),
            (6, 2),
            (6, 2),
            cuts=[[CUT, NOT]] * 2,
        )
        return [stage.recipe(k)[0] for stage in stages_of(found) for k in range(2)]

    assert run() == run()


def test_an_effect_is_refused_by_name():
    with pytest.raises(Refused, match=r"debug_print at .*test_propagate.py"):
        analysed(lambda x: jax.debug.print("x"), (6,), cuts=[[CUT]])


def test_a_constant_is_kept_once():
    big = jnp.arange(6.0)
    program = flatten(jax.make_jaxpr(lambda x: jnp.sin(x + big) + big)(big), CALLS)
    assert len(program.constants) == 1
    assert all(isinstance(value, Value) for value in program.constants)


def test_reasons_print_their_remedy():
    assert str(Reason("it is so", "do that")) == "it is so (do that)"
    assert str(Reason("it is so")) == "it is so"
