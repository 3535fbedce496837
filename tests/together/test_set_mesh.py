"""Maps under jax.set_mesh, and meshes and arrays with Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

AUTO = sm.make_mesh({"x": 2, "y": 4})
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
X = np.arange(8, dtype=np.float32)
LOWERINGS = ["manual", "spmd"]


def centered(v):
    return v - lax.pmean(v, "i")


def two_devices(kind=AxisType.Auto):
    return jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


# Meshes with Explicit axes


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_explicit_mesh_is_taken_as_its_twin(lowering):
    for axes in ("y", ("y", "x")):
        ours, theirs = (
            sm.spmap(centered, "i", mesh=mesh, mesh_axes=axes, lowering=lowering)
            for mesh in (EXPLICIT, AUTO)
        )
        for wrap in (lambda f: f, jax.jit):
            np.testing.assert_allclose(wrap(ours)(X), X - X.mean(), rtol=1e-6)
        assert ours(X).sharding == theirs(X).sharding
        assert ours.lower(X).in_specs == theirs.lower(X).in_specs
        gradient = jax.grad(lambda v, f=ours: (f(v) ** 2).sum())(X)
        np.testing.assert_allclose(gradient, 2 * (X - X.mean()), rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_explicit_meshes_of_nested_maps_and_blocks(lowering):
    nested = sm.spmap(
        sm.spmap(
            lambda v: lax.psum(v, ("i", "j")),
            "j",
            mesh=EXPLICIT,
            mesh_axes="y",
            lowering=lowering,
        ),
        "i",
        mesh=AUTO,
        mesh_axes="x",
        lowering=lowering,
    )
    np.testing.assert_array_equal(nested(X.reshape(2, 4)), np.full((2, 4), 28))
    blocks = sm.mesh_map(
        lambda v: v - lax.pmean(v, ("x", "y")).mean(),
        EXPLICIT,
        {"x": 0, "y": 0},
        {"x": 0, "y": 0},
        lowering=lowering,
    )
    np.testing.assert_allclose(blocks(X), X - X.mean(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(blocks)(X), X - X.mean(), rtol=1e-6)


def test_parts_of_an_explicit_mesh():
    part = sm.submesh(EXPLICIT, ("y",))
    doubled = sm.spmap(lambda v: 2 * v, mesh=part, mesh_axes="y")
    np.testing.assert_array_equal(doubled(X), 2 * X)
    assert sm.local_mesh(EXPLICIT) == EXPLICIT
    spec = sm.ShardingSpec.from_named_sharding(NamedSharding(EXPLICIT, P("y")), 1)
    assert spec == sm.spec_of(on(AUTO, X, "y"))
    assert sm.spec_of(on(EXPLICIT, X, "y")) == spec


# Arrays of Explicit meshes


MAPS = {
    "plain": sm.spmap(centered, "i"),
    "plain, spmd": sm.spmap(centered, "i", lowering="spmd"),
    "on a mesh": sm.spmap(centered, "i", mesh=AUTO, mesh_axes="y"),
    "on an Explicit mesh": sm.spmap(centered, "i", mesh=EXPLICIT, mesh_axes="x"),
    "mesh_map": sm.mesh_map(
        lambda v: v - lax.pmean(v, ("x", "y")).mean(), AUTO, {"x": 0}, {"x": 0}
    ),
    "sharded_jit": sm.sharded_jit(lambda v: v - v.mean(), (8,), (8,)),
}


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", [(), ("y",), (("x", "y"),)])
@pytest.mark.parametrize("name", MAPS)
def test_arrays_of_explicit_meshes(name, spec):
    fun, x = MAPS[name], on(EXPLICIT, X, *spec)
    expected = X - X.mean()
    np.testing.assert_allclose(fun(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(fun)(x), expected, rtol=1e-6)
    with jax.set_mesh(EXPLICIT):
        eager, jitted = fun(x), jax.jit(fun)(x)
        for result in (eager, jitted):
            np.testing.assert_allclose(result, expected, rtol=1e-6)
            # What comes back can be gone on with.
            np.testing.assert_allclose(result + 1, expected + 1, rtol=1e-6)
        both = jax.jit(lambda v: v + fun(v))(x)
        np.testing.assert_allclose(both, X + expected, rtol=1e-6)
        for f in (fun, jax.jit(fun)):
            gradient = jax.grad(lambda v, f=f: (f(v) ** 2).sum())(x)
            np.testing.assert_allclose(gradient, 2 * expected, rtol=1e-6)
            assert gradient.sharding.is_equivalent_to(x.sharding, 1)
        rows = on(EXPLICIT, np.stack([X, -X]))
        np.testing.assert_allclose(
            jax.vmap(fun)(rows), np.stack([expected, -expected]), rtol=1e-6
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["plain", "on a mesh", "mesh_map", "sharded_jit"])
def test_a_vmap_with_a_name_around(name, mesh):
    rows = np.stack([X, 2 * X])
    with jax.set_mesh(mesh):
        for wrap in (lambda f: f, jax.jit):
            result = wrap(jax.vmap(MAPS[name], axis_name="k"))(rows)
            expected = rows - rows.mean(1, keepdims=True)
            np.testing.assert_allclose(result, expected, rtol=1e-6)


def tap_that_returns(v):
    return sm.tap(np.negative, v, result_shape=v)


@pytest.mark.parametrize(
    ("fun", "what"),
    [
        (MAPS["plain"], "a map"),
        (tap_that_returns, "tap"),
    ],
)
def test_a_vmap_along_an_axis_of_an_explicit_mesh_is_refused(fun, what):
    x = on(EXPLICIT, np.stack([X, 2 * X]), "x")
    for wrap in (lambda f: f, jax.jit):
        with jax.set_mesh(EXPLICIT):
            with pytest.raises(
                ValueError,
                match=rf"jax\.vmap of {what} along the mesh axis 'x', which is "
                "Explicit.* by an outer spmap with mesh= and mesh_axes='x'",
            ):
                wrap(jax.vmap(fun))(x)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MAPS)
def test_arrays_from_elsewhere_under_an_explicit_mesh(name):
    fun = MAPS[name]
    before = sm.spmap(lambda v: v)(X)
    with jax.set_mesh(EXPLICIT):
        for x in (X, jnp.asarray(X), jax.device_put(X, jax.devices()[3]), before):
            result = fun(x)
            np.testing.assert_allclose(result, X - X.mean(), rtol=1e-6)
            np.testing.assert_allclose(result.sum(), 0, atol=1e-5)


@pytest.mark.parametrize("make", [sm.spmap, sm.mesh_map], ids=["spmap", "mesh_map"])
def test_an_array_of_an_explicit_mesh_is_an_argument(make):
    axes, none = (0, None) if make is sm.spmap else ({"y": 0}, {})
    options = {"mesh_axes": "y"} if make is sm.spmap else {}
    options |= {"mesh": EXPLICIT, "out_axes": axes}
    with jax.set_mesh(EXPLICIT):
        weights = jnp.ones(3)
        outside = make(lambda v: v + weights.sum(), in_axes=(axes,), **options)
        error, text = ValueError, "context mesh .* should match the aval mesh"
        if make is sm.mesh_map:
            error, text = NotImplementedError, "pass those inputs as an argument to sh"
        for f in (outside, jax.jit(outside)):
            with pytest.raises(error, match=text):
                f(X)
        inside = make(lambda v, w: v + w.sum(), in_axes=(axes, none), **options)
        np.testing.assert_array_equal(inside(X, weights), X + 3)


def test_a_mesh_that_has_no_name_in_the_types_is_refused():
    nested = sm.spmap(sm.spmap(lambda v: 2 * v, "j"), "i")
    x = np.ones((4, 2), np.float32)
    with jax.set_mesh(EXPLICIT):
        for f in (nested, jax.jit(nested)):
            with pytest.raises(
                ValueError,
                match=r"\{'i': 4, 'j': 2\}, which is not made of whole axes of the .*"
                "give it mesh= and mesh_axes= of that mesh",
            ):
                f(x)
        np.testing.assert_array_equal(nested(x.reshape(2, 4)), 2 * x.reshape(2, 4))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_mesh_that_is_met_under_an_explicit_one_first(lowering):
    mesh = sm.make_mesh({f"first met by {lowering}": 8})  # JAX keeps what it knows.
    [axis] = mesh.axis_names
    fun = sm.spmap(centered, "i", mesh=mesh, mesh_axes=axis, lowering=lowering)
    with jax.set_mesh(EXPLICIT):
        jax.make_jaxpr(fun)(X)
    result = jax.jit(fun)(X)
    np.testing.assert_allclose(result, X - X.mean(), rtol=1e-6)
    assert result.sharding.device_set == set(jax.devices())


def tapped(v):
    return sm.tap(lambda _: None, 2 * v)


def called_back(v):
    like = jax.ShapeDtypeStruct(v.shape, v.dtype)
    return jax.pure_callback(lambda a: 2 * np.asarray(a), like, v)


@pytest.mark.deep
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("fun", [tapped, called_back])
def test_calls_of_the_host_and_arrays_of_explicit_meshes(fun, lowering):
    mapped = sm.spmap(fun, lowering=lowering)
    with jax.set_mesh(EXPLICIT):
        for f in (mapped, jax.jit(mapped), jax.jit(lambda v: mapped(mapped(v)) / 2)):
            for operand in (X, on(EXPLICIT, X, "y")):
                np.testing.assert_array_equal(f(operand), 2 * X)


# jax.set_mesh of fewer devices


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_maps_run_on_the_devices_that_are_set(lowering, kind):
    fun = sm.spmap(centered, "i", lowering=lowering)
    whole = fun(X)
    with jax.set_mesh(two_devices(kind)):
        for f in (fun, jax.jit(fun), jax.jit(lambda v: fun(v))):
            result = f(X)
            np.testing.assert_allclose(result, X - X.mean(), rtol=1e-6)
            assert result.sharding.device_set == set(jax.devices()[:2])
        assert fun(whole).sharding.device_set == set(jax.devices()[:2])
        gradient = jax.grad(lambda v: (fun(v) ** 2).sum())(jnp.asarray(X) + 0)
        np.testing.assert_allclose(gradient, 2 * (X - X.mean()), rtol=1e-6)
    # Outside of it all are used again.
    assert fun(X).sharding.device_set == set(jax.devices())


def test_other_devices_than_those_that_are_set():
    named = {
        "spmap": sm.spmap(lambda v: 2 * v, devices=jax.devices()[4:]),
        "mesh": sm.spmap(lambda v: 2 * v, mesh=AUTO, mesh_axes="y"),
        "mesh_map": sm.mesh_map(lambda v: 2 * v, AUTO, {"x": 0}, {"x": 0}),
    }
    expected = {name: fun(X).sharding for name, fun in named.items()}
    with jax.set_mesh(two_devices()):
        for name, fun in named.items():
            # By itself it runs where it says.
            np.testing.assert_array_equal(fun(X), 2 * X)
            assert fun(X).sharding == expected[name]
            # In a program it cannot.
            with pytest.raises(ValueError, match=r"those of jax.set_mesh, \[0, 1\]"):
                jax.jit(fun)(X)


def test_array_likes_and_static_arguments_under_a_mesh(tmp_path):
    stored = np.memmap(tmp_path / "x", np.float32, "w+", shape=(8,))
    stored[:] = X
    power = sm.spmap(lambda v, n, s: v**n + s, static_broadcasted_argnums=1)
    for mesh in (two_devices(), EXPLICIT):
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(power(stored, 2, s=X), X**2 + X)
            np.testing.assert_array_equal(power(X, 3, s=stored), X**3 + X)


# PartitionSpecs in maps


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_bare_spec_names_axes_of_the_mesh_that_is_set(lowering, mesh):
    def element(v):
        return 2 * lax.with_sharding_constraint(jnp.sin(v), P("y"))

    fun = sm.spmap(element, mesh=mesh, mesh_axes="x", lowering=lowering)
    x = X.reshape(2, 4)
    with jax.set_mesh(mesh):
        arg = on(mesh, x)
        for f in (fun, jax.jit(fun)):
            np.testing.assert_allclose(f(arg), 2 * np.sin(x), rtol=1e-6)
            assert f(arg).sharding.spec == P("x", "y")
            gradient = jax.grad(lambda v, f=f: f(v).sum())(arg)
            np.testing.assert_allclose(gradient, 2 * np.cos(x), rtol=1e-6)
        in_loop = sm.spmap(
            lambda v: lax.fori_loop(0, 3, lambda _, w: element(w), v),
            mesh=mesh,
            mesh_axes="x",
            lowering=lowering,
        )
        expected = x
        for _ in range(3):
            expected = 2 * np.sin(expected)
        np.testing.assert_allclose(in_loop(arg), expected, rtol=1e-5)


def test_a_bare_spec_in_a_map_on_a_mesh_of_its_own_is_refused():
    fun = sm.spmap(lambda v: lax.with_sharding_constraint(v, P("y")))
    with jax.set_mesh(AUTO):
        for f in (fun, jax.jit(fun)):
            with pytest.raises(
                RuntimeError, match="requires a non-empty mesh in context"
            ):
                f(X.reshape(2, 4))
