"""What JAX's type checker says about our equations, and about those we change."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr

import shardmap as sm
from shardmap._jax.context import bound_axes
from shardmap.map.lowering.steps import Scope, prepare
from shardmap.map.primitives.axis import AxisLayout

X = np.arange(8, dtype=np.float32)
AXIS = AxisLayout("i", 8)


@pytest.fixture(autouse=True)
def _checked():
    with jax.enable_checks(True):
        yield


def center(v):
    return v - lax.pmean(v, "i")


@jax.custom_jvp
def with_jvp(v):
    return v * lax.psum(v, "i")


@with_jvp.defjvp
def _with_jvp(primals, tangents):
    (v,), (t,) = primals, tangents
    return with_jvp(v), t * lax.psum(v, "i") + v * lax.psum(t, "i")


@jax.custom_vjp
def with_vjp(v):
    return v * lax.psum(v, "i")


with_vjp.defvjp(
    lambda v: (with_vjp(v), v),
    lambda v, ct: (ct * lax.psum(v, "i") + lax.psum(ct * v, "i"),),
)


# Planted faults


def traced(fun, *args):
    """A jaxpr of one equation, and the equation."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    (equation,) = jaxpr.eqns
    return jaxpr, equation


def with_params(**changed):
    def change(equation):
        params = {
            name: value(equation.params[name]) if callable(value) else value
            for name, value in changed.items()
        }
        return equation.replace(params=equation.params | params)

    return change


def with_other_result(equation):
    """With a result of another shape."""
    aval = jax.typeof(X[:3])
    return equation.replace(outvars=[type(v)(aval) for v in equation.outvars])


BODY = jax.make_jaxpr(center, axis_env=[("i", 8)])(np.float32(0)).jaxpr
OTHER_BODY = jax.make_jaxpr(center, axis_env=[("i", 8)])(X).jaxpr
EFFECT_OF_J = jax.make_jaxpr(lambda v: lax.psum(v, "j"), axis_env=[("j", 2)])(X).effects


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_params(axis_size=9), "does not have 9 elements"),
        (with_params(in_axes=(1,)), "mapped at 1 does not have 8 elements"),
        (with_params(in_axes=(None,)), r"gives float32\[8\], but call_jaxpr takes"),
        (with_params(in_axes=(0, 0)), "has 1 operands, but there are 2 axes"),
        (with_params(out_axes=()), "has 1 results, but there are 0 axes"),
        (with_params(out_axes=(None,)), "inconsistently typed as f32"),
        (with_params(call_jaxpr=OTHER_BODY), r"but call_jaxpr takes float32\[8\]"),
        (
            with_params(call_jaxpr=lambda body: body.replace(eqns=body.eqns[:-1])),
            "not defined",
        ),
        (
            with_params(
                call_jaxpr=lambda body: body.replace(
                    eqns=[*body.eqns[:-1], with_other_result(body.eqns[-1])]
                )
            ),
            "inconsistently typed",
        ),
        (with_params(mesh_jaxpr=BODY.replace(eqns=[])), "not defined"),
        (
            lambda e: e.replace(outvars=[type(e.outvars[0])(jax.typeof(X[:3]))]),
            "binder",
        ),
        (lambda e: e.replace(effects=EFFECT_OF_J), "Inferred effects do not match"),
    ],
)
def test_an_ill_typed_map_is_refused(change, said):
    jaxpr, equation = traced(sm.spmap(center, "i"), X)
    check_jaxpr(jaxpr)
    changed = change(equation)
    planted = jaxpr.replace(eqns=[changed], outvars=changed.outvars)
    with pytest.raises(TypeError, match=said):
        check_jaxpr(planted)


@pytest.mark.parametrize(
    ("fun", "change", "said"),
    [
        (lambda x: sm.tap(print, x), lambda e: e.replace(effects=set()), "not match"),
        (
            lambda x: sm.with_sharding_constraint(x, (2,)),
            with_other_result,
            "inconsistently typed",
        ),
        (
            lambda x: sm.with_sharding_constraint(x, (2,)),
            with_params(mesh_jaxpr=BODY.replace(eqns=[])),
            "not defined",
        ),
    ],
)
def test_an_ill_typed_tap_or_constraint_is_refused(fun, change, said):
    jaxpr, equation = traced(fun, X)
    check_jaxpr(jaxpr)
    changed = change(equation)
    with pytest.raises(TypeError, match=said):
        check_jaxpr(jaxpr.replace(eqns=[changed]))


def test_an_axis_that_no_map_binds_is_refused():
    jaxpr, equation = traced(sm.spmap(center, "i"), X)
    renamed = equation.replace(params=equation.params | {"axis_name": "j"})
    with pytest.raises(NameError, match="unbound axis name: i"):
        check_jaxpr(jaxpr.replace(eqns=[renamed]))


def test_any_map_primitive_is_checked():
    primitive = sm.MapPrimitive("of_one_s_own")
    jaxpr, equation = traced(sm.spmap(center, "i"), X)
    own = equation.replace(primitive=primitive)
    check_jaxpr(jaxpr.replace(eqns=[own]))
    own = own.replace(params=own.params | {"axis_size": 9})
    with pytest.raises(TypeError, match="does not have 9 elements"):
        check_jaxpr(jaxpr.replace(eqns=[own]))


# What stands in for equations while a block is traced


def in_scan(fun):
    return lambda v: lax.scan(lambda c, _: (fun(c), None), v, None, length=2)[0]


def spoiled(jaxpr):
    """With a first equation whose result has another shape, or whose effect is gone."""
    first, *rest = jaxpr.eqns
    outvars = [type(v)(jax.typeof(X[:5])) for v in first.outvars]
    return jaxpr.replace(eqns=[first.replace(outvars=outvars, effects=set()), *rest])


def numbered(v):
    return lax.axis_index("i") + v.astype(np.int32)


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize(
    "fun",
    [
        lambda v: lax.psum(v, "i"),
        lambda v: lax.pmax(v, ("k", "i")),
        lambda v: numbered(v).astype(v.dtype),
        lambda v: sm.tap(lambda _: None, v),
    ],
    ids=["psum", "pmax", "axis_index", "tap"],
)
def test_what_stands_in_for_equations_is_checked(fun, scans):
    v = np.zeros(8, np.float32)
    axes = [("i", 8), ("k", 4)]
    traced = jax.make_jaxpr(in_scan(fun) if scans else fun, axis_env=axes)(v)
    jaxpr = prepare(traced.jaxpr, Scope.of_map(AXIS))
    with bound_axes({"k": 4}):
        check_jaxpr(jaxpr)
        if scans:  # JAX does not look into them.
            jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
            check_jaxpr(jaxpr)
        with pytest.raises(TypeError, match=r"inconsistently typed|do not match"):
            check_jaxpr(spoiled(jaxpr))


def test_renaming_an_axis_renames_its_effects():
    jaxpr = jax.make_jaxpr(in_scan(center), axis_env=[("i", 8)])(X).jaxpr

    on_mesh = AxisLayout("i", 8, ("k",), 8)
    renamed = prepare(jaxpr, Scope.of_map(on_mesh, is_element=True))
    with bound_axes({"k": 8}):
        check_jaxpr(renamed)
    assert {effect.name for effect in renamed.effects} == {"k"}
