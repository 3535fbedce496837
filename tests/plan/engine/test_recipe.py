"""From boxes of results back to boxes of inputs, and the function in between."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmap.plan.engine.emitting.emit import emit
from shardmap.plan.engine.nodes import flatten
from shardmap.plan.engine.recipe import relevant_nodes, trace_back
from shardmap.plan.engine.slices import slices
from shardmap.plan.lax.table import CALLS, TABLE

X = np.random.default_rng(0).standard_normal((7, 7), dtype=np.float32)


class Traced:
    """A function of ``X``, ready for recipes of boxes of its results."""

    def __init__(self, fun):
        self.graph = flatten(jax.make_jaxpr(fun)(X), CALLS)
        self.rules = {n.number: TABLE.rule(n) for n in self.graph.nodes}
        self.nodes = {n.number: n for n in self.graph.nodes}
        self.stops = frozenset([*self.graph.inputs, *self.graph.constants])
        self.backwards = relevant_nodes(self.graph.outputs, self.stops)

    def recipe(self, *boxes):
        demands = [
            box and (value, box)
            for value, box in zip(self.graph.outputs, boxes, strict=True)
        ]
        return trace_back(self.backwards, self.rules, demands, self.stops, {})

    def run(self, *boxes):
        recipe = self.recipe(*boxes)
        reads = [X[slices(box)] for _, box in recipe.reads]
        run = emit(recipe.static, self.nodes, self.rules, self.graph.outputs)
        return run(reads, jnp.asarray(recipe.starts, jnp.int32))


def several(x):
    y = jnp.sin(x) + jnp.arange(7.0)[None]
    return y + y.T[::-1], y[1:, ::2] - x[:-1, 1::2].sum()


intervals = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(
    lambda pair: (pair[0], min(sum(pair), 6))
)


@settings(max_examples=10)
@given(st.tuples(intervals, intervals), intervals)
def test_a_box_is_what_the_whole_result_has_there(box, rows):
    want = jax.jit(several)(X)
    got = Traced(several).run(box, (rows, (0, 3)))
    np.testing.assert_allclose(got[0], want[0][slices(box)], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1][slices((rows, (0, 3)))], rtol=1e-4)


def test_only_what_is_asked_is_computed():
    traced = Traced(lambda x: (jnp.sin(x), jnp.cos(x)))
    recipe = traced.recipe(((0, 2), (0, 7)), None)
    assert [traced.nodes[step.node].name for step in recipe.static.steps] == ["sin"]
    assert [box for _, box in recipe.reads] == [((0, 2), (0, 7))]


def test_equal_shapes_at_other_places_are_one_function():
    traced = Traced(lambda x: jnp.sin(x) + jnp.arange(7.0)[None])
    first, second = (traced.recipe(((k, k + 2), (k, k + 3))) for k in (0, 3))
    assert first.static == second.static
    assert first.starts != second.starts


def test_far_boxes_of_one_value_are_read_apart():
    traced = Traced(lambda x: x + x.T)
    boxes = [box for _, box in traced.recipe(((0, 2), (5, 7))).reads]
    assert boxes == [((0, 2), (5, 7)), ((5, 7), (0, 2))]


def test_a_stop_is_read_though_it_could_be_made():
    traced = Traced(lambda x: jnp.cos(jnp.sin(x)))
    [middle] = traced.graph.nodes[0].outs
    stops = traced.stops | {middle}
    outputs = traced.graph.outputs
    assert [n.name for n in relevant_nodes(outputs, stops)] == ["cos"]
    demand = [(outputs[0], ((0, 2), (0, 7)))]
    recipe = trace_back(traced.backwards, traced.rules, demand, stops, {})
    assert [value for value, _ in recipe.reads] == [middle]
