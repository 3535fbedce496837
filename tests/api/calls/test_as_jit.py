"""What `jax.jit` is told: one sharding for a tree of one, else a tree of them."""

import jax
import pytest
from jax.sharding import NamedSharding

import shardmap as sm
from shardmap.api.calls.as_jit import jit_options
from shardmap.map.shardings import MapShardings

MESH = sm.make_mesh({"i": 8})
CUT, WHOLE = (NamedSharding(MESH, spec) for spec in (jax.P("i"), jax.P()))


def tree(*args, **kwargs):
    return jax.tree.structure((args, kwargs))


def test_without_shardings_only_the_static_arguments_are_told():
    told = jit_options(tree(1), (1,), tree(1), None, False)
    assert told == {"static_argnums": (1,), "static_argnames": ()}


@pytest.mark.parametrize("has_keywords", [False, True])
def test_shardings_are_told_for_each_argument(has_keywords):
    shardings = MapShardings((CUT, CUT, CUT, WHOLE), (WHOLE,))
    in_tree = tree({"a": 0, "b": 0}, (0, 0))
    told = jit_options(in_tree, (), jax.tree.structure(0), shardings, has_keywords)
    assert told["out_shardings"] == WHOLE
    # `jax.jit` lays out nothing where there are keyword arguments.
    wanted = None if has_keywords else (CUT, (CUT, WHOLE))
    assert told.get("in_shardings") == wanted
