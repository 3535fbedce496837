"""``plan(memory=)``: axes and pieces chosen by the code of `chunked`, for shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.plan.checks import assert_same


def score(x, w):
    mean = x.mean(0)
    deviation = jnp.sqrt((x * x).mean(0) - mean**2 + 1e-3)
    return jnp.tanh((x - mean[None]) / deviation[None] @ w).sum(0)


X = np.random.default_rng(0).standard_normal((1000, 16), np.float32)
W = np.ones((16, 4), np.float32)
ROWS = ({0: sm.AUTO}, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("in_slices", [None, ROWS])
def test_a_plan_is_in_as_few_pieces_as_fit(in_slices):
    shard_plan = sm.plan(score, X, W, in_slices=in_slices, memory="20 kB")
    assert 10_000 < shard_plan.peak_bytes <= 20_000
    assert_same(shard_plan.run(X, W), jax.jit(score)(X, W), tolerance=1e-4)


def test_one_shard_if_that_fits():
    shard_plan = sm.plan(score, X, W, in_slices=ROWS, memory="1 MB")
    assert shard_plan.num_shards == 1
    assert sm.plan(score, X, W, memory="1 MB").num_shards == 1


def test_arguments_count_as_shards_read_them():
    x = jax.ShapeDtypeStruct((10**9, 64), np.float32)
    shard_plan = sm.plan(lambda x: x.max(), x, memory="1 GB")
    assert shard_plan.peak_bytes <= 10**9
    assert shard_plan.num_shards > 256


def test_a_cut_that_is_given_stays():
    wide = np.ones((16, 512), np.float32)
    cuts = ({0: 4}, {1: sm.AUTO})
    shard_plan = sm.plan(score, X, wide, in_slices=cuts, memory="40 kB")
    assert len(shard_plan.out_slices[0]) > 1
    assert shard_plan.stage_shards(0)[0].in_slices[0] == (slice(0, 250), slice(0, 16))


def test_too_little_memory_names_what_needs_it():
    with pytest.raises(
        ValueError,
        match=r"memory=100 B is too little: in 1,000 pieces the function still holds "
        r".* at once, of it 256 B in float32\[16,4\]\. "
        "Pass memory=740 or more, or cut other axes",
    ):
        sm.plan(score, X, W, in_slices=ROWS, memory=100)


def standard(x):
    y = jnp.sort(x, 1)
    return y - y.max(0)[None]


def test_given_cuts_hold_the_memory_or_are_refused():
    kept = sm.plan(standard, X, in_slices={0: 8}).peak_bytes
    fits = sm.plan(standard, X, in_slices={0: 8}, memory=kept - 1)
    assert fits.peak_bytes < kept
    assert_same(fits.run(X), jax.jit(standard)(X))
    with pytest.raises(
        ValueError,
        match=r"memory=9.8 KiB is too little: in the pieces that in_slices gives .* "
        "more pieces, or use AUTO",
    ):
        sm.plan(standard, X, in_slices={0: 8}, memory="10 kB")


def test_a_plan_of_64_bits_is_run_with_64_bits():
    x = np.ones((8, 4))
    with jax.enable_x64(True):
        shard_plan = sm.plan(jnp.sin, x, in_slices={0: 2})
        assert_same(shard_plan.run(x), np.sin(x), 1e-12)
        few = sm.plan(lambda x: jnp.argmax(x[:, 0]), X, in_slices={0: 2})
    # With arguments of 32 bits, whatever is set now.
    assert_same(few.run(X), np.argmax(X[:, 0]))
    message = (
        r"the plan was made for float64 in args\[0\], got float64; it was made with "
        "jax_enable_x64=True: set this for the run too"
    )
    with pytest.raises(ValueError, match=message):
        shard_plan.run(x)


def test_what_is_only_read_has_no_place():
    what = (
        r"in 16,000 pieces the function still holds 8 B at once, of it 4 B in float32"
    )
    with pytest.raises(ValueError, match=what + r"\[1,1\]\."):
        sm.plan(jnp.sin, X, memory=1)
    # XLA returns the argument.
    assert_same(sm.chunked(lambda x: x, {0: 4}, memory=1)(X), X)


def test_what_no_shard_can_do_is_refused_as_without_memory():
    def noisy(x):
        jax.debug.print("{}", x[0])
        return x

    with pytest.raises(ValueError, match="plan cannot cut this function: "):
        sm.plan(noisy, X, memory="1 kB")


def test_no_more_pieces_than_it_takes():
    shard_plan = sm.plan(jnp.cos, X, in_slices={0: sm.AUTO}, memory="10 kB")
    assert shard_plan.num_shards == 13  # Of 77 rows, which take 64 bytes twice.
    assert shard_plan.peak_bytes <= 10_000 < 2 * 64 * -(-1000 // 12)


@pytest.mark.deep
def test_more_pieces_may_not_help():
    """The argument is kept whole for the quantiles of its columns."""

    def quantiles(x):
        return jnp.quantile(x, jnp.array([0.2, 0.8]), axis=0)

    def shard_plan(memory):
        return sm.plan(quantiles, X, in_slices={0: sm.AUTO}, memory=memory)

    least = sm.plan(quantiles, X, in_slices={0: 256}).peak_bytes
    with pytest.raises(ValueError, match="the function still holds 70") as refused:
        shard_plan(least - 500)
    [told] = re.findall(r"([\d,]+) bytes", str(refused.value))
    enough = int(told.replace(",", ""))
    assert shard_plan(enough).peak_bytes <= enough


def test_long_programs_are_measured_too():
    def deep(x):
        for _ in range(100):
            x = jnp.sin(x) * 0.5 + x
        return x.sum(0)

    x = jax.ShapeDtypeStruct((1000, 16), np.float32)
    shard_plan = sm.plan(deep, x, in_slices={0: 10})
    assert shard_plan.peak_bytes >= 100 * 16 * 4
    assert "temporaries in a shard" in str(shard_plan.explain())
    fits = sm.plan(deep, x, in_slices={0: sm.AUTO}, memory="100 kB")
    assert fits.peak_bytes <= 100_000
