"""Mapped functions through cloudpickle, here and to another process."""

import copy
import pickle
import sys

import cloudpickle
import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.command_line import python

X = np.arange(8, dtype=np.float32)
MESH = sm.make_mesh({"x": 2, "y": 4})
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"))


@sm.spmap(axis_name="i")
def centered(x):
    return x - lax.pmean(x, "i")


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def times(self, x):
        return self.scale * x


def mapped_functions():
    def shifted(x, by=1):
        return x + by

    last = tuple(jax.devices()[4:])

    @sm.spmap(axis_name="i", out_axes=None)
    def total(x):
        return lax.psum(x, "i")

    return {
        "lambda": (sm.spmap(lambda x: x - lax.pmean(x, "i"), "i"), (X,)),
        "decorated": (total, (X,)),
        "of a module": (centered, (X,)),
        "static": (sm.spmap(shifted, static_broadcasted_argnums=1), (X, 5)),
        "devices": (sm.spmap(shifted, devices=last), (X,)),
        "on a mesh": (sm.spmap(shifted, mesh=MESH, mesh_axes=("y", "x")), (X,)),
        "on an Explicit mesh": (sm.spmap(shifted, mesh=EXPLICIT, mesh_axes="y"), (X,)),
        "nested": (sm.spmap(sm.spmap(shifted)), (X.reshape(2, 4),)),
        "options": (
            sm.spmap(shifted, "i", in_axes=[1], out_axes=1, lowering="spmd"),
            (X.reshape(2, 4),),
        ),
        "bound method": (sm.spmap(Scaled(np.float32(2)).times), (X,)),
        "mesh_map": (sm.mesh_map(shifted, MESH, {"x": 0}, {"x": 0, "y": 0}), (X,)),
        "sharded_jit": (sm.sharded_jit(shifted, (4,), (4,)), (X,)),
    }


@pytest.mark.parametrize("name", mapped_functions())
def test_round_trip(name):
    mapped, args = mapped_functions()[name]
    read = cloudpickle.loads(cloudpickle.dumps(mapped))
    expected = mapped(*args)
    np.testing.assert_array_equal(read(*args), expected)
    assert read(*args).sharding == expected.sharding
    assert read.__name__ == mapped.__name__
    assert repr(type(read)) == repr(type(mapped))
    np.testing.assert_array_equal(copy.deepcopy(mapped)(*args), expected)


def test_a_map_on_an_abstract_mesh():
    kinds = (jax.sharding.AxisType.Auto,)
    large = jax.sharding.AbstractMesh((64,), ("i",), kinds)
    mapped = sm.spmap(lambda x: x, mesh=large, mesh_axes="i")
    read = cloudpickle.loads(cloudpickle.dumps(mapped))
    (equation,) = jax.make_jaxpr(read)(np.ones(64, np.float32)).eqns
    assert equation.params["mesh"] == large


def test_functions_of_a_module_go_by_name():
    assert pickle.loads(pickle.dumps(centered)) is centered
    assert cloudpickle.loads(cloudpickle.dumps(centered)) is centered


def test_a_mapped_function_of_this_closure():
    inner = sm.spmap(lambda x: 2 * x, mesh=MESH, mesh_axes="y")
    read = cloudpickle.loads(cloudpickle.dumps(lambda x: inner(x).sum()))
    assert float(read(X)) == 56
    np.testing.assert_array_equal(jax.grad(read)(X), np.full(8, 2, np.float32))


READER = """
import pickle, sys
import jax, numpy as np
with open(sys.argv[1], "rb") as file:
    work = pickle.load(file)
for name, (mapped, args, expected) in work.items():
    np.testing.assert_array_equal(mapped(*args), expected, name)
print(len(work), [d.id for d in work["devices"][0](args[0]).sharding.device_set])
"""


def test_in_another_process(tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        work = {
            name: (mapped, args, np.asarray(mapped(*args)))
            for name, (mapped, args) in mapped_functions().items()
            if name != "of a module"
        }
        path = tmp_path / "work"
        path.write_bytes(cloudpickle.dumps(work))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    done = python("-c", READER, path, without=())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1)[0] == str(len(work))


@pytest.mark.deep
def test_devices_that_the_other_process_does_not_have(tmp_path):
    path = tmp_path / "work"
    mapped = sm.spmap(lambda x: 2 * x, devices=jax.devices()[6:])
    path.write_bytes(cloudpickle.dumps({"devices": (mapped, (X,), 2 * X)}))
    flags = "--xla_force_host_platform_device_count=2"
    done = python("-c", READER, path, XLA_FLAGS=flags)
    assert done.returncode != 0
    assert "names the cpu device 6, but this process has [0, 1]" in done.stderr


def test_what_jax_does_not_pickle():
    # If it does one day, there is nothing to pack.
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(NamedSharding(MESH, P("x")))
