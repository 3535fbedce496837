"""The function of a recipe: each step once, literals as they are, what is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import summarize

from shardmap.plan.engine.emitting.emit import emit
from shardmap.plan.engine.nodes import flatten
from shardmap.plan.engine.recipe import relevant_nodes, trace_back
from tests.plan.engine.toys import CALLS, TOY

X = np.arange(12.0, dtype=np.float32).reshape(4, 3)


def emitted(fun, *boxes):
    """The function of boxes of the results, as equations, and what it gives."""
    graph = flatten(jax.make_jaxpr(fun)(X), CALLS)
    rules = {node.number: TOY.rule(node) for node in graph.nodes}
    nodes = {node.number: node for node in graph.nodes}
    stops = frozenset(graph.inputs)
    demands = [
        None if box is None else (value, box)
        for value, box in zip(graph.outputs, boxes, strict=True)
    ]
    backwards = relevant_nodes(graph.outputs, stops)
    recipe = trace_back(backwards, rules, demands, stops, {})
    run = emit(recipe.static, nodes, rules, graph.outputs)
    reads = [X[tuple(slice(*each) for each in box)] for _, box in recipe.reads]
    starts = jnp.asarray(recipe.starts, jnp.int32)
    return jax.make_jaxpr(run)(reads, starts).jaxpr.eqns, run(reads, starts)


def names(equations):
    return [str(equation.primitive) for equation in equations]


def test_what_two_results_are_made_of_is_computed_once():
    def fun(x):
        y = jnp.sin(x)
        return y + y, y.sum(0)

    equations, (both, total) = emitted(fun, ((1, 3), (0, 3)), ((0, 3),))
    assert names(equations).count("sin") == 1
    np.testing.assert_allclose(both, 2 * np.sin(X[1:3]), rtol=1e-6)
    np.testing.assert_allclose(total, np.sin(X).sum(0), rtol=1e-5)


def test_what_is_not_asked_for_is_not_computed():
    def fun(x):
        return jnp.sin(x), x.sum(0)

    equations, (first, second) = emitted(fun, None, ((1, 2),))
    assert "sin" not in names(equations)
    assert first is None
    np.testing.assert_allclose(second, X.sum(0)[1:2])


def test_literals_are_operands_and_results():
    _, (more, number) = emitted(lambda x: (x + 2.0, 3.0), ((0, 1), (0, 3)), ())
    np.testing.assert_array_equal(more, X[:1] + 2)
    assert number == 3


def test_equations_stand_where_the_user_wrote_them():
    def fun(x):
        return jnp.sin(x)

    equations, _ = emitted(fun, ((0, 4), (0, 3)))
    assert summarize(equations[0].source_info).endswith(".fun)")
