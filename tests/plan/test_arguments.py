"""Arguments by name, and those that are not arrays."""

import functools
import inspect

import jax
import numpy as np
import pytest

from shardmap.planning.plan import OPTIONS, ShardPlan, plan
from shardmap.planning.run.shards import Shard
from tests.plan.plan_programs import X


def _powers(x, power, *, scale, shift=None):
    y = x if power == 1 else x * x
    return y * scale["by"] + (0 if shift is None else shift)


@pytest.mark.parametrize(
    "static", [{"static_argnums": -1}, {"static_argnames": ["power", "shift"]}]
)
def test_static_arguments_by_position(static):
    scale = {"by": np.arange(6, dtype=np.float32)[None]}
    shard_plan = plan(_powers, X, 2, scale=scale, in_slices=({0: 2}, None), **static)
    assert shard_plan.num_shards == 2
    np.testing.assert_allclose(shard_plan.run(X, 2, scale=scale), X * X * np.arange(6))
    out = None
    for shard in shard_plan.shards:
        out = shard.reduce(shard.function(*shard.args(X, 2, scale=scale)), out)
    np.testing.assert_allclose(out.result(), X * X * np.arange(6))


def test_static_arguments_by_name():
    options = {"power": 2, "shift": None}
    scale = {"by": 2.0}
    shard_plan = plan(
        _powers, X, **options, scale=scale, static_argnames="power", in_slices={}
    )
    got = shard_plan.run(X, **options, scale={"by": 3.0})
    np.testing.assert_allclose(got, X * X * 3, rtol=1e-6)
    with pytest.raises(ValueError, match=r"structure .*Static\[2\].* got .*Static\[1"):
        shard_plan.run(X, power=1, shift=None, scale={"by": 3.0})


def test_static_arguments_are_checked():
    scale = {"by": 2.0}
    with pytest.raises(ValueError, match="names the positional argument 3, but there"):
        plan(_powers, X, 2, scale=scale, static_argnums=3)
    with pytest.raises(ValueError, match="static_argnames names 'pow', no argument of"):
        plan(_powers, X, 2, scale=scale, static_argnames="pow")
    with pytest.raises(TypeError, match=r"hashable, got \(\[\],\) of type tuple"):
        plan(_powers, X, ([],), scale=scale, static_argnums=1)
    with pytest.raises(TypeError, match=r"hashable, got \[\] .* in args\[1\]"):
        plan(_powers, X, [], scale=scale, static_argnums=1)


def test_keyword_arguments_are_whole():
    scale = {"by": np.arange(6, dtype=np.float32)[None]}
    square = functools.partial(_powers, power=2)
    shard_plan = plan(square, X, scale=scale, in_slices={0: 2})
    assert shard_plan.num_shards == 2
    np.testing.assert_allclose(shard_plan.run(X, scale=scale), X * X * np.arange(6))
    assert "kwargs['scale']['by']: float32[1, 6]" in str(shard_plan.explain())
    out = None
    for shard in shard_plan.shards:
        out = shard.reduce(shard.function(*shard.args(X, scale=scale)), out)
    np.testing.assert_allclose(out.result(), X * X * np.arange(6))


def test_other_keyword_arguments_than_planned_are_refused():
    fun = functools.partial(_powers, power=2)
    shard_plan = plan(fun, X, scale={"by": 2.0}, shift=None, in_slices={})
    with pytest.raises(TypeError, match="run got scal=, which is no option of run"):
        shard_plan.run(X, scal=1)
    for given in ({}, {"scale": {"by": 1.0}}):
        with pytest.raises(ValueError, match=r"of the structure .*'scale': \{'by': \*"):
            shard_plan.run(X, **given)
    with pytest.raises(ValueError, match="arguments of the structure"):
        shard_plan.run(scale={"by": 2.0}, shift=None)


def test_names_of_options_are_refused():
    with pytest.raises(TypeError, match=r"'task' .*partial\(<lambda>, task=\.\.\.\)"):
        plan(lambda x, task: x, X, task=1)
    methods = (ShardPlan.run, Shard.args)
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
