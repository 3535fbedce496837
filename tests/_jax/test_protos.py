"""XLA's forms of a sharding are what JAX itself makes and takes."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardmap._jax.protos import HloSharding, OpSharding


def test_they_are_the_types_of_jax_own_shardings():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    made = NamedSharding(mesh, PartitionSpec("y"))._to_xla_hlo_sharding(1)
    assert isinstance(made, HloSharding)
    assert isinstance(made.to_proto(), OpSharding)


def test_a_proto_takes_lists_of_devices_and_iotas():
    iota = HloSharding.iota_tile((2, 2), reshape_dims=(2, 2), transpose_perm=(1, 0))
    proto = OpSharding()
    proto.type = OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [2, 2]
    proto.tile_assignment_devices = [0, 2, 1, 3]
    assert HloSharding.from_proto(proto) == iota
    assert iota.to_proto().iota_transpose_perm == [1, 0]
