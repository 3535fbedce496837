"""What is told of wrong calls: the text of each error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.planning.sources.labelled import Lazy

pd = pytest.importorskip("pandas", reason="tables")
xr = pytest.importorskip("xarray", reason="arrays with labels")

FOUR, SIXTEEN = np.ones(4, np.float32), np.ones(16, np.float32)
MESH = sm.make_mesh({"data": 4, "model": 2})
DEVICES = jax.devices()
HALVES = sm.ShardingSpec((sm.Chunked(2),), (sm.ShardedAxis(0),))
TO_BE_DEVICES = r"devices must be a sequence of jax.Device, such as jax.devices\(\)"


def double(x):
    return x * 2


def depends(x):
    return x if x.sum() > 0 else -x


def depends_on_part(x, params):
    return x if params["w"].sum() > 0 else -x


def over_k(x):
    return lax.psum(x, "k")


def plan_with(cut):
    return sm.plan(double, np.ones(16, np.float32), in_slices={0: cut})


TABLE = pd.DataFrame({"a": FOUR})
LABELLED = xr.DataArray(FOUR, dims="time")
OF_NO_NUMBERS = {
    "swapped bytes": FOUR.astype(FOUR.dtype.newbyteorder()),
    "structured": np.zeros(4, [("a", "f4")]),
    "datetime": np.zeros(4, "M8[s]"),
    "timedelta": np.zeros(4, "m8[s]"),
    "object": np.array([None] * 4),
    "long double": FOUR.astype(np.longdouble),
    "text": np.array(["a"] * 4),
}


class Unread:
    """An array-like, as a dataset in a file."""

    shape, dtype = (4,), np.dtype("m8[s]")

    def __getitem__(self, index):
        raise AssertionError("nothing is read")


class Unprintable:
    def __repr__(self):
        raise RuntimeError("not now")


U = Unprintable()


def add(x, params):
    return x + params["w"]


CASES = {
    "mapped sizes differ": (
        lambda: sm.spmap(add)(FOUR, {"w": np.ones((3, 2))}),
        ValueError,
        r"spmap got inconsistent sizes for array axes to be mapped: x, float32\[4\], "
        r"has 4 at axis 0, params\['w'\], float32\[3,2\], has 3 at axis 0. Give None "
        r"in in_axes for what is not mapped\.$",
    ),
    "more arguments than names": (
        lambda: sm.spmap(lambda *a: a)(FOUR, (np.ones(2), FOUR)),
        ValueError,
        r"mapped: a\[0\], float32\[4\], .*, a\[1\]\[0\], float32\[2\]",
    ),
    "arguments taken by **kwargs": (
        lambda: sm.spmap(lambda **kwargs: kwargs["w"])(kwargs=FOUR, w={"b": FOUR[:3]}),
        ValueError,
        r"mapped: kwargs, float32\[4\], .*, w\['b'\], float32\[3\]",
    ),
    "rank too low": (
        lambda: sm.spmap(add)(FOUR, {"w": 3.0}),
        ValueError,
        r"to map params\['w'\], float32\[\] of rank 0, along axis 0, which it does not "
        r"have. Give None in in_axes .* get whole; of a list, map numpy.stack",
    ),
    "numbers, not a list of them": (
        lambda: sm.spmap(lambda a, b: a)(1.0, 2.0),
        ValueError,
        r"to map a, float32\[\] of rank 0, .* Give None in in_axes",
    ),
    "axis out of range": (
        lambda: sm.spmap(lambda x: x, in_axes=-3)(np.ones((4, 3))),
        ValueError,
        r"to map x, float32\[4,3\] of rank 2, along axis -3, which it does not have",
    ),
    "nothing mapped": (
        lambda: sm.spmap(lambda x: x, in_axes=None)(FOUR),
        ValueError,
        r"passed at least one argument containing an array to map, but 1 are not "
        r"mapped. Give axis_size=n",
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
        r"spmap of add in_axes must be a pytree prefix of the positional arguments: "
        r"in_axes\[1\] is a dict with the keys \['v'\], but stands for a dict with the "
        r"keys \['w'\]\.$",
    ),
    "in_axes of an argument that is no list": (
        lambda: sm.spmap(add, in_axes=([0, 0], 0))(FOUR, {"w": FOUR}),
        ValueError,
        r"arguments: in_axes\[0\] is a list of 2, but stands for an array\.$",
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
        r"spmap of <lambda> out_axes must be a pytree prefix of the result: out_axes "
        r"is a tuple of 3, but stands for a tuple of 2\.$",
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
        r"mapped output but out_axes is None: result\['a'\] of <lambda> can differ "
        r"between elements. Combine it with a collective",
    ),
    "static missing": (
        lambda: sm.spmap(lambda x, n=1: x, static_broadcasted_argnums=1)(FOUR),
        ValueError,
        r"static_broadcasted_argnums=\(1,\), but was called with 1 positional argum"
        r"ents. Pass all static ones by position",
    ),
    "negative static": (
        lambda: sm.spmap(add, static_broadcasted_argnums=-1),
        ValueError,
        r"static_broadcasted_argnums must be an int or several, none below 0",
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
    "arguments for an axis name": (
        lambda: sm.spmap(double, FOUR),
        TypeError,
        r"must be hashable.* For a call with arguments, write spmap\(f\)\(x\)\.$",
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
    "a rule for a name": (
        lambda: sm.register_rule("add", "a, a -> a"),
        TypeError,
        r"a rule is for a jax.extend.core.Primitive, such as .*add_p, got 'add'",
    ),
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
        r"and out_axes=\{\}. shardmap.make_mesh makes a mesh; axes of \{\} mean: "
        r"do not split",
    ),
    "a dimension beyond the rank": (
        lambda: sm.mesh_map(double, MESH, {"data": 3}, {})(np.ones((8, 8))),
        ValueError,
        r"mesh_map of double cuts dimension 3 of x, float\d+\[8,8\], into 4 blocks "
        r"along \('data',\)\. Cut a dimension that it has and that 4 divides, or pad",
    ),
    "sizes and names": (
        lambda: sm.make_mesh((4, 2), ("data", "model")),
        TypeError,
        r"make_mesh takes a dict from the names of axes to their sizes, such as "
        r"\{'data': 4, 'model': 2\}, but got \(4, 2\)\.$",
    ),
    "axes of a mesh given twice": (
        lambda: sm.make_mesh({"data": 4}, model=2),
        TypeError,
        r"as a dict or as keyword arguments, but got \{'data': 4\} and \{'model': 2\}",
    ),
    "a rest of devices that is none": (
        lambda: sm.make_mesh(data=3, model=-1),
        ValueError,
        r"the axis 'model' of \{'data': 3, 'model': -1\} cannot have all the rest: 3 "
        r"do not divide 8 devices$",
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
    "psum over the mesh axis of a map": (
        lambda: sm.spmap(
            lambda x: lax.psum(x, "data"), "i", mesh=MESH, mesh_axes="data"
        )(FOUR),
        NameError,
        r"^'data' is a mesh axis: collectives in spmap use axis_name. Write 'i', or "
        r"pass axis_name='data'$",
    ),
    "psum over one of two mesh axes": (
        lambda: sm.spmap(
            lambda x: lax.psum(x, "model"), mesh=MESH, mesh_axes=("data", "model")
        )(np.ones(8)),
        NameError,
        r"^'model' is a mesh axis: .* Pass axis_name='model'$",
    ),
    **{
        f"psum over no axis in {name}": (
            call,
            NameError,
            r"^unbound axis name: k\. Give the map that is meant this axis_name$",
        )
        for name, call in (
            ("plan", lambda: sm.plan(over_k, FOUR, in_slices={0: 2})),
            ("chunked", lambda: sm.chunked(over_k, {0: 2})(FOUR)),
            ("explain", lambda: sm.explain(over_k)(FOUR)),
            ("sharded_jit", lambda: sm.sharded_jit(over_k, (4,), None)(FOUR)),
            ("spmap", lambda: sm.spmap(lambda x: lax.axis_index("k"))(FOUR)),
        )
    },
    # Arguments
    "a list of numbers": (
        lambda: sm.spmap(double)([1.0, 2.0, 3.0, 4.0]),
        ValueError,
        r"map x\[0\], float32\[\] of rank 0, along axis 0, .* of a list, map numpy",
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
            rf"tracing the function {function} at \S*test_messages.py:\d+ for "
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
    "in_axes of one argument that is a dict": (
        lambda: sm.spmap(lambda x: x["a"], in_axes={"a": 0})({"a": FOUR}),
        ValueError,
        r"in_axes is a dict with the keys \['a'\], but stands for a tuple of 1\. For "
        r"the one argument, write in_axes=\({'a': 0},\)\.$",
    ),
    # What holds no numbers, or knows more than they
    **{
        f"{name} in {caller}": (
            functools.partial(lambda f, x: f(double)(x), f, x),
            TypeError,
            rf"{caller} argument x is a NumPy array of dtype .*, which JAX cannot "
            r"compute with. Give numbers",
        )
        for name, x in OF_NO_NUMBERS.items()
        for caller, f in (
            ("spmap", sm.spmap),
            ("chunked", lambda fun: sm.chunked(fun, {0: 2})),
            ("chunked", lambda fun: sm.chunked(fun, {0: 2}).explain),
        )
    },
    **{
        f"{name} in plan": (
            functools.partial(sm.plan, double, x, in_slices={0: 2}),
            TypeError,
            r"plan takes numbers and booleans, got .* in args\[0\]: give ",
        )
        for name, x in OF_NO_NUMBERS.items()
        if name != "swapped bytes"  # A shard is given the bytes in order.
    },
    **{
        f"{name} in explain": (
            lambda x=x: sm.explain(lambda tree: tree["x"])({"x": x}),
            TypeError,
            r"explain argument args\[0\]\['x'\] (is a NumPy array of|has the) dtype",
        )
        for name, x in (*OF_NO_NUMBERS.items(), ("array-like", Unread()))
    },
    "labels in a keyword argument of explain": (
        lambda: sm.explain(lambda *, x: x)(x=LABELLED),
        TypeError,
        r"explain argument kwargs\['x'\] is an xarray.DataArray, whose labels",
    ),
    "an array-like of no numbers": (
        lambda: sm.spmap(double)(Unread()),
        TypeError,
        r"spmap argument x has the dtype timedelta64\[s\], which JAX cannot compute",
    ),
    "an array-like in chunked": (
        lambda: sm.chunked(double, {0: 2})(Lazy(LABELLED.variable)),
        TypeError,
        r"chunked argument x is not in memory. Give np.asarray\(x\), or use shardmap.p",
    ),
    "no array in chunked": (
        lambda: sm.chunked(double, {0: 2})("four"),
        TypeError,
        r"chunked argument x of type <class 'str'> is not .* by functools.partial",
    ),
    **{
        f"labels in {caller}": (
            functools.partial(lambda f: f(double)(LABELLED), f),
            TypeError,
            rf"{caller} argument x is an xarray.DataArray, whose labels the result "
            r"would not have. Give the array, x.data, or use shardmap.plan",
        )
        for caller, f in (
            ("spmap", sm.spmap),
            ("mesh_map", lambda f: sm.mesh_map(f, MESH, ({"data": 0},), {"data": 0})),
            ("chunked", lambda fun: sm.chunked(fun, {0: 2})),
        )
    },
    "labels in device_put_sharded": (
        lambda: sm.device_put_sharded([{"a": LABELLED}] * 8, DEVICES),
        TypeError,
        r"device_put_sharded takes pytrees of arrays: shards\[0\]\['a'\] is an xarray",
    ),
    "a text in device_put_replicated": (
        lambda: sm.device_put_replicated({"w": FOUR, "norm": "batch"}, DEVICES),
        TypeError,
        r"device_put_replicated takes pytrees of arrays: x\['norm'\] is 'batch', which",
    ),
    "a text in one shard": (
        lambda: sm.device_put_sharded([{"a": FOUR}, {"a": "b"}], DEVICES[:2]),
        ValueError,
        r"shards\[1\]\['a'\] is 'b', which is not an array, but in shards\[0\] it is ",
    ),
    # What cannot be shown
    **{
        f"an object without a repr for {name}": (
            call,
            error,
            r"<Unprintable whose repr raises RuntimeError>",
        )
        for name, error, call in (
            ("devices", TypeError, lambda: sm.spmap(double, devices=[U])),
            ("mesh", TypeError, lambda: sm.spmap(double, mesh=U)),
            ("mesh_axes", ValueError, lambda: sm.spmap(double, mesh_axes=U, mesh=None)),
            ("in_parts", TypeError, lambda: sm.sharded_jit(double, in_parts=U)),
            ("memory", TypeError, lambda: sm.chunked(double, memory=U)),
            ("in_slices", TypeError, lambda: sm.chunked(double, U)(FOUR)),
            ("checkpoint", TypeError, lambda: plan_with(2).run(SIXTEEN, checkpoint=U)),
            ("task", TypeError, lambda: plan_with(2).run(SIXTEEN, task=U)),
            ("executor", TypeError, lambda: plan_with(2).run(SIXTEEN, executor=U)),
            ("plan", TypeError, lambda: sm.plan(double, U)),
            ("tap", TypeError, lambda: sm.tap(double, U)),
            ("interconnect", TypeError, lambda: sm.explain(double, interconnect=U)(1)),
            ("entries", TypeError, lambda: sm.ShardingSpec((U,), ())),
            ("make_mesh", TypeError, lambda: sm.make_mesh(U)),
        )
    },
    "an object without a repr for an argument": (
        lambda: sm.spmap(double)(U),
        TypeError,
        r"spmap argument x of type <class '.*Unprintable'> is not a valid JAX type",
    ),
    # Plans
    **{
        f"more pieces than memory has room for, by {cut}": (
            functools.partial(
                sm.plan,
                double,
                jax.ShapeDtypeStruct((2**31,), np.int8),
                in_slices={0: cut},
            ),
            ValueError,
            r"axis 0: .* makes 2,147,483,648 pieces, and an axis may have 10,000,000: ",
        )
        for cut in (sm.EACH, sm.Pieces(1), 2**31)
    },
    "a name for an executor": (
        lambda: plan_with(2).run(np.ones(16, np.float32), executor="threads"),
        TypeError,
        r"executor must be None, a number of processes, a concurrent.futures.Executor "
        r"or a distributed.Client, got 'threads' of type str",
    ),
    "a range for a cut": (
        lambda: plan_with(range(0, 16, 4)),
        TypeError,
        r"args\[0\] of shape \(16,\), axis 0: range\(0, 16, 4\) is not a cut: give the "
        r"lengths of the pieces, such as \(8, 8\), or \[\(0, 8\), \(8, 16\)\]",
    ),
    "a slice for a cut": (
        lambda: sm.chunked(double, {0: slice(0, 4)})(np.ones(16)),
        TypeError,
        r"axis 0: slice\(0, 4, None\) is not a cut: give the lengths of the pieces",
    ),
    "text for a cut": (
        lambda: plan_with("4"),
        TypeError,
        r"a cut \(a number, a tuple, a list, Pieces, EACH or AUTO\) must be an "
        r"integer, got '4'",
    ),
    "auto as text": (
        lambda: plan_with("auto"),
        TypeError,
        r"axis 0: 'auto' is not a cut: write shardmap.AUTO\. ",
    ),
    "a number of pieces without an axis": (
        lambda: sm.plan(double, FOUR, in_slices=8),
        TypeError,
        r"in_slices\[0\] is 8, but stands for one array: give None, EACH or a dict "
        r"\{axis: cut\}, such as \{0: 8\}$",
    ),
    "a number of pieces for an array": (
        lambda: sm.plan(add, FOUR, FOUR, in_slices=(2, None)),
        TypeError,
        r"in_slices\[0\] is 2, but stands for one array: give None, EACH or a dict "
        r"\{axis: cut\}, such as \{0: 2\}$",
    ),
    "more entries of cuts than arguments": (
        lambda: sm.plan(double, FOUR, in_slices=({0: 2}, None)),
        ValueError,
        r"^plan in_slices must be a pytree prefix of the args, with None for what "
        r"stays whole: in_slices is a tuple of 2, but stands for a tuple of 1\.$",
    ),
    "cuts of a list of numbers": (
        lambda: sm.plan(double, [1, 2, 3], in_slices={0: 3}),
        ValueError,
        r"plan cannot cut args\[0\]\[0\] of shape \(\), axis 0: a scalar has no axes\. "
        r"A list of numbers is a pytree: pass numpy\.asarray of it\.$",
    ),
    "a list for out": (
        lambda: plan_with(2).run(SIXTEEN, out=[SIXTEEN]),
        ValueError,
        r"^out has arrays for \['result\[0\]'\], but the function returns "
        r"\['result'\]: give one array-like, or None, for each$",
    ),
    "a plan without arguments": (
        lambda: sm.plan(double),
        TypeError,
        r"^plan takes the arguments of double and its own options, as plan\(double, "
        r"\*args, in_slices=\.\.\., memory=\.\.\.\): missing a required argument: 'x'$",
    ),
    "an argument for chunked": (
        lambda: sm.chunked(double, FOUR),
        TypeError,
        r"^chunked takes only the function: write chunked\(double\)\(x\), not ",
    ),
    "an argument for explain": (
        lambda: sm.explain(double, FOUR),
        TypeError,
        r"^explain takes only the function: write explain\(double\)\(x\), not ",
    ),
    "a call of a plan": (
        lambda: plan_with(2)(SIXTEEN),
        TypeError,
        r"^a plan is no function: plan\(\.\.\.\)\.run\(\*args\) runs it$",
    ),
    **{
        f"{name} of a plan": (
            functools.partial(getattr, plan_with(2), name),
            AttributeError,
            rf"^a plan has no '{name}': {instead}",
        )
        for name, instead in (
            ("save", r"sm\.explain\(plan\)\.save\(path\) writes a page"),
            ("compute", r"plan\.run\(\) runs it$"),
        )
    },
    **{
        f"{option} of {transformation.__name__}": (
            functools.partial(transformation, double, **{option: 1}),
            TypeError,
            rf"^{transformation.__name__} has no {option}=: {instead}",
        )
        for transformation, option, instead in (
            (
                sm.spmap,
                "static_argnums",
                "give positions as static_broadcasted_argnums",
            ),
            (sm.spmap, "static_argnames", "give positions as static_broadcasted_arg"),
            (sm.spmap, "num_devices", r"give devices=jax\.devices\(\)\[:n\]$"),
            (sm.spmap, "axis", "give in_axes=$"),
            (sm.spmap, "name", "give axis_name=$"),
            (sm.spmap, "chunk_size", "give batch_size=$"),
            (sm.spmap, "in_specs", "use mesh_map, for blocks$"),
            (sm.chunked, "batch_size", "give the lengths of the pieces as in_slices"),
            (sm.chunked, "chunk_size", "give the lengths of the pieces as in_slices"),
        )
    },
    "in_axes by position": (
        lambda: sm.spmap(double, "i", 0),
        TypeError,
        r"^spmap takes fun, axis_name by position, and other options by keyword$",
    ),
    "a path for a plan": (
        lambda: sm.plan(double, "x.zarr"),
        TypeError,
        r"got 'x\.zarr' of type str in args\[0\]: open a store or a file first, as "
        r"with ",
    ),
    "a fraction of a byte": (
        lambda: sm.plan(double, FOUR, memory=0.5),
        TypeError,
        r"memory must be a number of bytes or a text such as '2 GB', got 0\.5 of ",
    ),
    "text to be explained": (
        lambda: sm.explain(double)("a"),
        TypeError,
        r"^explain argument args\[0\] is 'a', no array: fix it with "
        r"functools\.partial$",
    ),
    # NumPy, and other things that need values
    **{
        f"NumPy in {name}": (
            call,
            TypeError,
            r"^the function calls NumPy at \S*test_messages.py:\d+, which needs the "
            r"values of its arrays before they are known: write it with jax\.numpy, as "
            r"jnp\.sin$",
        )
        for name, call in (
            ("spmap", lambda: sm.spmap(lambda x: np.sin(x))(FOUR)),
            ("mesh_map", lambda: sm.mesh_map(lambda x: np.sin(x), MESH, {}, {})(FOUR)),
            ("sharded_jit", lambda: sm.sharded_jit(lambda x: np.sin(x), None)(FOUR)),
            ("chunked", lambda: sm.chunked(lambda x: np.sin(x), {0: 2})(FOUR)),
            ("plan", lambda: sm.plan(lambda x: np.sin(x), FOUR, in_slices={0: 2})),
            ("explain", lambda: sm.explain(lambda x: np.sin(x))(FOUR)),
        )
    },
    **{
        f"a function of NumPy for {name}": (
            call,
            TypeError,
            r"^the function calls NumPy\S*.*, which .*: write it with jax\.numpy",
        )
        for name, call in (
            ("spmap", lambda: sm.spmap(np.sin)(FOUR)),
            ("explain", lambda: sm.explain(np.sin)(FOUR)),
        )
    },
    "a float of an element": (
        lambda: sm.spmap(lambda x: float(x))(FOUR),
        jax.errors.ConcretizationTypeError,
        r"try using `x\.astype\(float\)`.*\n.* value of the argument x\.$",
    ),
    "a mask": (
        lambda: sm.spmap(lambda x: x[x > 0])(np.ones((4, 2))),
        IndexError,
        r"bool\[2\]: use jax\.numpy\.where\(mask, x, 0\)$",
    ),
    # Parts
    **{
        f"names for parts in {name}": (
            call,
            TypeError,
            r"got P\('data',\)\. These count the parts of each dimension; for names of "
            r"mesh axes, use jax\.jit and jax\.lax\.with_sharding_constraint\.$",
        )
        for name, call in (
            ("sharded_jit", lambda: sm.sharded_jit(double, P("data"))),
            ("a constraint", lambda: sm.with_sharding_constraint(FOUR, P("data"))),
        )
    },
    "a shape before its spec": (
        lambda: sm.picture((8, 4), P("data")),
        TypeError,
        r"with a ShardingSpec, a Sharding or a PartitionSpec, which comes first: got "
        r"\(8, 4\) there$",
    ),
    "chunks for a plan": (
        lambda: sm.plan(double, FOUR, chunks=4),
        TypeError,
        r"^plan takes the arguments of double and its own options, as .* in_slices=.*: "
        r"got an unexpected keyword argument 'chunks'$",
    ),
    "a path for out of a plan": (
        lambda: sm.plan(double, FOUR, out="o.zarr", memory="1 MB"),
        ValueError,
        r"^plan cannot write to out: result has the path 'o.zarr' as out: open it",
    ),
    "a path for out": (
        lambda: plan_with(2).run(SIXTEEN, out="o.zarr"),
        ValueError,
        r"result has the path 'o.zarr' as out: open it, with zarr.open or "
        r"numpy.lib.format.open_memmap, and give the array$",
    ),
    "workers for a run": (
        lambda: plan_with(2).run(SIXTEEN, workers=4),
        TypeError,
        r"run got workers=, which is no option of run nor a keyword argument that the "
        r"plan was made with\. executor=4 runs shards in four",
    ),
    "an argument too many for a run": (
        lambda: plan_with(2).run(SIXTEEN, SIXTEEN),
        ValueError,
        r"the plan was made for 1 argument, got 2$",
    ),
    "arguments that are gone": (
        lambda: plan_with(2).run(),
        ValueError,
        r"the arguments that the plan was made with are shapes only, or are gone: pass "
        r"them again",
    ),
    "a table for a plan": (
        lambda: sm.plan(double, TABLE, in_slices={0: 2}),
        TypeError,
        r"plan cannot take args\[0\], which is a DataFrame, a table whose columns have "
        r"a dtype each\. Give its .to_numpy\(\), or .to_xarray\(\) to shardmap.plan",
    ),
    "a table for a map": (
        lambda: sm.spmap(double)(TABLE),
        TypeError,
        r"spmap argument x is a DataFrame, .* Give its .to_numpy\(\), or .to_xarray",
    ),
    "a text for a plan": (
        lambda: sm.plan(double, "text"),
        TypeError,
        r"got 'text' of type str in args\[0\]: non-array arguments must be static, so "
        r"name it in static_argnums or static_argnames$",
    ),
    "memory for nothing": (
        lambda: sm.chunked(lambda x: x[::-1].cumsum(), memory="3 B")(FOUR),
        ValueError,
        r"memory=3 B is too little: .* Pass memory=\d+ or more\.$",
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
    "an array for a shape": (
        lambda: sm.pmap_sharding(np.zeros((40, 40))),
        TypeError,
        r"pmap_sharding shape must be a tuple of ints, such as \(8,\) or x.shape, but",
    ),
    "a size for a shape": (
        lambda: sm.pmap_sharding(8),
        TypeError,
        r"pmap_sharding shape must be a tuple of ints, .* but got 8",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=text) as caught:
        call()
    assert str(caught.value).count("\n") < 3
    # Nothing of ours stands before the user's error.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


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
