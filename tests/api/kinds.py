"""The three that map, each called in the same way, for what all of them can do."""

import functools

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

X = np.arange(8, dtype=np.float32)
MESH = sm.make_mesh({"i": 8})
SHARDED = NamedSharding(MESH, P("i"))
KINDS = ["spmap", "mesh_map", "sharded_jit"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def mapped(kind, fun=None, static=(), **options):
    """``fun`` mapped over eight devices; without it, a decorator."""
    form = {
        "spmap": functools.partial(
            sm.spmap, axis_name="i", static_broadcasted_argnums=static
        ),
        "mesh_map": functools.partial(
            sm.mesh_map,
            mesh=MESH,
            in_axes={"i": 0},
            out_axes={"i": 0},
            static_argnums=static,
        ),
        "sharded_jit": functools.partial(
            sm.sharded_jit, in_parts=(8,), out_parts=(8,), static_argnums=static
        ),
    }[kind]
    return form(**options) if fun is None else form(fun, **options)


def shifted(x, by=1):
    """x, moved."""
    return x + by
