"""Jaxprs are put under a mesh: their contexts, shardings and shard_maps name it."""

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.walk import equations
from shardmap.map.lowering.meshes import under_mesh
from shardmap.sharding.mesh import with_manual_axes

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
X = np.ones((4, 2), np.float32)
MANUAL = with_manual_axes(MESH, ["a"]).abstract_mesh


def meshes(jaxpr):
    found = []
    for equation in equations(jaxpr):
        with equation.ctx.manager:
            found.append(jax.sharding.get_abstract_mesh())
    return found


def test_every_equation_is_lowered_under_the_mesh():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lax.sin)(x) + 1)(X).jaxpr
    assert MANUAL not in meshes(jaxpr)
    assert set(meshes(under_mesh(jaxpr, MANUAL))) == {MANUAL}


def test_a_shard_map_inside_has_its_axes_manual_too():
    inner = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(None, "b")
    mapped = jax.shard_map(
        lax.sin, mesh=inner, in_specs=spec, out_specs=spec, axis_names={"b"}
    )
    changed = under_mesh(jax.make_jaxpr(mapped)(X).jaxpr, MANUAL)
    [equation] = [e for e in equations(changed) if e.primitive is SHARD_MAP]
    assert equation.params["mesh"] == MANUAL
    [inside] = meshes(equation.params["jaxpr"])
    assert inside.axis_types == (AxisType.Manual, AxisType.Manual)


def test_a_shard_map_on_another_mesh_is_left_alone():
    other = AbstractMesh((8,), ("other",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lax.sin, mesh=other, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    changed = under_mesh(jax.make_jaxpr(mapped)(X).jaxpr, MANUAL)
    [equation] = [e for e in equations(changed) if e.primitive is SHARD_MAP]
    assert equation.params["mesh"].axis_names == ("other",)


def test_shardings_of_values_name_the_mesh():
    there = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    wanted = NamedSharding(there, PartitionSpec(None, "b"))
    jaxpr = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, wanted))(X).jaxpr
    [equation] = under_mesh(jaxpr, MANUAL).eqns
    assert equation.params["sharding"].mesh == MANUAL
    assert equation.params["sharding"].spec == wanted.spec
