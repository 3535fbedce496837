"""A map's equation that runs at once: on which devices, and under which settings."""

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.map.primitives.map_primitive import spmap_p

X = np.arange(8, dtype=np.float32)


def equation(fun, x=X, **options):
    (found,) = jax.make_jaxpr(sm.spmap(fun, "i", **options))(x).jaxpr.eqns
    assert found.primitive is spmap_p
    return found


def bound(found, *args):
    return spmap_p.bind(*args, **found.params)


def test_an_equation_runs_on_its_mesh():
    (result,) = bound(equation(lambda x: x + lax.psum(x, "i")), X)
    np.testing.assert_array_equal(result, X + X.sum())
    assert len(result.sharding.device_set) == 8


@pytest.mark.parametrize("lie", [2, 8])
def test_a_short_axis_runs_where_its_operands_are(lie):
    found = equation(lambda x: x + 1, X[:2])
    spec = jax.P("d") if lie == 2 else jax.P()
    mesh = sm.make_mesh({"d": lie})
    x = jax.device_put(X[:2], jax.NamedSharding(mesh, spec))
    (result,) = bound(found, x)
    assert len(result.sharding.device_set) == lie


@pytest.mark.parametrize("setting", [jax.disable_jit, jax.debug_nans, jax.debug_infs])
def test_settings_that_look_at_operations_give_the_same_result(setting):
    found = equation(jax.jit(lambda x: x * 2))
    with setting(True):
        (result,) = bound(found, X)
    np.testing.assert_array_equal(result, 2 * X)
    assert result.sharding == bound(found, X)[0].sharding
