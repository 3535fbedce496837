"""The table of collectives says of each what JAX says, and all rooms read it."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardmap.map.collectives.table import COLLECTIVES

X = np.zeros((8, 8), np.float32)
# Before any test registers its own.
OF_JAX = {each.name: each for each in COLLECTIVES.values()}

USES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
    "ragged_all_to_all": None,  # Takes more than an array; see `traced`.
    "ppermute": lambda x: lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, "i", 0),
    "axis_index": lambda x: x + lax.axis_index("i").astype(x.dtype),
}


def traced(name):
    """The primitives that a use of the collective binds in a map."""
    if name == "ragged_all_to_all":
        offsets = jax.ShapeDtypeStruct((8,), np.int32)
        rows = jax.ShapeDtypeStruct((8, 8), np.float32)
        jaxpr = jax.make_jaxpr(
            lambda *args: lax.ragged_all_to_all(*args, axis_name="i"),
            axis_env=[("i", 8)],
        )(rows, rows, offsets, offsets, offsets, offsets)
    else:
        jaxpr = jax.make_jaxpr(USES[name], axis_env=[("i", 8)])(X)
    return [equation.primitive for equation in jaxpr.eqns]


def test_there_is_one_entry_for_each():
    assert OF_JAX.keys() == USES.keys()
    assert all(hasattr(lax, name) for name in OF_JAX)


@pytest.mark.parametrize("name", USES)
def test_an_entry_has_the_primitive_that_its_function_binds(name):
    (found,) = [q for q in traced(name) if q in COLLECTIVES]
    assert COLLECTIVES[found].name == name


@pytest.mark.parametrize("name", sorted({*USES} - {"ragged_all_to_all"}))
def test_what_a_shard_map_binds_is_known_too(name):
    """That it checks what varies makes other primitives of some of them."""
    mesh = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], USES[name](x[0])),
        mesh=mesh,
        in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec("i"),
    )
    (equation,) = jax.make_jaxpr(mapped)(np.zeros((8, 8, 8), np.float32)).jaxpr.eqns
    inside = [inner.primitive for inner in equation.params["jaxpr"].eqns]
    assert name in [COLLECTIVES[q].name for q in inside if q in COLLECTIVES]
