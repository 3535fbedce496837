"""Users' own classes as arguments and results: made of arrays and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.api.kinds import MESH, SHARDED, every_kind, mapped
from tests.map_programs import both_lowerings


@jax.tree_util.register_pytree_node_class
class Pair:
    """Converts what it is given, as many classes do."""

    def __init__(self, a, b):
        self.a, self.b = jnp.asarray(a), jnp.asarray(b)
        assert self.a.dtype == np.float32

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@every_kind
def test_results_lie_in_the_memory_of_the_arguments(kind):
    f = mapped(kind, lambda x: x)
    host = SHARDED.with_memory_kind("pinned_host")
    arrays = [jnp.arange(8.0), jax.device_put(np.arange(8.0, dtype=np.float32), host)]
    for array in (*arrays, *arrays):
        result = f(array)
        assert result.sharding.memory_kind == array.sharding.memory_kind
        np.testing.assert_array_equal(result, np.arange(8))


def test_integers_of_numpy_are_integers():
    two, one, zero = np.int64(2), np.int32(1), np.uint8(0)

    def f(x, y):
        return x + y

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    mapped = sm.spmap(f, in_axes=(one, None), out_axes=one, batch_size=two)
    np.testing.assert_array_equal(mapped(x, np.float32(1)), x + 1)
    mapped = sm.spmap(f, static_broadcasted_argnums=one, donate_argnums=zero)
    np.testing.assert_array_equal(mapped(x, 1), x + 1)
    mapped = sm.mesh_map(f, MESH, ({"i": one}, {}), {"i": one})
    np.testing.assert_array_equal(mapped(x, np.float32(1)), x + 1)
    mapped = sm.sharded_jit(f, ((two, 1), None), (one, two), num_partitions=two)
    np.testing.assert_array_equal(mapped(x, np.float32(1)), x + 1)


X = np.arange(16, dtype=np.float32).reshape(8, 2)


def swap(pair):
    return Pair(pair.b * 2, pair.a + 1)


def check(result, a=X, b=X + 5):
    assert isinstance(result, Pair)
    np.testing.assert_array_equal(result.a, b * 2)
    np.testing.assert_array_equal(result.b, a + 1)


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_class_that_converts(spmap, around):
    check(around(spmap(swap))(Pair(X, X + 5)))
    check(around(spmap(spmap(swap)))(Pair(X[:4], X[:4] + 5)), X[:4], X[:4] + 5)
    check(around(spmap(swap, in_axes=1, out_axes=1))(Pair(X, X + 5)))


def test_leaves_that_lie_differently():
    """No single sharding is right for all leaves of the argument or the result."""
    mapped = sm.spmap(lambda p: Pair(p.a, p.b.T), out_axes=1)
    result = mapped(Pair(X, np.ones((8, 2, 3), np.float32)))
    np.testing.assert_array_equal(result.a, X.T)
    assert result.b.shape == (3, 8, 2)


def test_a_ready_call_with_arguments_of_another_structure():
    mapped = sm.spmap(lambda x: jax.tree.map(lambda leaf: leaf + 1, x))
    for _ in range(2):
        check(swap(mapped(Pair(X - 1, X + 4))))
    result = mapped([jnp.asarray(X), jnp.asarray(X)])
    assert isinstance(result, list)
    np.testing.assert_array_equal(result[1], X + 1)


def test_transformed():
    mapped = sm.spmap(swap)

    def loss(pair):
        return (mapped(pair).a ** 2).sum()

    gradient = jax.grad(loss)(Pair(X, X))
    np.testing.assert_array_equal(gradient.b, 8 * X)
    check(jax.vmap(sm.spmap(swap))(Pair(X[None], X[None] + 5)), X[None], X[None] + 5)


def test_donated():
    given = jax.device_put(Pair(X, X + 5), sm.pmap_sharding(X.shape))
    mapped = sm.spmap(
        lambda step, pair: swap(pair), in_axes=(None, 0), donate_argnums=1
    )
    check(mapped(1, given))
    assert given.a.is_deleted()
    assert given.b.is_deleted()
    given = jax.device_put(Pair(X, X + 5), sm.pmap_sharding(X.shape))
    check(sm.spmap(swap, donate_argnums=0)(pair=given))
    assert given.b.is_deleted()


def test_axes_for_part_of_a_result():
    mapped = sm.spmap(lambda p: (swap(p), p.a.sum()), out_axes=(0, 0))
    result, total = mapped(Pair(X, X + 5))
    check(result)
    np.testing.assert_array_equal(total, X.sum(1))


def test_messages_do_without_key_paths():
    with pytest.raises(ValueError, match="None: leaf 0 of the result of swap can diff"):
        sm.spmap(swap, out_axes=None)(Pair(X, X))
    with pytest.raises(
        ValueError, match=r"out_axes must be a pytree prefix of the res"
    ):
        sm.spmap(swap, out_axes=(0, 0))(Pair(X, X))
