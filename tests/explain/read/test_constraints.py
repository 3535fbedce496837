"""The layouts that a program asks for, with the lines near by."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explain.read import visitor as reading
from shardmap.explain.read.visitor import facts_of
from tests.shared_jaxprs import at_most, nested

MESH = sm.make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
X = jnp.ones((16, 8))


def asked(fun, *args):
    return facts_of(jax.make_jaxpr(fun)(*args).jaxpr, "around").constraints


def constrained(x, *names):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*names)))


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        ((), (16, 8)),
        (("data",), (4, 8)),
        ((None, "model"), (16, 4)),
        ((("data", "model"),), (2, 8)),
        (("model", P.UNCONSTRAINED), (8, 8)),
    ],
)
def test_the_shape_is_that_on_a_device(names, shape):
    [each] = asked(lambda x: constrained(x, *names), X)
    assert each.shape == shape


def test_the_lines_are_those_of_what_makes_it_and_what_takes_it():
    def fun(x):
        y = x * 2
        y = lax.with_sharding_constraint(y, NamedSharding(MESH, P()))
        return y + 1

    [each] = asked(fun, X)
    first = fun.__code__.co_firstlineno
    numbers = {int(line.split(" ")[0].rpartition(":")[2]) for line in each.lines}
    assert numbers == {first + 1, first + 2, first + 3}
    assert f":{first + 2} (" in each.source


def test_of_two_that_ask_one_after_the_other_both_are_for_what_takes_the_last():
    """XLA of JAX 0.12 says of what it sends for the first that it is for that."""

    def fun(x):
        y = lax.with_sharding_constraint(x, NamedSharding(MESH, P("data")))
        y = lax.with_sharding_constraint(y, NamedSharding(MESH, P()))
        return y @ y.T

    first = fun.__code__.co_firstlineno
    for each in asked(fun, X):
        assert any(f":{first + 3} (" in line for line in each.lines)
    x = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(MESH, P(("data", "model")))
    )
    found = sm.explain(fun)(x).collectives
    numbers = [each.source.split(" ")[0].rpartition(":")[2] for each in found]
    assert numbers == [str(first + 1), str(first + 2)]


def test_what_comes_from_outside_is_made_at_the_line_around():
    [each] = asked(lambda x: constrained(x), X)
    assert "around" in each.lines

    def step(carry, row):
        return carry + constrained(row).sum(), None

    def fun(x):
        return lax.scan(step, 0.0, x)

    [each] = asked(fun, X)
    assert any(f":{fun.__code__.co_firstlineno + 1} (" in line for line in each.lines)


def test_inside_of_a_shard_map():
    def fun(x):
        return jax.shard_map(
            lambda x: lax.with_sharding_constraint(x, P(None, "model")),
            mesh=MESH,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )(x)

    [each] = asked(fun, X)
    assert each.shape == (4, 4)


def test_an_explicit_mesh_is_asked_by_reshard():
    with jax.set_mesh(EXPLICIT):
        fun = jax.jit(lambda x: jax.sharding.reshard(x * 2, P("data")) + 1)
        [each] = asked(fun, X)
    assert each.shape == (4, 8)


def test_what_only_notes_a_sharding_does_not_ask():
    """Such as conversions, with one of another rank perhaps."""
    piecewise = sm.chunked(lambda x: jnp.tanh(x @ x.T).sum(), {0: 4})
    assert asked(jax.hessian(piecewise), X) == ()


def test_what_is_shared_is_read_once_for_each_line_around(monkeypatch):
    monkeypatch.setattr(reading, "source_of", at_most(200, reading.source_of))
    found = facts_of(nested(30, lambda x: constrained(x, "data"), X)).constraints
    assert {each.shape for each in found} == {(4, 8)}
