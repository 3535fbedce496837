"""Blocks of elements in loops: ``batch_size``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map.map_checks import array, assert_close
from tests.map_programs import float_index


def indexed(x):
    """An element's index in calls, and closed over by control flow and a map."""
    index = jax.jit(lambda: float_index("i"))()
    x = lax.cond(index > 3, lambda x: x * index, lambda x: -x, x)
    x = lax.while_loop(lambda c: c.sum() < index, lambda c: c + 3.0, x)
    return sm.spmap(jax.checkpoint(lambda x: x + index), "j")(x)


def written(x):
    kept = jax.new_ref(jnp.zeros_like(x))
    jax.ref.addupdate(kept, ..., x * x)
    return kept[...]


LOOPED = {
    "elementwise": (lambda x: jnp.sin(x) * 2, 0),
    "index": (lambda x: x + float_index("i"), 0),
    "index, closed over": (lambda x: (indexed(x), lax.psum(indexed(x), "i")), 0),
    "final psum": (lambda x: lax.psum(x * 2, "i"), None),
    "final pmean": (lambda x: {"loss": lax.pmean((x**2).mean(), "i")}, None),
    "final pmax, mapped": (lambda x: lax.pmax(x, "i"), 0),
    "psum of a psum": (lambda x: lax.psum(lax.psum(x, "i"), "i"), None),
    "psum of a reference": (lambda x: lax.psum(written(x), "i"), None),
    "final pmean in a call": (jax.jit(lambda x: lax.pmean(x, "i")), None),
    "several": (
        lambda x: (x * 2, lax.psum(x, "i"), lax.pmin(x, "i") * 3, 7.0),
        (1, None, 0, 0),
    ),
}


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("size", [16, 41])
@pytest.mark.parametrize("name", LOOPED)
def test_batch_size(name, size, batch_size):
    body, out_axes = LOOPED[name]
    x = array(size, 3)
    result = sm.spmap(body, "i", out_axes=out_axes, batch_size=batch_size)(x)
    expected = jax.jit(jax.vmap(body, axis_name="i", out_axes=out_axes))(x)
    assert_close(result, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_long_axes_is_rounded_once(dtype):
    size, ones, one = 5003, jnp.ones(5003, dtype), jnp.ones((), dtype)
    groups = [[*range(9)], [*range(9, size)]]

    def sums(x, w):
        return lax.psum(x * w, "i"), lax.pmean(x, "i")

    def in_groups(x):
        return lax.psum(x, "i", axis_index_groups=groups)

    for batch_size in (None, 1, 700):
        mapped = sm.spmap(
            sums, "i", in_axes=(0, None), out_axes=None, batch_size=batch_size
        )

        @jax.jit
        def all_of(x, w, f=mapped):
            slope = jax.grad(lambda w: f(x, w)[0].astype(np.float32))(w)
            means = jax.grad(lambda x: f(x, w)[1].astype(np.float32))(x)
            return f(x, w), slope, means[0] * 5003

        assert_rounded(all_of(ones, one), ((5003, 1), 5003, 1))
    results = sm.spmap(in_groups, "i")(ones)
    assert_rounded((results[0], results[9]), (9, 4994))


def assert_rounded(values, expected):
    jax.tree.map(
        lambda value, number: np.testing.assert_allclose(
            np.asarray(value, np.float32), number, rtol=2**-7
        ),
        values,
        expected,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["default", "mesh", "both loop", "spmd"])
def test_a_weight_that_nested_maps_share_has_a_gradient(place):
    mesh = sm.make_mesh({"a": 2, "b": 4})
    outer, inner = {
        "default": ({"batch_size": 1}, {}),
        "mesh": (
            {"mesh": mesh, "mesh_axes": "a", "batch_size": 4},
            {"mesh": mesh, "mesh_axes": "b"},
        ),
        "both loop": ({"batch_size": 1}, {"batch_size": 3}),
        "spmd": ({"batch_size": 1}, {"lowering": "spmd"}),
    }[place]
    weights, x = array(3) / 10, array(12, 4, 3) / 100

    def loss(map_, outer, inner):
        nested = map_(
            map_(
                lambda w, v: jnp.tanh(v @ w), axis_name="j", in_axes=(None, 0), **inner
            ),
            axis_name="i",
            in_axes=(None, 0),
            **outer,
        )
        return lambda w: nested(w, x).sum()

    given = jax.grad(loss(sm.spmap, outer, inner))(weights)
    assert_close(given, jax.grad(loss(jax.vmap, {}, {}))(weights))


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (lambda x: x / lax.psum(x, "i"), "psum .* in the middle of"),
        (lambda x: lax.all_gather(x, "i"), "all_gather .* in the middle of"),
        (
            lambda x: lax.all_to_all(
                jnp.stack([x, x]),
                "i",
                *(0, 0),
                axis_index_groups=[[k, k + 1] for k in range(0, 40, 2)],
            ),
            "all_to_all .* in the middle of",
        ),
        (lambda x: lax.pmax(lax.psum(x, "i"), "i"), "psum .* in the middle of"),
        (
            lambda x: lax.psum(x, "i", axis_index_groups=[[*range(40)]]),
            "psum .* in the middle of",
        ),
        (
            lambda x: jax.jit(lambda s: s * float_index("i"))(lax.psum(x, "i")),
            "psum .* in the middle of",
        ),
        (
            lambda x: sm.tap(print, lax.psum(x, "i"), result_shape=x),
            "psum .* in the middle of",
        ),
        (
            lambda x: lax.scan(lambda c, _: (lax.psum(c, "i"), ()), x, length=2)[0],
            "psum .* in a scan in",
        ),
        (
            sm.spmap(lambda x: lax.psum(x, ("i", "j")), "j", out_axes=None),
            "psum .* in a spmap in",
        ),
    ],
)
def test_a_collective_that_elements_go_on_with_is_refused(body, where):
    collective, place = where.split(" .* ")
    text = (
        "batch_size=2 is less than the 5 elements of axis 'i' on each device, but "
        f"{collective} over that axis stands {place} the function: .* "
        "Leave batch_size out, give at least 5, or make the collective the last step"
    )
    with pytest.raises(ValueError, match=text):
        sm.spmap(body, "i", batch_size=2)(array(40, 3))


@pytest.mark.parametrize(
    ("body", "holder"),
    [
        (lambda x: lax.cond(x[0] > 0, lambda: float_index("i"), lambda: 1.0), "cond"),
        (sm.spmap(lambda x: x + float_index("i"), "j"), "spmap"),
    ],
)
def test_an_index_asked_for_in_control_flow_is_refused(body, holder):
    text = (
        "batch_size=2 is less than the 5 elements of axis 'i' on each device, and a "
        f"{holder} in the function asks for axis_index over that axis. Call "
        "jax.lax.axis_index before it"
    )
    with pytest.raises(ValueError, match=text):
        sm.spmap(body, "i", batch_size=2)(array(40, 3))


def test_a_loop_without_shardy():
    def element(x):
        return x - float_index("i"), lax.psum(x, "i"), x

    x = np.arange(32, dtype=np.float32)
    wanted = jax.vmap(element, axis_name="i")(x)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        given = sm.spmap(element, "i", batch_size=3)(x)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


@pytest.mark.parametrize("seen", [lambda v: v, lambda v: sm.tap(len, v)])
def test_groups_of_an_axis_around_the_loop(seen):
    """With a call of the host, the loop is over single elements."""

    def swapped(v):
        groups = [[0, 1]]
        return seen(lax.all_to_all(v, "i", 0, 0, axis_index_groups=groups, tiled=True))

    x = array(2, 12, 4)
    looped = sm.spmap(sm.spmap(swapped, "j", batch_size=2), "i")(x)
    pairs = x.reshape(2, 12, 2, 2)
    np.testing.assert_array_equal(
        looped, np.stack([np.concatenate(pairs[:, :, k], -1) for k in range(2)])
    )


@pytest.mark.parametrize(
    ("dtype", "size", "value", "total"),
    [(np.float16, 70_000, 0.5, 35_000), (np.uint8, 300, 3, 900 % 256)],
)
def test_sums_of_shared_values_of_small_types(dtype, size, value, total):
    def add(x, y):
        return x + lax.psum(y, "i")

    added = sm.spmap(add, "i", in_axes=(0, None), batch_size=2)
    given = added(np.zeros(size, dtype), dtype(value))
    np.testing.assert_array_equal(given, np.full(size, total, dtype))
