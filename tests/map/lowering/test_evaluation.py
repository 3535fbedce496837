"""A map's equation that runs at once: on which devices, and under which settings."""

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.map.primitives.map_primitive import spmap_p

X = np.arange(8, dtype=np.float32)


def equation(fun, x=X, **options):
    (found,) = jax.make_jaxpr(sm.spmap(fun, "i", **options))(x).jaxpr.eqns
    assert found.primitive is spmap_p
    return found


def bound(found, *args):
    return spmap_p.bind(*args, **found.params)


@pytest.mark.parametrize("lie", [2, 8])
def test_a_short_axis_runs_where_its_operands_are(lie):
    found = equation(lambda x: x + 1, X[:2])
    spec = jax.P("d") if lie == 2 else jax.P()
    mesh = sm.make_mesh({"d": lie})
    x = jax.device_put(X[:2], jax.NamedSharding(mesh, spec))
    (result,) = bound(found, x)
    assert len(result.sharding.device_set) == lie
