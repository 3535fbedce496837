"""Blocks on a mesh, against jax.shard_map and against loops over blocks."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import float_index

MESH = sm.make_mesh({"x": 2, "y": 4})
LOWERINGS = ["manual", "spmd"]


def array(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 10


def partition_spec(axes):
    dimensions = range(max(axes.values(), default=-1) + 1)
    return P(
        *[
            tuple(n for n, where in axes.items() if where == d) or None
            for d in dimensions
        ]
    )


def shard_mapped(fun, in_axes, out_axes):
    return jax.jit(
        jax.shard_map(
            fun,
            mesh=MESH,
            in_specs=tuple(map(partition_spec, in_axes)),
            out_specs=jax.tree.map(
                partition_spec, out_axes, is_leaf=lambda v: isinstance(v, dict)
            ),
            check_vma=False,
        )
    )


CASES = {
    "rows": (lambda x: x * 2, ({"x": 0},), {"x": 0}),
    "columns": (lambda x: jnp.cumsum(x, 1), ({"y": 1},), {"y": 1}),
    "both": (lambda x: x - x.mean(), ({"x": 0, "y": 1},), {"x": 0, "y": 1}),
    "transposed": (lambda x: x.T, ({"x": 0, "y": 1},), {"y": 0, "x": 1}),
    "two on one dimension": (jnp.flip, ({"x": 0, "y": 0},), {"x": 0, "y": 0}),
    "two on one, other order": (jnp.flip, ({"y": 0, "x": 0},), {"x": 0, "y": 0}),
    "summed": (lambda x: lax.psum(x, "y"), ({"x": 0, "y": 1},), {"x": 0}),
    "summed over both": (
        lambda x: lax.psum(x.sum(), ("x", "y")),
        ({"x": 0, "y": 1},),
        {},
    ),
    "gathered": (
        lambda x: lax.all_gather(x, "y", axis=1, tiled=True),
        ({"x": 0, "y": 1},),
        {"x": 0},
    ),
    "index": (
        lambda x: x + float_index("x") * 10 + float_index("y"),
        ({},),
        {"x": 0, "y": 1},
    ),
    "a ring": (
        lambda x: lax.ppermute(x, "y", [(k, (k + 1) % 4) for k in range(4)]),
        ({"y": 0},),
        {"y": 0},
    ),
}


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("specs", [False, True])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", CASES)
def test_as_shard_map(name, lowering, specs):
    fun, in_axes, out_axes = CASES[name]
    x = array(8, 8)
    axes = in_axes, out_axes
    if specs:
        axes = tuple(map(partition_spec, in_axes)), partition_spec(out_axes)
    mapped = sm.mesh_map(fun, MESH, *axes, lowering=lowering)
    expected = shard_mapped(fun, in_axes, out_axes)(x)
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mapped)(x), expected, rtol=1e-6)
    assert mapped(x).sharding.is_equivalent_to(
        NamedSharding(MESH, partition_spec(out_axes)), mapped(x).ndim
    )


def test_blocks_and_not_elements():
    shapes = []
    mapped = sm.mesh_map(
        lambda x, w: shapes.append((x.shape, w.shape)) or x,
        MESH,
        ({"y": 0, "x": 2}, {}),
        {"y": 0, "x": 2},
    )
    x = array(8, 3, 6)
    np.testing.assert_array_equal(mapped(x, array(5)), x)
    assert set(shapes) == {((2, 3, 3), (5,))}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_pytrees_and_prefixes(lowering):
    mapped = sm.mesh_map(
        lambda state, x: ({"w": state["w"] + x.sum(), "b": state["b"]}, x),
        MESH,
        in_axes=({"w": {"x": 0}, "b": {}}, {"x": 0}),
        out_axes=({"w": {"x": 0}, "b": {}}, {"x": 0}),
        lowering=lowering,
    )
    state, x = mapped({"w": array(4), "b": array(3)}, np.ones((4, 2), np.float32))
    np.testing.assert_allclose(state["w"], array(4) + 4)
    np.testing.assert_allclose(state["b"], array(3))
    np.testing.assert_array_equal(x, np.ones((4, 2)))


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("axes", [{"x": 0}, {"x": 0, "y": 1}], ids=["one", "two"])
def test_gradient_of_what_the_function_closes_over(axes, lowering):
    x = np.arange(32, dtype=np.float32).reshape(4, 8)

    def loss(w):
        def block(x):
            return lax.psum(((w * x) ** 2).sum(), ("x", "y"))

        return sm.mesh_map(block, MESH, axes, {}, lowering=lowering)(x)

    copies = 1 if "y" in axes else MESH.shape["y"]
    np.testing.assert_allclose(
        jax.grad(loss)(3.0), 6 * copies * (x**2).sum(), rtol=1e-6
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_gradient_of_a_tensor_parallel_layer(lowering):
    def layer(x, w, v):
        return lax.psum(jnp.tanh(x @ w) @ v, "y")

    axes = ({"x": 0}, {"y": 1}, {"y": 0})
    mapped = sm.mesh_map(layer, MESH, axes, {"x": 0}, lowering=lowering)
    args = array(4, 3) / 5, array(3, 8) / 30, array(8, 2) / 20

    def loss(fun):
        return lambda *args: (fun(*args) ** 2).sum()

    expected = jax.grad(loss(lambda x, w, v: jnp.tanh(x @ w) @ v), (0, 1, 2))(*args)
    for transform in (lambda f: f, jax.jit):
        gradients = transform(jax.grad(loss(mapped), (0, 1, 2)))(*args)
        for actual, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5)


def test_specs_are_visible_and_those_of_the_program():
    mapped = sm.mesh_map(jnp.dot, MESH, ({"x": 0}, {"y": 1}), {"x": 0, "y": 1})
    lowered = mapped.lower(array(4, 3), array(3, 8))
    spec = sm.mesh_sharding_spec(dict(MESH.shape), MESH.axis_names)
    assert lowered.in_specs == (spec(2, {"x": 0}), spec(2, {"y": 1}))
    assert lowered.out_specs == spec(2, {"x": 0, "y": 1})
    assert sm.spec_of(mapped(array(4, 3), array(3, 8))) == lowered.out_specs


# Elements of a map over axes of a given mesh


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("shape", [(2, 4), (6, 4), (2, 8), (3, 5)])
def test_nested_maps_over_different_axes_are_one_program(shape, lowering):
    def body(x):
        return lax.psum(x, ("i", "j")) + lax.psum(x, "j") * float_index("i")

    on = functools.partial(sm.spmap, mesh=MESH, lowering=lowering)
    mapped = on(on(body, axis_name="j", mesh_axes="y"), axis_name="i", mesh_axes="x")
    x = array(*shape, 2)
    expected = jax.vmap(jax.vmap(body, axis_name="j"), axis_name="i")(x)
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-6)
    if shape == (2, 4):
        (spec,) = mapped.lower(x).in_specs
        assert spec == sm.mesh_sharding_spec(dict(MESH.shape), MESH.axis_names)(
            3, {"x": 0, "y": 1}
        )


# Specs


@given(
    ndim=st.integers(1, 4),
    order=st.permutations(["x", "y", "z"]),
    data=st.data(),
)
def test_mesh_sharding_spec_is_the_named_sharding(ndim, order, data):
    mesh = sm.make_mesh({"x": 2, "y": 2, "z": 2})
    used = data.draw(st.lists(st.sampled_from(order), unique=True))
    axes = {name: data.draw(st.integers(0, ndim - 1)) for name in used}
    spec = sm.mesh_sharding_spec(dict(mesh.shape), mesh.axis_names)(ndim, axes)
    named = NamedSharding(mesh, partition_spec(axes))
    assert spec == sm.ShardingSpec.from_named_sharding(named, ndim)
    shape = (8,) * ndim
    by_device = named.devices_indices_map(shape)
    for device, index in zip(
        mesh.devices.flat, sm.spec_to_indices(shape, spec), strict=True
    ):
        assert [range(8)[i] for i in by_device[device]] == [range(8)[i] for i in index]


# Messages


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: sm.mesh_map(jnp.sin, MESH, 0, {}),
            TypeError,
            r"mesh_map in_axes must be PartitionSpecs, dicts of mesh axis names and "
            r"dimensions, .* but got 0 in 0",
        ),
        (
            lambda: sm.mesh_map(jnp.sin, MESH, {"z": 0}, {}),
            ValueError,
            r"mesh_map in_axes names \['z'\], but the map is over the mesh axes "
            r"\('x', 'y'\)",
        ),
        (
            lambda: sm.mesh_map(jnp.sin, MESH, P("y"), P(), axis_names="x"),
            ValueError,
            r"mesh_map in_axes names \['y'\], but the map is over the mesh axes "
            r"\('x',\)",
        ),
        (
            lambda: sm.mesh_map(jnp.sin, MESH, P("x"), P(), axis_names={"z"}),
            ValueError,
            r"mesh_map axis_names has \['z'\], but the mesh has the axes \('x', 'y'\)",
        ),
        (
            lambda: sm.mesh_map(jnp.sin, MESH, {}, {"x": -1}),
            ValueError,
            r"mesh_map out_axes has a dimension below 0 in \{'x': -1\}",
        ),
        (
            lambda: sm.mesh_map(lambda a, b: a, MESH, {"y": 0}, {})(array(8), array(6)),
            ValueError,
            r"> cuts dimension 0 of b, float32\[6\], into 4 blocks along \('y',\)\."
            r" Cut a dimension that it has",
        ),
        (
            lambda: sm.mesh_map(lambda a: a, MESH, {"y": 1}, {})(array(8)),
            ValueError,
            r"cuts dimension 1 of a, float32\[8\], into \d blocks along \('y',\)\. Cut",
        ),
        (
            lambda: sm.mesh_map(lambda a: a.sum(), MESH, {"y": 0}, {"y": 0})(array(8)),
            ValueError,
            r"out_axes P\('y',?\) cuts a dimension that result of shape \(\) does ",
        ),
        (
            lambda: sm.mesh_map(lambda a: a, MESH, {"y": 0}, {})(array(8)),
            ValueError,
            r"mesh_map out_axes do not name mesh axis 'y', along which result of "
            r"<lambda> can differ. Name it with the dimension that it cuts, or .*"
            r"jax.lax.pmean\(x, 'y'\)",
        ),
    ],
)
def test_message(make, error, text):
    with pytest.raises(error, match=text):
        make()


# It is jax.shard_map


def test_it_is_a_shard_map():
    mapped = sm.mesh_map(jnp.flip, MESH, {"y": 0, "x": 0}, {"x": 0, "y": 0})
    inside = jax.make_jaxpr(mapped)(array(8)).eqns[0].params["jaxpr"]
    [equation] = inside.eqns
    assert equation.primitive.name == "shard_map"
    assert equation.params["in_specs"] == (P(("y", "x")),)


def test_what_check_vma_is_passed_on_for():
    mesh = sm.make_mesh({"x": 4, "y": 2})
    x = np.arange(8, dtype=np.float32)

    def slope(b):
        return jax.grad(lambda b: lax.psum(b**2, "x").sum())(b)

    def body(b):
        return {"sum": lax.psum(b, "x"), "slope": slope(b)}

    out_axes = {"sum": {}, "slope": {"x": 0}}
    for check_vma, slopes in ((False, 8 * x), (True, 2 * x)):
        mapped = sm.mesh_map(body, mesh, {"x": 0}, out_axes, check_vma=check_vma)
        expected = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=P("x"),
            out_specs={"sum": P(), "slope": P("x")},
            check_vma=check_vma,
        )
        results = jax.jit(mapped)(x)
        np.testing.assert_array_equal(results["slope"], slopes)
        np.testing.assert_array_equal(results["sum"], jax.jit(expected)(x)["sum"])
        of_sum = jax.grad(lambda x, f=mapped: f(x)["sum"].sum())(x)
        np.testing.assert_array_equal(of_sum, np.ones(8))
    specs = mapped.lower(x).out_specs
    assert specs["slope"].mesh_shape == (4, 2)
    with pytest.raises(ValueError, match="out_specs which require replication"):
        sm.mesh_map(lambda b: b, mesh, {"x": 0}, {}, check_vma=True)(x)
    with pytest.raises(ValueError, match="check_vma=True is for lowering='manual'"):
        sm.mesh_map(body, mesh, {"x": 0}, {}, lowering="spmd", check_vma=True)


def test_a_function_is_traced_once():
    for check_vma in (False, True):
        calls = []

        def body(b, calls=calls):
            calls.append(b)
            return lax.psum(b, "y")

        # No array names the mesh axis y.
        out_axes = {"x": 0}
        mapped = sm.mesh_map(body, MESH, out_axes, out_axes, check_vma=check_vma)
        for around in (lambda f: f, jax.jit, lambda f: jax.grad(lambda x: f(x).sum())):
            around(mapped)(array(8))
        assert len(calls) == 1


AROUND = {
    "alone": lambda: contextlib.nullcontext(),
    "set_mesh": lambda: jax.set_mesh(MESH),
}


# Only a mesh that is set says which devices an abstract one has.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("around", "is_abstract"),
    [("alone", False), ("set_mesh", False), ("set_mesh", True)],
)
def test_one_mesh_axis_at_a_time(around, is_abstract):
    def over(name, fun, in_axis, out_axis):
        def run(x):
            mesh = jax.sharding.get_abstract_mesh() if is_abstract else MESH
            axes = [
                {} if axis is None else {name: axis} for axis in (in_axis, out_axis)
            ]
            return sm.mesh_map(fun, mesh, *axes, axis_names=name)(x)

        return run

    def cast(x):
        return lax.pcast(lax.psum(x, ("x", "y")), "x", to="varying")

    def constrained(x):
        return lax.with_sharding_constraint(x, P("x"))

    x = array(4, 8)
    total = x.reshape(2, 2, 4, 2).sum((0, 2))
    with AROUND[around]():
        for fun, expected in (
            (over("y", over("x", jnp.square, 0, 0), 1, 1), x**2),
            (over("y", lambda x: over("x", cast, 0, None)(x), 1, None), total),
            (over("y", constrained, 1, 1), x),
        ):
            np.testing.assert_allclose(jax.jit(fun)(x), expected, rtol=1e-6)
            gradient = jax.jit(jax.grad(lambda x, f=fun: (f(x) ** 2).sum()))(x)
            assert np.isfinite(gradient).all()
            both = jax.jit(jax.vmap(fun))(np.stack([x, x]))
            np.testing.assert_allclose(both, np.stack([expected] * 2), rtol=1e-6)


def test_a_vmap_with_the_name_of_a_mesh_axis():
    def mapped(lowering):
        total = sm.mesh_map(
            lambda v: lax.psum(v, "x"), MESH, {"x": 0}, {}, lowering=lowering
        )
        return jax.vmap(total, axis_name="x")

    x = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(mapped("spmd")(x[None]), [x[:4] + x[4:]])
    with pytest.raises(ValueError, match=r"'x' and is inside a jax\.vmap with"):
        mapped("manual")(x[None])
    without = sm.mesh_map(lambda v: v + 1, MESH, {"x": 0}, {"x": 0})
    np.testing.assert_array_equal(jax.vmap(without, axis_name="x")(x[None]), [x + 1])


def test_an_axis_that_is_cut_around_already_is_refused():
    def twice(x):
        return sm.mesh_map(jnp.sin, MESH, {"x": 0}, {"x": 0})(x)

    for lowering in LOWERINGS:
        mapped = sm.mesh_map(twice, MESH, {"x": 0}, {"x": 0}, lowering=lowering)
        with pytest.raises(ValueError, match=r"sin names the mesh axes \['x'\], which"):
            mapped(array(8))
