"""Where `jax.vmap` of a map puts the batch, and which names it binds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map_programs import (
    assert_same,
    both_lowerings,
    float_index,
    mixed,
    same_under_vmap,
    spread,
)
from tests.reference import loop_map

X = spread((4, 3))


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@both_lowerings
@pytest.mark.parametrize("in_axis", [0, 2, -2])
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_axes_against_a_loop(spmap, in_axis, out_axis):
    x = spread((4, 4, 4))
    mapped = spmap(mixed, in_axes=(in_axis, None), out_axes=out_axis)
    expected = loop_map(mixed, 4, (in_axis, None), out_axis)(x, X[0, 0])
    assert_same(mapped(x, X[0, 0]), jnp.asarray(expected))


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("batch_axis", [0, 1, 2])
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_where_a_batch_lies(in_axis, batch_axis, out_axis):
    x = spread((2, 2, 2, 2)) + np.arange(2)

    def build(map_):
        mapped = map_(
            lambda x: (x * (1 + float_index("i")), lax.psum(x, "i")),
            axis_name="i",
            in_axes=in_axis,
            out_axes=(out_axis, None),
        )
        return jax.vmap(mapped, in_axes=batch_axis, out_axes=(out_axis, batch_axis))

    same_under_vmap(build, x, compiled=False)


def test_unmapped_results_of_unmapped_operands_stay_unbatched():
    def build(map_):
        mapped = map_(
            lambda x, w: (lax.psum(x, "i"), w * 2),
            axis_name="i",
            in_axes=(0, None),
            out_axes=None,
        )
        return jax.vmap(mapped, in_axes=(1, None), out_axes=(0, None))

    same_under_vmap(build, X, spread((2,)))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_carry_that_all_elements_share_after_a_step_stays_batched(steps):
    def build(map_):
        def shared(y):
            carry = lax.scan(lambda c, _: (lax.psum(c, "i"), None), y, length=steps)
            return carry[0]

        return map_(lambda x: map_(shared, axis_name="j")(x), axis_name="i")

    same_under_vmap(build, X)


def test_the_maps_name_hides_a_vmapped_one():
    def build(map_):
        mapped = map_(lambda x: lax.psum(jnp.sin(x), "i") * x, axis_name="i")
        return jax.vmap(mapped, in_axes=1, axis_name="i")

    same_under_vmap(build, X)


def test_an_unbatched_operand_meets_a_vmapped_name():
    def build(map_):
        mapped = map_(lambda x: x * float_index("v"), axis_name="i")
        return jax.vmap(mapped, in_axes=None, axis_name="v", axis_size=3)

    same_under_vmap(build, X)


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@both_lowerings
@pytest.mark.parametrize("batch_axis", [0, 1, 2, 3])
@pytest.mark.parametrize("scattered", [0, 1])
def test_psum_scatter_with_the_batch_anywhere(spmap, scattered, batch_axis):
    # JAX's own rule is wrong where the batch lies behind the scattered dimension.
    mapped = spmap(lambda x: lax.psum_scatter(x, "i", scatter_dimension=scattered), "i")
    x = spread((2, 2, 2)) + np.arange(2)
    batch = np.stack([x, -x, 2 * x], batch_axis)
    expected = jnp.stack([mapped(x), mapped(-x), mapped(2 * x)])
    assert_same(jax.vmap(mapped, in_axes=batch_axis)(batch), expected)


def test_spmd_axis_name_is_refused():
    mapped = sm.spmap(jnp.sin, mesh=sm.make_mesh({"a": 2, "b": 4}), mesh_axes="b")
    batched = jax.vmap(mapped, spmd_axis_name="a")
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(
            ValueError,
            match=r"spmd_axis_name=\('a',\) is not supported\. Map that dimension by "
            r"an outer spmap with mesh= and mesh_axes=\('a',\)",
        ):
            wrap(batched)(spread((2, 4)))
