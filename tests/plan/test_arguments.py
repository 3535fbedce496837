"""Arguments by name, and those that are no arrays."""

import functools
import inspect

import jax
import numpy as np
import pytest

from shardmap.plan.arguments import OPTIONS
from shardmap.plan.plan import ShardPlan, plan
from shardmap.plan.run.shards import Shard
from tests.plan.plan_programs import X


def _powers(x, power, *, scale, shift=None):
    y = x if power == 1 else x * x
    return y * scale["by"] + (0 if shift is None else shift)


def test_static_and_keyword_arguments_may_be_bound_before():
    bound = functools.partial(_powers, power=2, scale={"by": np.float32(3)})
    made = plan(bound, X, in_slices={0: 2})
    np.testing.assert_allclose(made.run(X), X * X * 3, rtol=1e-6)


def test_keyword_arguments_are_whole_and_static_ones_no_arrays():
    scale = {"by": np.arange(6, dtype=np.float32)[None]}
    made = plan(_powers, X, 2, scale=scale, in_slices=({0: 2}, None), static_argnums=1)
    assert made.num_shards == 2
    np.testing.assert_allclose(made.run(X, 2, scale=scale), X * X * np.arange(6))
    assert "kwargs['scale']['by']: float32[1, 6]" in str(made.explain())
    out = None
    for shard in made.shards:
        out = shard.reduce(shard.function(*shard.args(X, 2, scale=scale)), out)
    np.testing.assert_allclose(out, X * X * np.arange(6))
    assert "kwargs['scale']['by']: 48 B" in str(made.traffic(X, 2, scale=scale))
    assert str(made.traffic()) == str(made.traffic(X, 2, scale=scale))
    named = plan(
        _powers,
        X,
        power=2,
        scale={"by": 2.0},
        shift=None,
        in_slices={0: 2},
        static_argnames="power",
    )
    got = named.run(X, power=2, scale={"by": 3.0}, shift=None)
    np.testing.assert_allclose(got, X * X * 3, rtol=1e-6)


def test_other_keyword_arguments_than_planned_are_refused():
    made = plan(_powers, X, power=2, scale={"by": 2.0}, static_argnames=["power"])
    with pytest.raises(TypeError, match=r"\['power', 'scale'\], got no keyword"):
        made.run(X)
    with pytest.raises(TypeError, match=r"got the keyword arguments \['scal'\]"):
        made.run(X, scal=1)
    with pytest.raises(ValueError, match=r"kwargs\['power'\] = 2, got 1: make another"):
        made.run(X, power=1, scale={"by": 2.0})
    with pytest.raises(ValueError, match="arguments of the structure"):
        made.run(power=2, scale={"by": 2.0})


def test_static_arguments_are_checked():
    with pytest.raises(TypeError, match=r"got 'x' .* in args\[0\]; what is no array"):
        plan(lambda x: x, "x")
    with pytest.raises(ValueError, match="names the positional argument 3, but there"):
        plan(_powers, X, 2, scale={"by": 2.0}, static_argnums=3)
    with pytest.raises(ValueError, match="static_argnames names 'pow', which"):
        plan(_powers, X, 2, scale={"by": 2.0}, static_argnames="pow")
    with pytest.raises(TypeError, match=r"hashable, got \[\] .* in args\[1\]"):
        plan(_powers, X, [], scale={"by": 2.0}, static_argnames="power")
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
    def picks(static, x, y, *, by, z):
        return x if z["at"].sum() > 0 else y

    with pytest.raises(
        jax.errors.TracerBoolConversionError,
        match=r"the function picks at \S*test_arguments.py:\d+ for plan. .* on the "
        r"value of the argument z\['at'\]",
    ):
        plan(
            picks, 3, X, X, by="a", z={"at": X}, static_argnums=0, static_argnames="by"
        )
