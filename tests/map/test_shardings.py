"""How a map's operands and results are cut over its mesh, with what maps inside cut."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.shardings import map_shardings, partition_spec

GRID = sm.make_mesh({"x": 4, "y": 2})
X = np.ones((8, 4, 6), np.float32)


def specs(fun, *args, **options):
    """The specs of the operands and results of a map."""
    options = {"mesh": GRID, "mesh_axes": "x"} | options
    mapped = sm.spmap(fun, "i", **options)
    (equation,) = jax.make_jaxpr(mapped)(*args).jaxpr.eqns
    assert equation.primitive is spmap_p
    shardings = map_shardings(equation.params)
    return tuple([s.spec for s in each] for each in shardings)


def test_the_mapped_axis_is_cut():
    assert specs(lambda x: x, X) == ([P("x")], [P("x")])
    ins, outs = specs(lambda x, y: (x, y), X, X, in_axes=(1, None), out_axes=(2, 0))
    assert ins == [P(None, "x"), P()]
    assert outs == [P(None, None, "x"), P("x")]
    both = specs(lambda x: x, X, mesh_axes=("x", "y"))
    assert both == ([P(("x", "y"))], [P(("x", "y"))])


@pytest.mark.parametrize("count", [3, 6])
def test_what_does_not_divide_is_whole(count):
    assert specs(lambda x: x, X[:count]) == ([P()], [P()])


def test_what_goes_straight_to_a_map_inside_is_cut_by_it_too():
    inner = sm.spmap(lambda x: x * 2, "j", in_axes=1, mesh=GRID, mesh_axes="y")
    # The axis of the inner map is behind that of the outer one.
    assert specs(lambda x: inner(x), X) == ([P("x", None, "y")], [P("x", "y")])
    ins, outs = specs(lambda x: inner(x + 1) + 1, X)
    assert (ins, outs) == ([P("x")], [P("x")])
    # It is wanted in two ways, so that neither decides.
    assert specs(lambda x: (inner(x), x), X)[0] == [P("x")]


def test_results_without_entries_are_whole():
    assert specs(lambda x: x[:0], X) == ([P("x")], [P()])


def test_the_spec_of_one_dimension():
    assert partition_spec(("x",), 1) == P(None, "x")
    assert partition_spec(("x", "y"), 0) == P(("x", "y"))
    assert partition_spec(("x",), None) == P()
