"""What a newcomer may call wrongly, and what he is told: the text of each error."""

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm

FOUR = np.ones(4, np.float32)
DEVICES = jax.devices()
MESH = sm.make_mesh({"data": 4, "model": 2})
HALVES = sm.ShardingSpec((sm.Chunked(2),), (sm.ShardedAxis(0),))
TO_BE_DEVICES = r"devices must be a sequence of jax.Device, such as jax.devices\(\)"


def double(x):
    return x * 2


def depends(x):
    return x if x.sum() > 0 else -x


def depends_on_part(x, params):
    return x if params["w"].sum() > 0 else -x


def plan_with(cut):
    return sm.plan(double, np.ones(16, np.float32), in_slices={0: cut})


CASES = {
    # Devices
    "numbers for devices": (
        lambda: sm.spmap(double, devices=[0, 1]),
        TypeError,
        rf"spmap {TO_BE_DEVICES}\[:2\], but devices\[0\] is 0",
    ),
    "a platform for devices": (
        lambda: sm.spmap(double, devices="cpu"),
        TypeError,
        rf"spmap {TO_BE_DEVICES}\[:2\], but got 'cpu'",
    ),
    "a sharding on numbers": (
        lambda: HALVES.named_sharding([0, 1]),
        TypeError,
        rf"named_sharding {TO_BE_DEVICES}\[:2\], but devices\[0\] is 0",
    ),
    # Meshes
    "no mesh": (
        lambda: sm.mesh_map(double, None, {}, {}),
        TypeError,
        r"mesh_map needs mesh, in_axes and out_axes, but got mesh=None, in_axes=\{\} "
        r"and out_axes=\{\}. shardmap.make_mesh makes a mesh; axes of \{\} cut nothing",
    ),
    "sizes for a mesh": (
        lambda: sm.mesh_map(double, {"data": 4}, {}, {}),
        TypeError,
        r"mesh_map mesh must be a jax.sharding.Mesh, but got \{'data': 4\}. "
        r"shardmap.make_mesh\(\{'data': 4\}\) makes one",
    ),
    "a mesh of sizes without names": (
        lambda: sm.make_mesh([4, 2]),
        TypeError,
        r"make_mesh takes a dict from the names of axes to their sizes, such as "
        r"\{'data': 4, 'model': 2\}, but got \[4, 2\]",
    ),
    "a mesh of numbers for names": (
        lambda: sm.make_mesh({0: 2}),
        TypeError,
        r"the name of a mesh axis must be a string, got 0 in \{0: 2\}",
    ),
    "a mesh that no machine has": (
        lambda: sm.make_mesh({"a": 99999999999}),
        ValueError,
        r"a mesh of \{'a': 99999999999\} needs 99999999999 devices, but got 8.$",
    ),
    "a mesh with one device twice": (
        lambda: sm.make_mesh({"a": 2}, [DEVICES[1]] * 2),
        ValueError,
        r"make_mesh needs different devices, but device 1 is there more than once in "
        r"\[1, 1\]",
    ),
    "a number for mesh axes": (
        lambda: sm.spmap(double, mesh=MESH, mesh_axes=3),
        TypeError,
        r"spmap mesh_axes must be the name of a mesh axis or a sequence of them, but "
        r"got 3\.$",
    ),
    "no names for a submesh": (
        lambda: sm.submesh(MESH, None),
        TypeError,
        r"submesh axis_names must be the name of a mesh axis .*, but got None\.$",
    ),
    # Axes and names
    "in_axes of text in a tuple": (
        lambda: sm.spmap(double, in_axes=(0, {"w": "1"})),
        TypeError,
        r"but got \(0, \{'w': '1'\}\): in_axes\[1\]\['w'\] is '1'\.$",
    ),
    "a name for a function": (
        lambda: sm.spmap("i"),
        TypeError,
        r"spmap expects a callable, but got 'i'. For a decorator, write "
        r"@spmap\(axis_name='i'\)",
    ),
    "the axis name 0": (
        lambda: sm.spmap(double, 0),
        TypeError,
        r"spmap axis_name must be no number, but got 0: collectives take numbers for "
        r"dimensions of an array. Give it a name, such as a string",
    ),
    "psum over another axis": (
        lambda: sm.spmap(lambda x: lax.psum(x, "batch"), "i")(FOUR),
        NameError,
        r"^unbound axis name: batch. Give the map that is meant this axis_name, or use "
        r"one that is bound here: 'i'$",
    ),
    "psum over another axis of a mesh": (
        lambda: sm.mesh_map(lambda x: lax.psum(x, "k"), MESH, {"data": 0}, {"data": 0})(
            FOUR
        ),
        NameError,
        r"use one that is bound here: 'data', 'model'$",
    ),
    "psum in a map without a name": (
        lambda: sm.spmap(lambda x: lax.axis_index("k"))(FOUR),
        NameError,
        r"^unbound axis name: k. Give the map that is meant this axis_name$",
    ),
    # Arguments
    "a list of numbers": (
        lambda: sm.spmap(double)([1.0, 2.0, 3.0, 4.0]),
        ValueError,
        r"x\[0\] is float32\[\] \(rank 0\), in_axes asks for axis 0\n(?s:.*)A "
        r"list of numbers is a pytree: pass numpy.asarray of it\.$",
    ),
    "a long list": (
        lambda: sm.spmap(double)([1.0] * 100),
        ValueError,
        r"\* x\[7\] is .*\n  \* and 92 more\nGive None(?s:.*)list of numbers",
    ),
    "a tuple of numbers": (
        lambda: sm.spmap(lambda x: x, in_axes=0)({"w": (1, np.float32(2))}),
        ValueError,
        r"x\['w'\]\[0\] is int32\[\](?s:.*)list of numbers",
    ),
    "a list of numbers for blocks": (
        lambda: sm.mesh_map(double, MESH, {"data": 0}, {"data": 0})([1.0] * 4),
        ValueError,
        r"x\[0\] is float32\[\]: it has no dimension 0, which \{'data': 0\} names\n"
        r"(?s:.*)A list of numbers is a pytree: pass numpy.asarray of it",
    ),
    "an array of objects": (
        lambda: sm.spmap(double)(np.array([1, None], object)),
        TypeError,
        r"spmap argument x is a NumPy array of dtype object, which JAX cannot compute "
        r"with. Give numbers, such as x.astype\('float32'\)",
    ),
    # Tracing: JAX's errors name the user's function and argument.
    **{
        f"an if on {argument} in {what}": (
            call,
            jax.errors.TracerBoolConversionError,
            rf"tracing the function {function} at \S*test_wrong_calls.py:\d+ for "
            rf"{what}. .* depends on the value of the argument {argument}\.",
        )
        for what, function, argument, call in (
            ("spmap", "depends", "x", lambda: sm.spmap(depends)(FOUR)),
            (
                "spmap",
                "depends_on_part",
                r"params\['w'\]",
                lambda: sm.spmap(depends_on_part)(FOUR, {"w": FOUR}),
            ),
            (
                "mesh_map",
                "depends",
                "x",
                lambda: sm.mesh_map(depends, MESH, {"data": 0}, {"data": 0})(FOUR),
            ),
            ("chunked", "depends", "x", lambda: sm.chunked(depends, {0: 2})(FOUR)),
            (
                "sharded_jit",
                "depends",
                "x",
                lambda: sm.sharded_jit(depends, None, None, 2)(FOUR),
            ),
        )
    },
    # Plans
    "a name for an executor": (
        lambda: plan_with(2).run(np.ones(16, np.float32), executor="threads"),
        TypeError,
        r"executor must be None, a number of processes, a concurrent.futures.Executor "
        r"or a distributed.Client, got 'threads' of type str",
    ),
    "a range for a cut": (
        lambda: plan_with(range(0, 16, 4)),
        TypeError,
        r"args\[0\] of shape \(16,\), axis 0: range\(0, 16, 4\) is no cut: give the "
        r"lengths of the pieces, such as \(8, 8\), or \[\(0, 8\), \(8, 16\)\]",
    ),
    "a slice for a cut": (
        lambda: sm.chunked(double, {0: slice(0, 4)})(np.ones(16)),
        TypeError,
        r"axis 0: slice\(0, 4, None\) is no cut: give the lengths of the pieces",
    ),
    "text for a cut": (
        lambda: plan_with("4"),
        TypeError,
        r"a cut \(a number, a tuple, a list, Pieces, EACH or AUTO\) must be an "
        r"integer, got '4'",
    ),
    "no function to plan": (
        lambda: sm.plan(3, FOUR),
        TypeError,
        r"plan takes a function, got 3",
    ),
    # Specs
    "swapped arguments": (
        lambda: sm.spec_to_indices(HALVES, (8,)),
        TypeError,
        r"spec_to_indices takes a shape and a ShardingSpec, in this order, but got "
        r"ShardingSpec\(.*\) and \(8,\)",
    ),
    "a size for a shape": (
        lambda: sm.pmap_sharding(8),
        TypeError,
        r"pmap_sharding shape must be a tuple of ints, such as \(8,\), but got 8",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=text) as caught:
        call()
    # Nothing of ours stands before the user's error.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_plan_is_explained():
    assert "asked to be cut into 16 pieces of 1" in str(sm.explain(plan_with(100)))
