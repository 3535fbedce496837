"""What becomes of a function: its devices, arrays and notes, compiled or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import shardmap as sm

X = np.ones((8, 4), np.float32)


def of(fun, *args):
    return sm.explain(fun)(*args)


def test_a_map_is_compiled_for_its_devices():
    program = of(sm.spmap(lambda x: lax.psum(x, "i"), "i"), X)
    assert program.cost is not None
    assert (program.num_devices, program.available) == (8, jax.local_device_count())
    assert program.mesh == (("i", 8),)
    assert program.devices == ()
    assert [array.path for array in program.arrays] == ["x", "result"]
    assert [each.operation for each in program.collectives] == ["psum"]
    assert program.notes == ()


@pytest.mark.parametrize("by_partitioner", [False, True])
def test_over_an_abstract_mesh_nothing_is_compiled(by_partitioner):
    mesh = AbstractMesh((16,), ("i",), axis_types=(AxisType.Auto,))
    lowering = "spmd" if by_partitioner else "manual"
    mapped = sm.spmap(jnp.sin, "i", mesh=mesh, mesh_axes="i", lowering=lowering)
    program = of(mapped, np.ones((16, 2)))
    assert program.cost is None
    assert (program.num_devices, program.device_kind) == (16, None)
    assert (program.collectives, program.available, program.largest) == ((), None, ())
    first, *others = program.notes
    assert first.startswith("Nothing was compiled: the mesh is abstract.")
    assert len(others) == by_partitioner


def test_steps_that_nobody_knows_are_said():
    def fun(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x)

    (note,) = of(fun, X).notes
    assert note.startswith("The steps of a loop whose length only the running program")


def test_what_a_library_takes_besides_is_bounded():
    """Measured, the process grows by 116 to 160 MiB, of which buffers are 14."""

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
        return weights @ v.transpose(1, 0, 2)

    q = jax.ShapeDtypeStruct((2048, 4, 64), np.float32)
    report = sm.explain(attention)(q, q, q)
    (note,) = report.notes or ("",)
    temporary = report.cost.temporary_bytes
    assert temporary >= 64 << 20 or "may take up to 256.1 MiB besides" in note
    assert sm.explain(lambda x: x @ x)(np.ones((8, 8), np.float32)).notes == ()
