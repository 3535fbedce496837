"""`spmap` as users call it: forms, arguments, options, inputs from anywhere."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmap as sm
from tests.map_programs import both_lowerings

MESH = sm.make_mesh({"a": 4, "b": 2})

DEVICES = jax.devices()
EIGHT = np.arange(8, dtype=np.float32)


def double(x):
    """Twice x."""
    return x * 2


def sharded(x, devices=None, spec=("anything",)):
    mesh = Mesh(np.array(devices or DEVICES[: len(x)]), ("anything",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


# Forms


def test_takes_the_parameters_of_pmap_under_their_names():
    wanted = inspect.signature(jax.pmap).parameters
    assert set(wanted) <= set(inspect.signature(sm.spmap).parameters)


@both_lowerings
def test_a_partial_has_no_name_and_still_maps(spmap):
    mapped = spmap(functools.partial(lambda x, y: x + y, y=3.0))
    np.testing.assert_array_equal(mapped(EIGHT), EIGHT + 3)


@both_lowerings
def test_several_maps_of_a_ufunc_which_has_no_weak_reference(spmap):
    np.testing.assert_array_equal(spmap(jnp.sin)(EIGHT), jnp.sin(EIGHT))
    mapped = spmap(jnp.add)
    np.testing.assert_array_equal(mapped(EIGHT, EIGHT), EIGHT * 2)


# Arguments


@both_lowerings
def test_in_axes_is_a_pytree_prefix(spmap):
    tree = {"a": EIGHT, "b": (np.ones((3, 8)), 5.0)}
    mapped = spmap(
        lambda t, y: t["a"] + t["b"][0].sum() + t["b"][1] + y,
        in_axes=({"a": 0, "b": (1, None)}, 0),
    )
    np.testing.assert_array_equal(mapped(tree, EIGHT), 2 * EIGHT + 8)


def test_none_in_arguments_and_results_is_no_leaf():
    mapped = sm.spmap(lambda pair: (*pair, {"y": pair[0]}), out_axes=(0, None, 0))
    result = mapped((EIGHT, None))
    assert result[1] is None
    np.testing.assert_array_equal(result[2]["y"], EIGHT)


@both_lowerings
def test_static_arguments_with_in_axes_for_all_arguments(spmap):
    mapped = spmap(
        lambda f, x, y: f(x) + y,
        in_axes=(None, 1, None),
        static_broadcasted_argnums=(0,),
    )
    x = np.ones((3, 8), np.float32)
    np.testing.assert_array_equal(mapped(jnp.sum, x, 2.0), np.full(8, 5.0))


@both_lowerings
def test_no_mapped_argument_with_axis_size(spmap):
    mapped = spmap(lambda: lax.axis_index("i"), "i", axis_size=4)
    np.testing.assert_array_equal(mapped(), np.arange(4))
    scaled = spmap(lambda x: x * lax.axis_index("i"), "i", axis_size=4, in_axes=None)
    np.testing.assert_array_equal(scaled(2), 2 * np.arange(4))


@both_lowerings
def test_psum_of_a_constant_is_a_python_number_while_tracing(spmap):
    sizes = []

    @spmap(axis_name="i")
    def f(x):
        sizes.append(lax.psum(1, "i"))
        return x

    f(EIGHT)
    assert sizes == [8]
    assert type(sizes[0]) is int


# Devices


@both_lowerings
def test_devices_are_used_in_their_order(spmap):
    result = spmap(double, devices=DEVICES[:3:-1])(EIGHT[:4])
    assert result.sharding.mesh.devices.tolist() == DEVICES[:3:-1]
    np.testing.assert_array_equal(result, EIGHT[:4] * 2)
    by_device = {s.device: float(s.data[0]) for s in result.addressable_shards}
    assert by_device == {DEVICES[7 - k]: 2.0 * k for k in range(4)}


@both_lowerings
def test_backend_names_whose_devices(spmap):
    result = spmap(double, backend="cpu")(EIGHT)
    assert {d.platform for d in result.sharding.device_set} == {"cpu"}


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("around", [lambda mesh: mesh, jax.set_mesh])
def test_mesh_axes_are_those_of_the_mesh_around(around):
    with around(MESH):
        mapped = sm.spmap(lambda x: lax.psum(x, "i"), "i", mesh_axes=("b", "a"))
    result = mapped(EIGHT)
    np.testing.assert_array_equal(result, np.full(8, EIGHT.sum()))
    assert result.sharding == NamedSharding(MESH, PartitionSpec(("b", "a")))
    with pytest.raises(ValueError, match=r"that of jax.set_mesh or .* around it"):
        sm.spmap(abs, mesh_axes="a")


# Axis names


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["\u03bb", "", "a'b", "a\\b"])
@both_lowerings
def test_axis_names_that_xla_cannot_read(spmap, name):
    """It ended the process for some of them."""
    result = spmap(lambda x: x / lax.psum(x, name), name)(EIGHT)
    np.testing.assert_allclose(result, EIGHT / 28)


# Inputs from anywhere


@pytest.mark.few(2)
@pytest.mark.one_in(3)
@both_lowerings
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda x: x, id="numpy"),
        pytest.param(jnp.asarray, id="uncommitted"),
        pytest.param(lambda x: jax.device_put(x, DEVICES[3]), id="committed to one"),
        pytest.param(sharded, id="sharded over a mesh of another name"),
        pytest.param(lambda x: sharded(x, spec=()), id="replicated"),
        pytest.param(lambda x: sharded(x, DEVICES[::-1]), id="reversed devices"),
        pytest.param(lambda x: sharded(x, DEVICES[:4]), id="half of the devices"),
        pytest.param(lambda x: sharded(x, spec=(None, "anything")), id="other axis"),
        pytest.param(lambda x: sm.spmap(double)(x) / 2, id="from another map"),
        pytest.param(
            lambda x: sm.spmap(double, devices=DEVICES[::-1])(x) / 2,
            id="from a map on other devices",
        ),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_inputs_may_lie_anywhere(spmap, place, keyword):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mapped = spmap(lambda x: x + 1)
    for _ in range(2):  # The second call takes the fast path, where there is one.
        result = mapped(x=place(x)) if keyword else mapped(place(x))
        np.testing.assert_array_equal(result, x + 1)
        assert result.sharding.is_equivalent_to(sharded(x).sharding, 2)


@both_lowerings
def test_an_unmapped_input_on_one_device_goes_to_all(spmap):
    weights = jax.device_put(np.ones((3, 2), np.float32), DEVICES[5])
    mapped = spmap(lambda w, x: x @ w, in_axes=(None, 0))
    x = np.ones((8, 3), np.float32)
    np.testing.assert_array_equal(mapped(weights, x), np.full((8, 2), 3.0))


# Results


@both_lowerings
def test_results_are_laid_out_one_element_per_device(spmap):
    x = np.ones((8, 3), np.float32)
    rows, columns, whole = spmap(
        lambda x: (x, x, lax.psum(x, "i")), "i", out_axes=(0, 1, None)
    )(x)
    assert rows.sharding.spec == PartitionSpec("i")
    assert columns.sharding.spec == PartitionSpec(None, "i")
    assert whole.sharding.is_fully_replicated
    assert {s.data.shape for s in columns.addressable_shards} == {(3, 1)}
    assert whole.shape == (3,)


# Debugging


@both_lowerings
def test_disable_jit_runs_the_function_op_by_op(spmap):
    seen = []

    def f(x):
        seen.append(x)
        return x / lax.psum(x, "i")

    mapped = spmap(f, "i")
    mapped(EIGHT)
    seen.clear()
    with jax.disable_jit():
        for calls in (1, 2):
            np.testing.assert_allclose(mapped(EIGHT), EIGHT / 28)
            assert len(seen) == calls
        jax.eval_shape(mapped, EIGHT)
        assert len(seen) == 3


WITHOUT_JIT = {
    "an element a device": lambda: sm.spmap(lambda x: x + 1)(EIGHT),
    "fewer elements": lambda: sm.spmap(lambda x: x + 1)(EIGHT[:4]),
    "an unmapped result": lambda: sm.spmap(
        lambda x: lax.psum(x, "i"), "i", out_axes=None
    )(EIGHT),
    "reversed devices": lambda: sm.spmap(lambda x: x + 1, devices=jax.devices()[::-1])(
        EIGHT
    ),
    "maps on one mesh": lambda: sm.spmap(
        sm.spmap(lambda x: x + 1, mesh=MESH, mesh_axes="b"), mesh=MESH, mesh_axes="a"
    )(EIGHT.reshape(4, 2)),
    "results on some and on all devices": lambda: sm.spmap(
        lambda x, y: x + y.sum(), in_axes=(0, None)
    )(sm.spmap(jnp.sin)(EIGHT), sm.spmap(jnp.sin)(EIGHT[:4])),
    "a gradient": lambda: jax.grad(lambda x: sm.spmap(jnp.sin)(x).sum())(EIGHT),
    "keys": lambda: sm.spmap(lambda key: key)(jax.random.split(jax.random.key(0), 8)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("call", WITHOUT_JIT.values(), ids=WITHOUT_JIT)
def test_disable_jit_gives_results_on_the_same_devices(call):
    expected = call()
    with jax.disable_jit():
        result = call()
    assert result.sharding == expected.sharding


def test_a_donating_map_takes_another_structure_after_the_first():
    mapped = sm.spmap(lambda tree: jax.tree.map(jnp.sin, tree), donate_argnums=0)
    for tree in (EIGHT, (EIGHT, EIGHT + 1), {"a": EIGHT}, EIGHT, (EIGHT, EIGHT + 1)):
        result = mapped(jax.tree.map(jnp.asarray, tree))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, np.sin(b), rtol=1e-6),
            result,
            tree,
        )
