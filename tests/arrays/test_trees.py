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
