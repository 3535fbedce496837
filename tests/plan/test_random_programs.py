"""Whole programs under any cuts: the same result as the function itself."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import shardmap as sm
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_programs import conv, max_pool, reals
from tests.plan.plan_random import random_program
from tests.strategies import examples

MOST_SHARDS = 300


@examples(4)
@given(st.integers(0, 10**6))
def test_random_compositions(seed):
    fun, args, in_slices = random_program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = jax.jit(fun)(*args)
        shard_plan = plan(fun, *args, in_slices=in_slices)
        if shard_plan.num_shards <= MOST_SHARDS:
            assert_same(shard_plan.run(*args), want, tolerance=2e-3)


@examples(4)
@given(st.integers(0, 10**6), st.sampled_from(["call", "grad", "vmap"]))
def test_random_compositions_in_pieces(seed, how):
    fun, args, in_slices = random_program(seed)

    def total(*args):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if plan(fun, *args, in_slices=in_slices).num_shards > MOST_SHARDS:
            return
        change = {
            "call": jax.jit,
            "grad": lambda f: jax.jit(jax.grad(f)),
            "vmap": lambda f: jax.jit(jax.vmap(f, (0, *[None] * (len(args) - 1)))),
        }[how]
        inner = total if how == "grad" else fun
        if how == "vmap":
            args = (jnp.stack([args[0], args[0] / 2]), *args[1:])
        result = change(sm.chunked(inner, in_slices))(*args)
        assert_same(result, change(inner)(*args), tolerance=2e-3)


def block(params, x):
    """A small transformer block with causal attention."""

    def normalised(x):
        variance = x.var(-1, keepdims=True)
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(variance + 1e-5)

    batch, time, width = x.shape
    heads = 2
    h = normalised(x)
    query, key, value = (
        (h @ params[name])
        .reshape(batch, time, heads, width // heads)
        .transpose(0, 2, 1, 3)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bhtd,bhsd->bhts", query, key) / np.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores, -1), value)
    x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, time, width) @ params["out"]
    return x + jax.nn.gelu(normalised(x) @ params["up"]) @ params["down"]


WIDTH = 8
BLOCK = {
    **{
        name: reals(WIDTH, WIDTH, seed=k) * 0.3
        for k, name in enumerate(["query", "key", "value", "out"])
    },
    "up": reals(WIDTH, 16) * 0.3,
    "down": reals(16, WIDTH) * 0.3,
}
TOKENS = reals(4, 6, WIDTH)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cut", "fewest", "stages"), [({0: 4}, 4, 1), ({1: 3}, 3, None), ({2: 2}, 2, None)]
)
def test_a_transformer_block(cut, fewest, stages):
    shard_plan = plan(block, BLOCK, TOKENS, in_slices=(None, cut))
    assert_same(shard_plan.run(BLOCK, TOKENS), jax.jit(block)(BLOCK, TOKENS), 2e-4)
    assert shard_plan.num_shards >= fewest
    assert stages is None or len(shard_plan.stages) == stages


@pytest.mark.deep
def test_the_gradient_of_a_transformer_block():
    def loss(params, x):
        return (block(params, x) ** 2).mean()

    fun = jax.value_and_grad(loss)
    shard_plan = plan(fun, BLOCK, TOKENS, in_slices=(None, {0: 4}))
    assert_same(shard_plan.run(BLOCK, TOKENS), jax.jit(fun)(BLOCK, TOKENS), 2e-4)
    assert shard_plan.num_shards == 4
    assert len(shard_plan.stages) == 1
    assert set(jax.tree.leaves(shard_plan.shards[0].combiner)) == {"add"}


NET = {
    "first": reals(3, 3, 3, 4) * 0.3,
    "bias": reals(4),
    "second": reals(3, 3, 4, 6) * 0.3,
    "last": reals(6, 5),
}
IMAGES, LABELS = reals(4, 8, 8, 3), np.eye(5, dtype=np.float32)[:4]


def net(params, images):
    h = jax.nn.relu(conv(images, params["first"]) + params["bias"][None, None, None])
    h = jax.nn.relu(conv(max_pool(h), params["second"]))
    return h.mean((1, 2)) @ params["last"]


def train_step(params, images, labels):
    def loss(params):
        return -(jax.nn.log_softmax(net(params, images)) * labels).sum()

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", [{0: 4}, {1: 2}])
def test_a_training_step(cut):
    args = (NET, IMAGES, LABELS)
    shard_plan = plan(train_step, *args, in_slices=(None, cut, {0: 4}))
    assert_same(shard_plan.run(*args), jax.jit(train_step)(*args), 2e-4)
    assert shard_plan.num_shards > 1
