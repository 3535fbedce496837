"""Every error that a mapped call can raise, by its text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

FOUR = np.ones(4, np.float32)
MESH = sm.make_mesh({"data": 4, "model": 2})


def add(x, params):
    return x + params["w"]


CASES = {
    "mapped sizes differ": (
        lambda: sm.spmap(add)(FOUR, {"w": np.ones((3, 2))}),
        ValueError,
        r"spmap got inconsistent sizes for array axes to be mapped:\n"
        r"  \* x is float32\[4\], axis 0 has size 4\n"
        r"  \* params\['w'\] is float32\[3,2\], axis 0 has size 3\n"
        r"Give all of them the same size, or None in in_axes",
    ),
    "more arguments than names": (
        lambda: sm.spmap(lambda *a: a)(FOUR, (np.ones(2), FOUR)),
        ValueError,
        r"\* a\[0\] is float32\[4\].*\n  \* a\[1\]\[0\] is float32\[2\]",
    ),
    "arguments taken by **kwargs": (
        lambda: sm.spmap(lambda **kwargs: kwargs["w"])(kwargs=FOUR, w={"b": FOUR[:3]}),
        ValueError,
        r"\* kwargs is float32\[4\].*\n  \* w\['b'\] is float32\[3\]",
    ),
    "rank too low": (
        lambda: sm.spmap(add)(FOUR, {"w": 3.0}),
        ValueError,
        r"axis that it does not have:\n  \* params\['w'\] is float32\[\] \(rank 0\), "
        r"in_axes asks for axis 0\nGive None in in_axes.*along axis 0\.$",
    ),
    "numbers, not a list of them": (
        lambda: sm.spmap(lambda a, b: a)(1.0, 2.0),
        ValueError,
        r"\* b is float32\[\] \(rank 0\).*\nGive None in in_axes.*along axis 0\.$",
    ),
    "axis out of range": (
        lambda: sm.spmap(lambda x: x, in_axes=-3)(np.ones((4, 3))),
        ValueError,
        r"\* x is float32\[4,3\] \(rank 2\), in_axes asks for axis -3",
    ),
    "nothing mapped": (
        lambda: sm.spmap(lambda x: x, in_axes=None)(FOUR),
        ValueError,
        r"passed at least one argument containing an array to map, but got 1 array, "
        r"none mapped. Give axis_size=n",
    ),
    "axis_size differs": (
        lambda: sm.spmap(lambda x: x, axis_size=3)(FOUR),
        ValueError,
        r"Specified axis_size 3 doesn't match received axis_size 4 of x. "
        r"Leave axis_size out, or give 4",
    ),
    "in_axes is no prefix": (
        lambda: sm.spmap(add, in_axes=(0, {"v": 0}))(FOUR, {"w": FOUR}),
        ValueError,
        r"(?s)spmap of add in_axes must be a pytree prefix of the positional "
        r"arguments: in_axes is \(0, \{'v': 0\}\).*in_axes\[1\]",
    ),
    "in_axes too short": (
        lambda: sm.spmap(add, in_axes=(0,))(FOUR, {"w": FOUR}),
        ValueError,
        r"in_axes has 1 entries, one for each positional argument, but add was called "
        r"with 2",
    ),
    "out_axes of another type": (
        lambda: sm.spmap(add, out_axes=True),
        TypeError,
        r"spmap out_axes must be an int, None, .* but got True",
    ),
    "out_axes is no prefix": (
        lambda: sm.spmap(lambda x: (x, x), out_axes=(0, 0, 0))(FOUR),
        ValueError,
        r"(?s)spmap of <lambda> out_axes must be a pytree prefix of the result: "
        r"out_axes is \(0, 0, 0\).*out_axes has a subtree of type tuple of length 3",
    ),
    "out_axes out of range": (
        lambda: sm.spmap(lambda x: x, out_axes=2)(np.ones((4, 3))),
        ValueError,
        r"out_axes puts the mapped axis at 2, but the result is float32\[3\]: with the "
        r"mapped axis it has rank 2. Give an axis from -2 to 1",
    ),
    "unmapped result differs": (
        lambda: sm.spmap(lambda x: {"a": x, "b": lax.psum(x, "i")}, "i", out_axes=None)(
            FOUR
        ),
        ValueError,
        r"mapped output but out_axes is None: .*\n  \* result\['a'\]\n"
        r"Combine them with a collective over the axis",
    ),
    "static missing": (
        lambda: sm.spmap(lambda x, n=1: x, static_broadcasted_argnums=1)(FOUR),
        ValueError,
        r"static_broadcasted_argnums=\(1,\) but was called with only 1 positional "
        r"argument. All static broadcasted arguments must be passed positionally",
    ),
    "negative static": (
        lambda: sm.spmap(add, static_broadcasted_argnums=-1),
        ValueError,
        r"static_broadcasted_argnums must be an int or several, none below 0",
    ),
    "a backend that is no name": (
        lambda: sm.spmap(add, backend=3),
        TypeError,
        r"spmap backend must be a name such as 'cpu' or None, but got 3\. Give devices",
    ),
    "a long list for axes": (
        lambda: sm.spmap(add, in_axes=[[0.5] * 300] * 300),
        TypeError,
        r"spmap in_axes must be an int, .{,300}\.\.\. \(450,600 characters\): "
        r"in_axes\[0\]\[0\] is 0\.5\.$",
    ),
    "a long list for a device": (
        lambda: sm.spmap(add, devices=[[0] * 300] * 300),
        TypeError,
        r"devices\[0\] is .{,300}\(900 characters\)\.$",
    ),
    "no devices": (
        lambda: sm.spmap(add, devices=[]),
        ValueError,
        r"'devices' argument to spmap must be non-empty, or None",
    ),
    "batch_size below 1": (
        lambda: sm.spmap(add, batch_size=0),
        ValueError,
        r"spmap batch_size must be an int above 0 or None, but got 0",
    ),
    "mesh without mesh_axes": (
        lambda: sm.spmap(add, mesh=MESH),
        ValueError,
        r"spmap takes mesh and mesh_axes together, but got mesh=Mesh.* mesh_axes=None",
    ),
    "mesh and devices": (
        lambda: sm.spmap(add, mesh=MESH, mesh_axes="data", devices=jax.devices()),
        ValueError,
        r"spmap takes its devices from mesh, so give neither devices nor backend",
    ),
    "an axis that the mesh does not have": (
        lambda: sm.spmap(add, mesh=MESH, mesh_axes=("data", "rows")),
        ValueError,
        r"mesh_axes must be axes of the mesh, each once, but got \('data', 'rows'\) "
        r"for a mesh with axes \('data', 'model'\)",
    ),
    "an axis given twice": (
        lambda: sm.spmap(add, mesh=MESH, mesh_axes=("data", "data")),
        ValueError,
        r"mesh_axes must be axes of the mesh, each once, but got \('data', 'data'\)",
    ),
    "a mesh axis used twice": (
        lambda: sm.spmap(
            sm.spmap(lambda x: x, mesh=MESH, mesh_axes="data"),
            mesh=MESH,
            mesh_axes="data",
        )(np.ones((4, 4))),
        ValueError,
        r"spmap of <lambda> uses mesh axes \('data',\), but the map of <lambda> "
        r"around it uses 'data' already. Give each of them axes of its own",
    ),
    "nested maps on different meshes": (
        lambda: sm.spmap(sm.spmap(lambda x: x, mesh=MESH, mesh_axes="data"))(
            np.ones((4, 4))
        ),
        ValueError,
        r"names the mesh Mesh\('data': 4, 'model': 2.*, but the map of <lambda> "
        r"around it runs on Mesh\('axis0': 4.*give both of them mesh= and mesh_axes= "
        r"of one mesh",
    ),
    "unknown lowering": (
        lambda: sm.spmap(add, lowering="gspmd"),
        ValueError,
        r"spmap lowering must be 'manual' or 'spmd', but got 'gspmd'",
    ),
    "spmd in a loop": (
        lambda: sm.spmap(add, lowering="spmd", batch_size=2),
        ValueError,
        r"lowering='spmd' and batch_size=2 do not go together",
    ),
    **{
        f"axis_size={size!r}": (
            lambda size=size: sm.spmap(add, axis_size=size),
            error,
            rf"spmap axis_size must be {error_text}, got {size!r}",
        )
        for size, error, error_text in (
            (-1, ValueError, "at least 0"),
            *((size, TypeError, "an integer") for size in (2.5, True, "8")),
        )
    },
    "a mesh that is none": (
        lambda: sm.spmap(add, mesh=3, mesh_axes="data"),
        TypeError,
        r"spmap mesh must be a jax.sharding.Mesh, but got 3. shardmap.make_mesh makes",
    ),
    "submesh of nothing": (
        lambda: sm.submesh(None, ("data",)),
        TypeError,
        r"submesh takes a jax.sharding.Mesh, got None",
    ),
    "an axis name without a hash": (
        lambda: sm.spmap(add, ["i"]),
        TypeError,
        r"spmap axis_name must be hashable, such as a string, but got \['i'\]",
    ),
    "a run on an abstract mesh": (
        lambda: sm.spmap(lambda x: x, mesh=MESH.abstract_mesh, mesh_axes="data")(FOUR),
        ValueError,
        r"spmap of <lambda> cannot run on an AbstractMesh, which has no devices",
    ),
    "check_replicas is text": (
        lambda: sm.spmap(add, check_replicas="no"),
        TypeError,
        r"spmap check_replicas must be True or False, got 'no'",
    ),
    "a rule for a name": (
        lambda: sm.register_rule("add", "a, a -> a"),
        TypeError,
        r"a rule is for a jax.extend.core.Primitive, such as .*add_p, got 'add'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("case", ["mapped sizes differ", "rank too low"])
def test_message_under_a_transformation(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=text):
        jax.make_jaxpr(call)()


def test_a_mapped_function_works_after_each_kind_of_error():
    mapped = sm.spmap(lambda x, y: jnp.dot(x, y))
    good = np.ones((4, 3), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(mapped(good, good), np.full(4, 3.0))
        with pytest.raises(ValueError, match="inconsistent sizes"):
            mapped(good, good[:3])
        with pytest.raises(TypeError, match="dot_general requires contracting"):
            mapped(good, good[:, :2])
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            mapped(good)
