"""Arguments by name, and those that are not arrays."""

import functools
import inspect

import jax
import numpy as np
import pytest

from shardmap.plan.plan import OPTIONS, ShardPlan, plan
from shardmap.plan.run.shards import Shard
from tests.plan.plan_programs import X


def _powers(x, power, *, scale, shift=None):
    y = x if power == 1 else x * x
    return y * scale["by"] + (0 if shift is None else shift)


def test_static_and_keyword_arguments_are_bound_before():
    bound = functools.partial(_powers, power=2, scale={"by": np.float32(3)})
    made = plan(bound, X, in_slices={0: 2})
    np.testing.assert_allclose(made.run(X), X * X * 3, rtol=1e-6)


def test_keyword_arguments_are_whole():
    scale = {"by": np.arange(6, dtype=np.float32)[None]}
    square = functools.partial(_powers, power=2)
    made = plan(square, X, scale=scale, in_slices={0: 2})
    assert made.num_shards == 2
    np.testing.assert_allclose(made.run(X, scale=scale), X * X * np.arange(6))
    assert "kwargs['scale']['by']: float32[1, 6]" in str(made.explain())
    out = None
    for shard in made.shards:
        out = shard.reduce(shard.function(*shard.args(X, scale=scale)), out)
    np.testing.assert_allclose(out, X * X * np.arange(6))
    assert "kwargs['scale']['by']: 48 B" in str(made.traffic(X, scale=scale))


def test_other_keyword_arguments_than_planned_are_refused():
    made = plan(functools.partial(_powers, power=2), X, scale={"by": 2.0}, shift=None)
    for given in ({}, {"scal": 1}, {"scale": {"by": 1.0}}):
        with pytest.raises(ValueError, match=r"of the structure .*'scale': \{'by': \*"):
            made.run(X, **given)
    with pytest.raises(ValueError, match="arguments of the structure"):
        made.run(scale={"by": 2.0}, shift=None)


def test_arguments_that_are_no_arrays_are_refused():
    with pytest.raises(TypeError, match=r"in args\[0\]; bind .*functools.partial"):
        plan(lambda x: x, "x")


def test_names_of_options_are_refused():
    with pytest.raises(TypeError, match=r"'out' .*partial\(fun, out=\.\.\.\)"):
        plan(lambda x, out: x, X, out=1)
    methods = (ShardPlan.run, ShardPlan.traffic, Shard.args)
    options = {
        name
        for method in methods
        for name, each in inspect.signature(method).parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    assert options - {"self"} == OPTIONS


def test_a_value_that_python_needs_is_named_as_the_function_calls_it():
    def picks(x, y, *, z):
        return x if z["at"].sum() > 0 else y

    with pytest.raises(
        jax.errors.TracerBoolConversionError,
        match=r"the function picks at \S*test_arguments.py:\d+ for plan. .* on the "
        r"value of the argument z\['at'\]",
    ):
        plan(picks, X, X, z={"at": X})
