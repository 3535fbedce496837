"""References (`jax.new_ref`) in maps, and casts that only `jax.shard_map` knows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map_programs import LOWERINGS, assert_same, both_lowerings, spread

MESH = sm.make_mesh({"a": 8})
X = spread((16,))


def written(x):
    kept = jax.new_ref(jnp.zeros_like(x))
    kept[...] = jnp.sin(x)
    return kept[...] * x


def added(x):
    kept = jax.new_ref(jnp.zeros_like(x))

    def step(k, _):
        kept[...] += jnp.cos(x) * k.astype(x.dtype)

    lax.fori_loop(0, 4, step, None)
    return kept[...]


def scanned(x):
    kept = jax.new_ref(x)

    def step(carry, factor):
        kept[...] = kept[...] * factor + carry
        return carry * 2, kept[...]

    _, each = lax.scan(step, x, np.array([1, 2, 3], np.float32))
    return each.sum() + kept[...]


def derivatives(map_, element):
    def total(x):
        return (map_(element)(x) * jnp.arange(16, dtype=np.float32)).sum()

    def each(x):
        _, linear = jax.vjp(map_(element), x)
        return linear(jnp.cos(x))

    return lambda x: (
        map_(element)(x),
        jax.grad(total)(x),
        jax.jvp(map_(element), (x,), (x,)),
        each(x),
        map_(jax.grad(element))(x),
    )


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("element", [written, added, scanned])
def test_references_of_an_element_are_differentiated(spmap, element):
    expected = derivatives(jax.vmap, element)(X)
    assert_same(jax.jit(derivatives(spmap, element))(X), expected)


@pytest.mark.parametrize(
    "options",
    [{"devices": 2}, {"devices": 1, "batch_size": 3}, {"lowering": "spmd"}],
    ids=["block", "batch_size", "spmd"],
)
def test_what_is_written_keeps_the_order_of_its_axes(options):
    # The product has the elements along its second axis under `jax.vmap`, which writes
    # it as it lies in JAX 0.10: wrongly for three elements of three numbers.
    matrix = jnp.arange(9, dtype=jnp.float32).reshape(3, 3)

    def element(x):
        kept = jax.new_ref(x)
        kept[...] = matrix @ x
        return kept[...]

    if count := options.get("devices"):
        options = options | {"devices": jax.devices()[:count]}
    x, mapped = spread((6, 3)), sm.spmap(element, **options)
    assert_same(mapped(x), x @ matrix.T)
    pairs = x.reshape(3, 2, 3)
    assert_same(jax.vmap(mapped)(pairs), pairs @ matrix.T)


def swap(kept, x):
    kept[...] = kept[...] + x
    return x


CUT = {"a": 0}
MAPS = {
    "spmap": sm.spmap(swap),
    "mesh_map": sm.mesh_map(swap, MESH, (CUT, CUT), CUT),
    "sharded_jit": sm.sharded_jit(swap, (None, None), None, num_partitions=2),
}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_a_reference_as_an_argument_is_refused(kind, wrap):
    kept = jax.new_ref(jnp.zeros(16))
    text = rf"{kind} argument kept is a reference, Ref{{float32\[16\]}}, which a map"
    with pytest.raises(TypeError, match=text):
        wrap(MAPS[kind])(kept, X)


@jax.custom_vjp
def squared(x):
    return jnp.sin(x)


squared.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * ct * x,))


def doubled(x):
    ref = jax.new_ref(x)
    ref[...] *= 2
    return ref[...]


@pytest.mark.parametrize(
    "around",
    [
        lambda w: jax.jit(doubled)(w),
        lambda w: lax.cond(w[0] > 0, doubled, jnp.sin, w),
        lambda w: lax.scan(lambda c, _: (doubled(c), None), w, length=2)[0],
    ],
    ids=["jit", "cond", "scan"],
)
def test_what_a_reference_inside_had_is_of_each_element(around):
    # So a backward function behind it runs once for each, on that one's cotangent.
    def gradient(map_):
        mapped = map_(lambda w, x: squared(around(w)), in_axes=(None, 0))
        return jax.grad(lambda w: mapped(w, spread((4, 3))).sum())

    w = spread((3,)) + 1
    assert_same(gradient(sm.spmap)(w), gradient(jax.vmap)(w))


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_a_reference_from_outside_is_refused(wrap):
    kept = jax.new_ref(jnp.zeros(()))
    text = r"uses a reference that is made outside of it, Ref{float32\[\]}. Make it ins"
    with pytest.raises(TypeError, match=text):
        wrap(sm.spmap(lambda x: swap(kept, x)))(X)
    with pytest.raises(TypeError, match=text):
        wrap(sm.mesh_map(lambda x: swap(kept, x.sum()), MESH, (CUT,), {}))(X)


def test_a_gather_without_varying_axes_is_told_by_its_name():
    """Or it works, as from JAX 0.12 on."""
    mapped = sm.spmap(lambda x: lax.all_gather(x, "a", to="invarying").sum(), "a")
    if jax.__version_info__ >= (0, 12):
        np.testing.assert_allclose(mapped(X), np.full(16, X.sum()), rtol=1e-5)
        return
    with pytest.raises(
        ValueError, match=r"to= of jax\.lax\.all_gather is for .* Leave to"
    ):
        mapped(X)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_casts_of_shard_map_are_refused(lowering):
    def element(x):
        return lax.pcast(x, "a", to="varying")

    with pytest.raises(
        ValueError, match=r"jax\.lax\.pcast and jax\.lax\.pvary are for "
    ):
        sm.spmap(element, "a", lowering=lowering)(X)
    mapped = sm.mesh_map(element, MESH, (CUT,), CUT, lowering=lowering)
    if lowering == "manual":  # It is a shard_map.
        np.testing.assert_array_equal(mapped(X), X)
        return
    with pytest.raises(ValueError, match="Leave the cast out; the value is the same"):
        mapped(X)
