"""Mesh axes that no array names, that no map is over, that several maps name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import LOWERINGS, collectives_of

MESH = sm.make_mesh({"x": 2, "y": 4})
X = np.arange(8, dtype=np.float32) / 8


def double(v):
    return 2 * v


# mesh_map binds them all


@jax.custom_vjp
def summed_backward(v):
    return jnp.sin(v)


summed_backward.defvjp(
    lambda v: (jnp.sin(v), v), lambda v, g: (lax.psum(g * jnp.cos(v), "y"),)
)


def own_part(v):
    """Each device along y has a part of the work."""
    part = lax.dynamic_slice_in_dim(v, lax.axis_index("y"), 1)
    return lax.psum(jnp.sin(part).sum(), ("y", "x"))


UNNAMED = {
    "summed over both": (lambda v: lax.psum(v.sum(), ("x", "y")), {}),
    "mean over the unnamed": (lambda v: lax.pmean(v**2, "y"), {"x": 0}),
    "its size": (lambda v: v * lax.axis_size("y") + lax.psum(1, "y"), {"x": 0}),
    "its index": (
        lambda v: v * lax.axis_index("y").astype(np.float32),
        {"x": 0, "y": 0},
    ),
    "its part": (own_part, {}),
    "sums only backward": (summed_backward, {"x": 0}),
    "nothing of it": (lambda v: jnp.sin(v) * v, {"x": 0}),
}


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", UNNAMED)
def test_mesh_map_binds_axes_that_no_array_names(name, lowering):
    fun, out_axes = UNNAMED[name]
    mapped = sm.mesh_map(fun, MESH, {"x": 0}, out_axes, lowering=lowering)
    spec = P(tuple(out_axes)) if out_axes else P()
    expected = jax.jit(
        jax.shard_map(fun, mesh=MESH, in_specs=P("x"), out_specs=spec, check_vma=False)
    )
    np.testing.assert_allclose(mapped(X), expected(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mapped)(X), expected(X), rtol=1e-6)
    both = np.stack([X, -X])
    np.testing.assert_allclose(
        jax.vmap(mapped)(both), np.stack([expected(x) for x in both]), rtol=1e-6
    )
    gradients = [jax.grad(lambda v, f=f: (f(v) ** 2).sum()) for f in (mapped, expected)]
    ours, theirs = gradients[0](X), jax.jit(gradients[1])(X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(gradients[0])(X), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_axis_that_nothing_uses_costs_nothing(lowering):
    mapped = sm.mesh_map(
        lambda v: jnp.sin(v) * v, MESH, {"x": 0}, {"x": 0}, lowering=lowering
    )
    assert collectives_of(jax.jit(mapped), X) == {}


def test_blocks_on_both_axes_need_no_collective_by_the_partitioner():
    axes = {"x": 0, "y": 0}
    mapped = sm.mesh_map(double, MESH, axes, axes, lowering="spmd")
    assert collectives_of(jax.jit(mapped), X) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_axis_that_a_map_around_is_over(lowering):
    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 32
    inner = sm.mesh_map(
        lambda b: lax.psum(jnp.sin(b), ("x", "y")),
        MESH,
        {"x": 0},
        {},
        lowering=lowering,
    )
    mapped = sm.spmap(inner, "y", mesh=MESH, mesh_axes="y", lowering=lowering)
    expected = np.broadcast_to(np.sin(x).reshape(4, 2, 4).sum((0, 1)), (4, 4))
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-6)
    gradient = jax.grad(lambda v: (mapped(v) ** 2).sum())(x)
    numeric = 2 * 4 * np.tile(expected, (1, 2)) * np.cos(x)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5)
    # It goes by the name that the map around gives it.
    other = sm.spmap(inner, "i", mesh=MESH, mesh_axes="y", lowering=lowering)
    with pytest.raises(NameError, match=r"name: y\. .* bound here: 'x', 'i'"):
        other(x)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_axis_that_a_map_inside_is_over(lowering):
    def inside(b):
        inner = sm.spmap(lambda v: v / lax.psum(v, "j"), "j", mesh=MESH, mesh_axes="y")
        return inner(b) * lax.psum(1, "x")

    mapped = sm.mesh_map(
        inside, MESH, {"x": 0}, {"x": 0}, axis_names={"x"}, lowering=lowering
    )
    x = X + 1
    expected = 2 * (x.reshape(2, 4) / x.reshape(2, 4).sum(1, keepdims=True)).reshape(8)
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-6)
    nested = sm.mesh_map(
        lambda b: (
            sm.mesh_map(
                lambda c: lax.psum(c, "y"), MESH, {"x": 0}, {"x": 0}, lowering=lowering
            )(b[0])
            + lax.psum(1.0, "y")
        ),
        MESH,
        {"y": 0},
        {"y": 0},
        axis_names={"y"},
        lowering=lowering,
    )
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    np.testing.assert_allclose(
        nested(rows), np.tile(rows.sum(0), 4).reshape(16) + 4, rtol=1e-6
    )


# The transposed sum of a sum that the function goes on with


def test_gradient_of_a_sum_of_a_sum_inside():
    def part(v):
        return lax.psum(jnp.sin(v[lax.axis_index("y")]), "y")

    def inner(axis):
        return sm.spmap(axis, "y", in_axes=None, out_axes=None, axis_size=4)

    mapped = sm.spmap(inner(lambda v: lax.psum(part(v), "x")), "x", out_axes=None)
    x = X.reshape(2, 4)
    gradient = jax.grad(lambda v: mapped(v) ** 2)(x)
    np.testing.assert_allclose(gradient, 2 * np.sin(x).sum() * np.cos(x), rtol=1e-6)


def test_the_index_along_an_axis_that_maps_inside_name_so():
    # JAX checks the effects of the equation against its parameters.
    inner = sm.spmap(
        lambda v: v * lax.axis_index("y").astype(np.float32),
        "y",
        in_axes=None,
        axis_size=4,
        mesh=MESH,
        mesh_axes="y",
    )
    mapped = sm.spmap(inner, "x", mesh=MESH, mesh_axes="x")
    expected = np.outer(X[:2], np.arange(4, dtype=np.float32))
    with jax.enable_checks(True):
        np.testing.assert_array_equal(mapped(X[:2]), expected)
        gradient = jax.grad(lambda v: mapped(v).sum())(X[:2])
    np.testing.assert_array_equal(gradient, [6, 6])


# mesh_axes=()


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_map_that_is_only_vectorised(lowering):
    options = {"mesh": MESH, "mesh_axes": (), "lowering": lowering}
    mapped = sm.spmap(lambda v: v - lax.pmean(v, "i"), "i", **options)
    result = mapped(X)
    np.testing.assert_allclose(result, X - X.mean(), rtol=1e-6)
    assert result.sharding.is_fully_replicated
    assert len(result.sharding.device_set) == 8
    np.testing.assert_allclose(jax.jit(mapped)(X), X - X.mean(), rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda v: (mapped(v) ** 2).sum())(X), 2 * (X - X.mean()), atol=1e-6
    )
    in_batches = sm.spmap(lambda v: 2 * v, mesh=MESH, mesh_axes=(), batch_size=3)
    np.testing.assert_array_equal(in_batches(X), 2 * X)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("outer", "inner"), [((), "y"), ("y", ()), ((), ())])
def test_vectorised_maps_around_and_inside(outer, inner, lowering):
    x = X.reshape(4, 2)
    mapped = sm.spmap(
        sm.spmap(
            lambda v: v * lax.psum(v, ("i", "j")),
            "i",
            mesh=MESH,
            mesh_axes=inner,
            lowering=lowering,
        ),
        "j",
        mesh=MESH,
        mesh_axes=outer,
        lowering=lowering,
    )
    np.testing.assert_allclose(mapped(x), x * x.sum(), rtol=1e-6)
    gradient = jax.grad(lambda v: mapped(v).sum())(x)
    np.testing.assert_allclose(gradient, np.full((4, 2), 2 * x.sum()), rtol=1e-6)


def test_a_vectorised_map_on_a_mesh_of_one_device():
    one = sm.make_mesh({"x": 1})
    mapped = sm.spmap(double, mesh=one, mesh_axes=())
    np.testing.assert_array_equal(mapped(X), 2 * X)


# Maps beside each other


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_maps_beside_each_other_walk_one_axis(lowering):
    def walk(fun, name, axis):
        return sm.spmap(fun, name, mesh=MESH, mesh_axes=axis, lowering=lowering)

    def both(a, b):
        sums = walk(lambda v: lax.psum(v, "i"), "i", "y")(a)
        means = walk(lambda v: v - lax.pmean(v, "j"), "j", "y")(b)
        return sums, means

    a, b = X[:4], X[4:]
    sums, means = jax.jit(both)(a, b)
    np.testing.assert_allclose(sums, np.full(4, a.sum()), rtol=1e-6)
    np.testing.assert_allclose(means, b - b.mean(), atol=1e-6)
    inside = walk(both, "k", "x")
    sums, means = inside(np.stack([a, b]), np.stack([b, a]))
    np.testing.assert_allclose(sums[:, 0], [a.sum(), b.sum()], rtol=1e-6)
    np.testing.assert_allclose(means, [b - b.mean(), a - a.mean()], atol=1e-6)


# Devices of maps inside


def test_devices_of_a_map_inside():
    devices = jax.devices()
    inner = sm.spmap(double, devices=devices[:4])
    x = X.reshape(2, 4)
    mapped = sm.spmap(inner, devices=devices[:4])
    np.testing.assert_array_equal(mapped(x), 2 * x)
    assert mapped(x).sharding.device_set == set(devices[:4])
    around = sm.make_mesh({"x": 4}, devices[:4])
    mapped = sm.spmap(inner, mesh=around, mesh_axes="x")
    np.testing.assert_array_equal(mapped(x), 2 * x)
    backend = sm.spmap(sm.spmap(double, backend="cpu"))
    np.testing.assert_array_equal(backend(x), 2 * x)


@pytest.mark.parametrize(
    ("inside", "around", "wrap"),
    [
        ([0, 1, 2, 3], {}, jax.jit),
        ([7, 6, 5, 4, 3, 2, 1, 0], {"mesh": MESH, "mesh_axes": "x"}, lambda f: f),
    ],
)
def test_other_devices_of_a_map_inside_are_refused(inside, around, wrap):
    devices = [jax.devices()[k] for k in inside]
    mapped = wrap(sm.spmap(sm.spmap(double, devices=devices), **around))
    message = re.escape(f"spmap of double names the devices {inside}, but is inside")
    with pytest.raises(ValueError, match=message):
        mapped(X.reshape(2, 4))
