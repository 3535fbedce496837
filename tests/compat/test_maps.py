"""`xmap`, as JAX's own tests told of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.compat import maps
from shardmap.compat.maps import Mesh, SerialLoop, serial_loop, xmap

# Old programs write `with Mesh(...)`, of which JAX warns.
pytestmark = pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")


def two_by_two():
    return maps.mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def test_two_arguments_on_a_mesh():
    a = np.arange(16 * 8 * 5, dtype=np.float32).reshape(16, 8, 5)
    b = np.arange(14, dtype=np.float32).reshape(2, 7)
    f = xmap(
        lambda a, b: (a * 2, b * 4),
        in_axes=({0: "a", 1: "b"}, ["c", ...]),
        out_axes=({0: "a", 1: "b"}, ["c", ...]),
        axis_resources={"a": "x", "b": "y", "c": "x"},
    )
    with two_by_two():
        doubled, fourfold = f(a, b)
    np.testing.assert_array_equal(doubled, a * 2)
    np.testing.assert_array_equal(fourfold, b * 4)
    assert sm.spec_of(doubled).sharding == (sm.Chunked([2]), sm.Chunked([2]), None)


@pytest.mark.parametrize("resources", [("x", "y"), ("y", "x")])
def test_one_axis_on_two_of_the_mesh(resources):
    f = xmap(
        lambda v: (jax.lax.psum(v * 2, "a"), v * 4),
        in_axes=["a", ...],
        out_axes=([...], {1: "a"}),
        axis_resources={"a": resources},
    )
    v = np.arange(20, dtype=np.float32).reshape(4, 5)
    with two_by_two():
        total, columns = f(v)
    np.testing.assert_array_equal(total, (2 * v).sum(0))
    np.testing.assert_array_equal(columns, (4 * v).T)
    order = [0, 1, 2, 3] if resources == ("x", "y") else [0, 2, 1, 3]
    starts = [shard.index[1].start for shard in columns.addressable_shards]
    assert starts == order


def test_axes_without_resources_are_vectorised():
    x = np.arange(4, dtype=np.float32)

    def f(x):
        return jax.lax.all_gather(x, "i") * jax.lax.psum(x, "i")

    products = xmap(f, ["i"], ["i", ...])(x)
    np.testing.assert_array_equal(products, np.tile(6 * x, (4, 1)))
    gradient = jax.grad(lambda x: xmap(jnp.sin, ["i"], ["i"])(x).sum())(x)
    np.testing.assert_allclose(gradient, np.cos(x), rtol=1e-6)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}])
def test_sizes_of_axes_that_no_argument_has(resources):
    index = xmap(
        lambda: jax.lax.axis_index("i"),
        in_axes=(),
        out_axes=["i"],
        axis_sizes={"i": 6},
        axis_resources=resources,
    )
    with two_by_two():
        np.testing.assert_array_equal(index(), np.arange(6))
    nested = xmap(
        xmap(lambda: 2.0, (), ["i"], axis_sizes={"i": 4}),
        (),
        ["j", ...],
        axis_sizes={"j": 7},
    )
    np.testing.assert_array_equal(nested(), np.full((7, 4), 2.0))


def loops(jaxpr):
    """The lengths of the loops in a program."""
    lengths = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            lengths.append(equation.params["length"])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            lengths += loops(inner)
    return lengths


@pytest.mark.parametrize(
    ("resource", "batch_size"),
    [("l", 4), (SerialLoop(4), 4), (("x", SerialLoop(4)), 2), (("x", "l"), 2)],
)
def test_a_loop_as_a_resource(resource, batch_size):
    x = np.arange(16, dtype=np.float32)
    f = xmap(lambda x: x + 4, ["i"], ["i"], axis_resources={"i": resource})
    with serial_loop("l", 4), two_by_two():
        np.testing.assert_array_equal(f(x), x + 4)
        (call,) = jax.make_jaxpr(f)(x).jaxpr.eqns
        (equation,) = call.params["jaxpr"].eqns
        assert equation.params["batch_size"] == batch_size
    assert maps._loops == {}


def test_a_resource_that_is_neither_an_axis_nor_a_loop_is_named():
    f = xmap(jnp.sin, ["i"], ["i"], axis_resources={"i": "l"})
    message = (
        r"'i' on \['l'\].*in `with serial_loop\('l', steps\):`.* SerialLoop\(steps\)"
    )
    with two_by_two(), pytest.raises(ValueError, match=message):
        f(np.ones(4))


def test_a_loop_without_a_mesh():
    x = np.arange(10, dtype=np.float32)
    f = xmap(jnp.sin, ["i"], ["i"], axis_resources={"i": SerialLoop(3)})
    np.testing.assert_allclose(f(x), np.sin(x), rtol=1e-6)


def test_it_is_traced_once_for_equal_calls():
    traces = []

    def note(x):
        traces.append(x.shape)
        return x

    f = xmap(note, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    for _ in range(3):
        with two_by_two():
            f(np.ones((4, 3), np.float32))
    count = len(traces)
    with two_by_two():
        f(np.ones((4, 3), np.float32))
        made_anew = xmap(note, ["i", ...], ["i", ...], axis_resources={"i": "x"})
        made_anew(np.ones((4, 3), np.float32))
    assert len(traces) == count


def test_trees_of_arguments():
    f = xmap(
        lambda t, y: {"sum": t["a"] + t["b"].sum() + y},
        in_axes=({"a": {0: "i"}, "b": {}}, {1: "i"}),
        out_axes={"sum": {0: "i"}},
    )
    y = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = f({"a": np.ones(3, np.float32), "b": np.ones(5, np.float32)}, y)["sum"]
    np.testing.assert_array_equal(result, y.T + 6)


ROWS = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "error"),
    [
        ({2: "i"}, ["i", ...], r"an argument with 2 axes, but its axes are {2: 'i'}\."),
        (["i"], ["i", ...], r"an argument with 2 axes, .* \['i'\]: end the list with"),
        ({-1: "i"}, ["i", ...], "xmap got the axes {-1: 'i'}: count them from 0"),
        (["i", ...], {2: "i"}, "axis 2 is out of bounds for array of dimension 2"),
        (["i", ...], ["i"], r"a result with 2 axes, but its axes are \['i'\]: end"),
        (["i", ...], {-1: "i"}, "xmap got the axes {-1: 'i'}: count them from 0"),
    ],
)
def test_axes_that_arrays_do_not_have(in_axes, out_axes, error):
    with pytest.raises(ValueError, match=error):
        xmap(jnp.sin, in_axes, out_axes)(ROWS)


def test_a_list_says_how_many_axes_there_are():
    np.testing.assert_array_equal(xmap(abs, ["i", None], ["i", None])(ROWS), ROWS)


def test_stages():
    f = xmap(lambda x: x + 4, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with two_by_two():
        lowered = f.lower(jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype))
        np.testing.assert_array_equal(lowered.compile()(ROWS), ROWS + 4)
    assert "num_partitions = 4" in lowered.as_text()


@pytest.mark.parametrize(
    ("options", "args", "error"),
    [
        (
            {"axis_resources": {"i": "z"}},
            (np.ones(4), np.ones(4)),
            r"put 'i' on \['z'\], but the mesh around the call has the axes "
            r"\('x', 'y'\)",
        ),
        (
            {"axis_resources": {"i": ("x", "x")}},
            (np.ones(4), np.ones(4)),
            r"put 'i' on \('x', 'x'\): each axis of the mesh can have it once",
        ),
        ({}, (np.ones(4), np.ones(3)), "axis 'i' has the sizes 4 and 3"),
        ({"axis_sizes": {"i": 5}}, (np.ones(4), np.ones(4)), "'i': 5, but an arg"),
        (
            {"axis_resources": {"k": "x"}},
            (np.ones(4), np.ones(4)),
            r"does not know the size of the axes \['k'\]",
        ),
    ],
)
def test_refusals(options, args, error):
    f = xmap(jnp.add, (["i"], ["i"]), ["i"], **options)
    with two_by_two(), pytest.raises(ValueError, match=error):
        f(*args)


def test_the_mesh_around():
    assert maps.thread_resources.env.physical_mesh.empty
    with two_by_two() as mesh, serial_loop("l", 3):
        assert maps.thread_resources.env.physical_mesh is mesh
        assert maps.thread_resources.env.shape == {"x": 2, "y": 2, "l": 3}
    assert isinstance(mesh, Mesh)


def test_axes_that_do_not_fit_are_told_with_both_structures():
    x, axes = np.ones(4, np.float32), (["a"], ["a"], ["a"])
    text = re.escape(
        "xmap in_axes must be a pytree prefix of the tuple of arguments: it is "
        f"{axes}, which does not fit PyTreeDef((*, *)). Give one leaf"
    )
    with pytest.raises(ValueError, match=text):
        xmap(lambda x, y: x, axes, ["a"])(x, x)


def test_a_program_has_the_name_of_the_function():
    def rowsum(row):
        return row.sum()

    lowered = xmap(rowsum, in_axes=["a", ...], out_axes=["a"]).lower(np.ones((4, 2)))
    assert "module @jit_rowsum" in lowered.as_text()
