"""What a call is refused for, whatever maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.api.calls import refusals
from shardmap.api.calls.statics import Static

X = np.ones(3, np.float32)


def test_positions_of_what_has_no_hash():
    refusals.check_hashable("spmap of f", "static", [(0, Static((1, 2)))])
    with pytest.raises(ValueError, match=r"spmap of f: argument 2 of type .*'list'>\."):
        refusals.check_hashable(
            "spmap of f", "static", [(0, Static(1)), (2, Static([]))]
        )


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("a", "argument x of type <class 'str'> is not a valid JAX type. .* in static"),
        (np.array(["a"]), "argument x is a NumPy array of dtype <U1"),
    ],
)
def test_what_is_no_array(leaf, message):
    with pytest.raises(TypeError, match=message):
        raise refusals.no_array("spmap", "x", leaf, None, "static")


def test_a_reference_is_no_array():
    reference = jax.new_ref(jnp.ones(3))
    error = refusals.no_array("spmap", "x", reference, jax.typeof(reference), "static")
    assert "argument x is a reference, " in str(error)


def test_memory_that_is_gone_or_goes_twice():
    def check(leaves, donated):
        refusals.check_there("spmap of f", leaves, donated, lambda: ["x", "y"])

    x, y, gone = (jnp.asarray(X) + k for k in range(3))
    gone.delete()
    check([x, y], [True, True])
    check([x, x], [False, False])
    check([X, X], [True, True])
    with pytest.raises(RuntimeError, match="f: Array has been deleted: y"):
        check([x, gone], [True, False])
    with pytest.raises(ValueError, match=r"y is donated, .* once, as x, y: its memory"):
        check([x, x], [False, True])


def test_what_is_there_more_than_once():
    assert refusals.repeated([X, np.ones(3), X]) == {id(X)}
    assert refusals.repeated([X]) == frozenset()
