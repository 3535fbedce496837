"""How much of a collective goes between devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.map.collectives.test_rules import array, both
from tests.map_programs import collectives_of


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("psum", {"all-reduce": 1}),
        ("pmax", {"all-reduce": 1}),
        ("all_gather", {"all-gather": 1}),
        ("ppermute by 1", {"collective-permute": 1}),
        ("all_to_all", {"all-to-all": 1}),
        ("psum_scatter", {"reduce-scatter": 1}),
        ("axis_index", {}),
    ],
)
def test_one_collective_between_devices(name, expected):
    mapped, _ = both(name, 32)
    assert collectives_of(mapped, array(32, 3)) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("psum", {"all-reduce": 1}), ("axis_index", {})]
)
def test_the_partitioner_puts_collectives_in(name, expected):
    mapped, _ = both(name, 32, lowering="spmd")
    assert collectives_of(mapped, array(32, 3)) == expected
    assert mapped(array(32, 3)).sharding.spec[0] == "i"


def test_a_shift_sends_one_element_of_each_block():
    mapped, _ = both("ppermute by 1", 32)
    text = mapped.lower(array(32, 3)).compile().as_text()
    (sent,) = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", text)
    assert sent == "1,3"


@pytest.mark.parametrize("size", [4, 5])
def test_a_branch_has_only_its_own_collectives(size):
    def double(row):
        return sm.spmap(lambda y: 2 * y, "j")(row)

    def fun(row):
        def turned(row):
            return jnp.roll(double(row), 1)

        return jax.lax.cond(row.sum() > 0, turned, jnp.sin, double(row))

    x = np.outer([1, -1, 1], np.arange(1, size + 1)).astype(np.float32)
    mapped = sm.spmap(fun, "i")
    # On CPU all devices have to take part in one, also those in another branch.
    assert "collective-permute" not in collectives_of(mapped, x)
    turned, sine = np.roll(4 * x[0], 1), np.sin(2 * x[1])
    expected = np.stack([turned, sine, turned])
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-6)


def shared_count(row, steps):
    return jax.lax.fori_loop(0, steps, lambda _, row: inner_sine(row), row)


def shared_predicate(row, steps):
    """A branch on a sum over the axis, in a scan."""

    def step(row, _):
        is_small = jax.lax.psum(row.sum(), "i") < 100 * steps
        return jax.lax.cond(is_small, inner_sine, jnp.cos, row), None

    return jax.lax.scan(step, row, None, length=2)[0]


def inner_sine(row):
    return sm.spmap(jnp.sin, "j")(row)


def test_beside_a_branch_something_may_refuse_vmap():
    @jax.custom_batching.custom_vmap
    def alone(row):
        return row + 1

    @alone.def_vmap
    def refused(axis_size, in_batched, row):
        raise ValueError("not vectorised")

    def fun(x):
        return jax.lax.cond(x > 0, jnp.sin, jnp.cos, x) + alone(x)

    x = np.arange(8, dtype=np.float32) - 3
    want = np.where(x > 0, np.sin(x), np.cos(x)) + x + 1
    np.testing.assert_allclose(sm.spmap(fun)(x), want, rtol=1e-6)


@pytest.mark.parametrize("fun", [shared_count, shared_predicate])
def test_a_branch_that_all_elements_take_gathers_nothing(fun):
    x = array(2, 4)
    mapped = jax.jit(sm.spmap(fun, "i", in_axes=(0, None)))
    assert "all-gather" not in collectives_of(mapped, x, 2)
    np.testing.assert_allclose(mapped(x, 2), np.sin(np.sin(x)), rtol=1e-6)
