"""Sliding windows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, times_read
from tests.plan.plan_programs import IMAGE, max_pool, reals


def test_gradients_of_pooling():

    def tangent(x):
        return jax.jvp(max_pool, (x,), (x * 0.5,))

    def gradient(x):
        return jax.grad(lambda x: (max_pool(x) ** 2).sum())(x)

    for fun in (tangent, gradient):
        shard_plan = plan(fun, IMAGE, in_slices=({0: 2, 1: 2},))
        assert_same(shard_plan.run(IMAGE), jax.jit(fun)(IMAGE))
        assert shard_plan.num_shards > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 3))])
def test_the_gradient_of_a_pooling_is_whole_along_the_axes_that_are_pooled(padding):
    # Some elements are as large as others.
    x = np.round(np.random.default_rng(5).standard_normal((4, 17, 14), np.float32) * 2)
    padding = padding if isinstance(padding, str) else ((0, 0), *padding)

    def gradient(x):
        def loss(x):
            pooled = lax.reduce_window(
                x, -np.inf, lax.max, (1, 3, 2), (1, 2, 2), padding
            )
            return (pooled**2).sum()

        return jax.grad(loss)(x)

    shard_plan = plan(gradient, x, in_slices={0: 2, 1: 3, 2: 2})
    assert_same(shard_plan.run(x), jax.jit(gradient)(x))
    assert shard_plan.num_shards > 1
    assert "cut the batch or the features instead" in str(shard_plan.explain())
    batches = plan(gradient, x, in_slices={0: 4})
    assert_same(batches.run(x), jax.jit(gradient)(x))
    assert (batches.num_shards, len(batches.stages)) == (4, 1)
    assert "stops at" not in str(batches.explain())


CONVOLVED = {
    "same": ((1, 1), "SAME", None),
    "strides": ((2, 3), "VALID", None),
    "dilated": ((1, 2), ((2, 1), (0, 3)), (2, 1)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONVOLVED)
@pytest.mark.parametrize("cut", [{2: (5, 3, 9)}, {2: 2, 3: (6, 8)}])
def test_the_gradient_of_a_kernel_is_a_sum_over_tiles(name, cut):
    strides, padding, dilation = CONVOLVED[name]
    rng = np.random.default_rng(7)
    images = rng.standard_normal((2, 3, 17, 14), np.float32)
    kernels = rng.standard_normal((4, 3, 3, 2), np.float32)

    def gradients(kernels, images):
        def loss(kernels, images):
            shard_plan = lax.conv_general_dilated(
                images, kernels, strides, padding, rhs_dilation=dilation
            )
            return (shard_plan**2).sum()

        return jax.grad(loss, (0, 1))(kernels, images)

    shard_plan = plan(gradients, kernels, images, in_slices=(None, cut))
    want = jax.jit(gradients)(kernels, images)
    assert_same(shard_plan.run(kernels, images), want, 1e-3)
    assert len(shard_plan.stages) == 1
    assert {shard.combiner[0] for shard in shard_plan.shards} >= {"add"}
    assert "stops at" not in str(shard_plan)


def test_a_kernel_that_is_larger_than_the_result_gives_parts():
    rng = np.random.default_rng(8)
    images = rng.standard_normal((2, 3, 17), np.float32)
    kernels = rng.standard_normal((4, 3, 15), np.float32)

    def fun(images, kernels):
        return lax.conv_general_dilated(images, kernels, (1,), "VALID")

    for cuts in (({2: 4}, None), (None, {2: (5, 10)}), ({2: (3, 14)}, {2: 3})):
        shard_plan = plan(fun, images, kernels, in_slices=cuts)
        assert_same(
            shard_plan.run(images, kernels), jax.jit(fun)(images, kernels), 1e-4
        )
        assert shard_plan.shards[0].combiner == "add"


LAYOUTS = [("NCH", "OIH", "NCH"), ("NHC", "HIO", "NHC"), ("CNH", "IOH", "HCN")]
LAYOUTS += [("NCHW", "OIHW", "NCHW"), ("HWCN", "OHWI", "NWHC")]


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_a_convolution_of_many_features_is_the_fast_kernel_in_a_loop(layout):
    """XLA for CPU lays out anew only what stands outside of loops."""
    sizes = {"N": 2, "C": 4, "H": 12, "W": 7}, {"O": 4, "I": 4, "H": 3, "W": 2}
    shapes = [
        [size[axis] for axis in names]
        for size, names in zip(sizes, layout, strict=False)
    ]
    images, kernels = (
        np.random.default_rng(k).normal(size=shape).astype(np.float32)
        for k, shape in enumerate(shapes)
    )

    def convolve(images, kernels):
        strides = [1] * (images.ndim - 2)
        return lax.conv_general_dilated(
            images, kernels, strides, "SAME", dimension_numbers=layout
        )

    cut = jax.jit(sm.chunked(convolve, ({layout[0].index("H"): 4}, None)))
    assert_same(cut(images, kernels), convolve(images, kernels))
    text = cut.lower(images, kernels).compile().as_text()
    found = re.findall(r" convolution\(.*dim_labels=(\w+->\w+)", text)
    spatial = "01"[: images.ndim - 2]
    assert set(found) == {f"b{spatial}f_{spatial}io->b{spatial}f"}
    assert "while(" in text


def test_images_between_two_convolutions_of_a_map_are_not_kept():
    def convolved(image, kernel):
        return lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME")[0]

    def fun(images, first, second):
        def of_one(image):
            return convolved(jax.nn.relu(convolved(image, first)), second)

        return jax.vmap(of_one)(images)

    args = reals(8, 2, 6, 6), reals(4, 2, 3, 3), reals(4, 4, 3, 3)
    shard_plan = check_cut(fun, *args, in_slices=({0: 4}, None, None), tolerance=1e-4)
    assert [stage.num_shards for stage in shard_plan.stages] == [4]


def in_groups(image, kernel):
    groups = kernel.shape[0]
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", feature_group_count=groups
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("features", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_groups_of_one_feature_are_cut_along_the_groups(features, count):
    groups = 6 // features
    image, kernel = reals(2, 6, 9, 8), reals(groups, features, 3, 3)
    cuts = {1: count}, {0: min(count, groups)}
    assert times_read(check_cut(in_groups, image, kernel, in_slices=cuts)) == 1


def test_a_filter_for_each_sample():
    """`jax.vmap` makes groups of them."""
    filtered = jax.vmap(lambda row, kernel: jnp.convolve(row, kernel, "same"))
    cuts = {0: 4}, {0: 4}
    shard_plan = check_cut(filtered, reals(8, 20), reals(8, 3), in_slices=cuts)
    assert times_read(shard_plan) == 1

    def loss(image, kernel):
        return (in_groups(image, kernel) ** 2).sum()

    cuts = {1: 3}, {0: 3}
    check_cut(jax.grad(loss), reals(2, 6, 9, 8), reals(6, 1, 3, 3), in_slices=cuts)


def test_groups_of_the_batch_are_whole():
    def fun(images, kernels):
        return lax.conv_general_dilated(
            images, kernels, (1, 1), "SAME", batch_group_count=2
        )

    images, kernels = reals(4, 3, 9, 8), reals(6, 3, 3, 3)
    check_cut(fun, images, kernels, in_slices=({2: 3}, None))
