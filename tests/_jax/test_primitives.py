"""The primitives that have no public name are those that JAX binds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util

from shardmap._jax import primitives
from shardmap._jax.walk import as_open_jaxpr, equations

X = np.ones((2, 2), np.float32)


def test_a_primitive_that_is_not_there_is_missed_loudly():
    with pytest.raises(ImportError, match=r"primitive sine, .* gives \['sin'\]"):
        primitives.primitive_of("sine", jnp.sin, 1.0)
    with pytest.raises(ImportError, match=r"primitive no_such, .* 0 primitives of"):
        primitives._registered("no_such")


def test_pmap_is_told_from_shard_map():
    def mapped(map_):
        return primitives.equation_of("shard_map", map_, np.zeros(8, np.float32))

    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    by_hand = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert primitives.is_pmap(mapped(jax.pmap(jnp.sin, axis_name="i")))
    assert not primitives.is_pmap(mapped(by_hand))


def test_the_function_of_a_callback_is_told():
    def called(x):
        return jax.pure_callback(np.sin, X, x)

    [equation] = jax.make_jaxpr(called)(X).eqns
    assert primitives.callback_of(equation.params) is np.sin


def test_what_is_inside_of_jitted_functions_is_found_without_jit_too():
    with jax.disable_jit():
        found = primitives.equation_of("sin", jax.jit(lambda x: jnp.sin(x)), 1.0)
    assert found.primitive is jax.extend.core.primitives.sin_p


@pytest.mark.parametrize(("consts", "carries"), [(0, 1), (1, 2), (2, 0)])
def test_the_operands_of_a_scan_are_counted(consts, carries):
    held = [jnp.full(3, k, jnp.float32) for k in range(consts)]

    def run(xs, *held):
        def step(carry, x):
            used = sum((h.sum() for h in held), x)
            return tuple(c + used for c in carry), used

        return lax.scan(step, (np.float32(0),) * carries, xs)

    equation = primitives.equation_of("scan", run, np.ones(4, np.float32), *held)
    assert primitives.scan_counts(equation.params) == (consts, carries)


@pytest.mark.parametrize(
    ("other", "want"), [("tpu", "cos"), ("cpu", "sin"), (None, None)]
)
def test_the_branch_of_this_platform_is_found(other, want):
    def use(x):
        if other is None:
            return lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return lax.platform_dependent(x, default=jnp.cos, **{other: jnp.sin})

    equation = primitives.equation_of("cond", use, np.float32(2))
    branch = primitives.branch_of_platform(equation.params)
    found = None if branch is None else [e.primitive.name for e in equations(branch)]
    assert found == (want and [want])


def test_the_operands_of_a_linear_solve_are_told():
    def use(x, y):
        return lax.custom_linear_solve(
            lambda v: v * x, x + y, lambda _, b: b / x, lambda _, b: b / x
        )

    equation = primitives.equation_of(
        "custom_linear_solve", use, np.float32(2), np.float32(3)
    )
    jaxpr, operands = primitives.linear_solve(equation.params, len(equation.invars))
    assert len(as_open_jaxpr(jaxpr).invars) == len(operands) >= 2


def test_the_parameters_of_checkpoint_are_all_that_it_takes():
    params = {**primitives.remat_params()}
    jaxpr = jax.make_jaxpr(lambda x: jnp.cos(x))(1.0).jaxpr
    params["jaxpr"] = jaxpr
    remat = jax.extend.core.primitives.remat_p
    [result] = jax.jit(lambda x: remat.bind(x, **params))(0.0)
    assert result == 1


def test_what_is_written_in_terms_of_others_is_expanded():
    x = np.arange(3, dtype=np.float32)
    jaxpr = jax.make_jaxpr(jnp.searchsorted)(x, x).jaxpr
    found = [e for e in equations(jaxpr) if primitives.expansion(e.params)]
    expected = [] if primitives.EXPANDABLE is None else [primitives.EXPANDABLE]
    assert [e.primitive for e in found] == expected
    for equation in found:
        result = primitives.expansion(equation.params)(x, x)
        np.testing.assert_array_equal(jax.tree.leaves(result)[0], [0, 1, 2])


def test_an_equation_tells_the_transformations_around_it():
    def fun(x):
        return jax.vmap(jax.grad(lambda x: jnp.sin(2 * x)))(x).sum()

    jaxpr = jax.make_jaxpr(fun)(X[0]).jaxpr
    told = {
        (e.primitive.name, primitives.vmaps_around(e), primitives.is_transposed(e))
        for e in equations(jaxpr)
    }
    assert {("cos", 1, False), ("mul", 1, True), ("reduce_sum", 0, False)} <= told


def test_an_equation_tells_the_line_that_made_it():
    def fun(x):
        return lax.sin(x)

    equation = primitives.equation_of("sin", fun, 1.0)
    line = fun.__code__.co_firstlineno + 1
    assert (__file__, line) in [frame[:2] for frame in primitives.frames_of(equation)]
    unknown = equation.replace(source_info=source_info_util.new_source_info())
    assert [*primitives.frames_of(unknown)] == []
