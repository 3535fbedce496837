"""Trees of arguments: a prefix's leaf for each leaf, and what leaves are called."""

import functools

import jax
import pytest

from shardmap.arrays import trees


class Strict:
    """A class that does not like to be made of anything but numbers."""

    def __init__(self, x):
        self.x = x


def _unflatten(_, children):
    if not isinstance(children[0], float):
        raise TypeError("only numbers")
    return Strict(*children)


jax.tree_util.register_pytree_node(Strict, lambda s: ((s.x,), None), _unflatten)


@pytest.mark.parametrize(
    ("axes", "tree", "expected"),
    [
        (0, (1, {"a": 2, "b": 3}), (0, 0, 0)),
        ((0, None), (1, {"a": 2, "b": 3}), (0, None, None)),
        ((0, {"a": 1, "b": None}), (1, {"a": 2, "b": 3}), (0, 1, None)),
        ((0, 1), (Strict(1.0), Strict(2.0)), (0, 1)),
        ((), (), ()),
    ],
)
def test_a_prefix_s_leaf_for_each_leaf(axes, tree, expected):
    assert trees.broadcast_axes("in_axes", axes, tree, "the arguments") == expected


def test_a_prefix_that_does_not_fit():
    with pytest.raises(
        ValueError,
        match=r"spmap in_axes must be a pytree prefix of the arguments: in_axes is "
        r"\(0, \{'a': 1\}\), which does not fit PyTreeDef.*\n    in_axes\[1\]\n",
    ):
        trees.broadcast_axes("in_axes", (0, {"a": 1}), (1, {"b": 2}), "the arguments")


def function(params, x, *rest, scale=1):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (function, ["params['w'][0]", "params['w'][1]", "x", "args[2]", "scale"]),
        (
            functools.partial(function, {}),
            ["x['w'][0]", "x['w'][1]", "args[1]", "args[2]", "scale"],
        ),
        (max, ["args[0]['w'][0]", "args[0]['w'][1]", "args[1]", "args[2]", "scale"]),
    ],
    ids=["function", "partial", "no signature"],
)
def test_leaves_are_called_as_a_caller_would_write_them(fun, expected):
    args = ({"w": [1.0, 2.0]}, 3.0, 4.0)
    assert trees.leaf_names(fun, range(3), args, {"scale": 2.0}) == expected


def test_names_of_results():
    tree = jax.tree.structure({"w": [0, 0], "b": 0})
    assert trees.result_names(tree) == [
        "result['b']",
        "result['w'][0]",
        "result['w'][1]",
    ]


def test_names_of_results_that_cannot_be_made_of_anything_else():
    tree = jax.tree.structure((Strict(1.0), 2.0))
    assert trees.result_names(tree) == ["leaf 0 of the result", "leaf 1 of the result"]


def test_positions_that_have_names():
    assert trees.keyword_names(function, (0, 2)) == ("params",)
    assert trees.keyword_names(max, (0,)) == ()
