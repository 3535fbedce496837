"""The engine, with a table of two toy rules: it knows no primitive."""

import jax
import jax.numpy as jnp
import pytest

from shardmap.plan.engine import work
from shardmap.plan.engine.rules import Cut
from shardmap.plan.engine.stages import stages_of
from tests.plan.engine.toys import CUT, NOT, analysed


def test_cuts_pass_through_calls():
    found = analysed(
        lambda x: jax.jit(lambda y: jnp.sin(y))(x), (6, 2), cuts=[[CUT, NOT]]
    )
    [out] = found.graph.outputs
    assert found.cuts[out] == [CUT, NOT]
    assert [node.name for node in found.graph.nodes] == ["sin"]
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
    summed = found.graph.nodes[0].outs[0]
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
    [out] = found.graph.outputs
    assert found.cuts[out][0].at == (2, 3, 4)
    assert found.cuts[out][0].origins == {(0, 0), (1, 0)}


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
    monkeypatch.setattr(work, "WORTH_KEEPING", 1)
    assert found() == stages
