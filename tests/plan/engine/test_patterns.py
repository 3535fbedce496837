"""Shards that are alike are walked once, and the walk of each gives the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import shardmap as sm
from shardmap.planning.engine import stages
from shardmap.planning.engine.factors import Factors
from shardmap.planning.in_slices import EACH
from shardmap.planning.plan import plan
from tests.plan.plan_random import random_program
from tests.strategies import examples


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def deep(x):
    for _ in range(100):
        x = jnp.sin(x) * 0.5 + x
    return x


def smoothed(x):
    for _ in range(5):
        x = (jnp.roll(x, 1, 0) + x + jnp.roll(x, -1, 0)) / 3
    return x


def convolved(x, k):
    return lax.conv_general_dilated(x, k, (2, 2), "SAME")


def walked(stage, number):
    """The recipe of a shard, without what is known of others."""
    with pytest.MonkeyPatch.context() as patch:
        new = stages.Patterns(stage._walk)
        patch.setattr(stage, "patterns", new)
        return stage.recipe(number)


# Function, arguments, cuts, and how many walks all shards take.
PROGRAMS = {
    "pointwise": (deep, [floats(4096, 2)], ({0: 256},), 1),
    "halos": (smoothed, [floats(4096, 2)], ({0: 256},), 3),
    "halos on two axes": (
        convolved,
        [floats(1, 2, 128, 128), floats(2, 2, 3, 3)],
        ({2: 16, 3: 16}, None),
        4,
    ),
    "three lengths": (lambda x: x[1:] - x[:-1], [floats(1003, 2)], ({0: 10},), 3),
    "sum": (lambda x: jnp.sin(x).sum(0), [floats(4096, 2)], ({0: 64},), 1),
    "running sum": (lambda x: jnp.cumsum(x, 0), [floats(4096, 2)], ({0: 64},), 3),
    "reshape": (
        lambda x: jnp.sin(x).reshape(-1, 16).reshape(64, -1),
        [floats(4096, 8)],
        ({0: 64},),
        1,
    ),
    "reversed and strided": (
        lambda x: jnp.pad(x[::2], ((3, 4), (0, 0)))[::-1],
        [floats(4096, 8)],
        ({0: 64},),
        3,
    ),
    "with its transpose": (
        lambda x: x + x.T,
        [floats(256, 256)],
        ({0: 16, 1: 16},),
        3,
    ),
    "scan": (
        lambda x: lax.scan(lambda c, r: (c * 0.5 + r, jnp.sin(c)), x[0], x)[1],
        [floats(8, 4096)],
        ({1: 64},),
        1,
    ),
}


@pytest.fixture
def walks(monkeypatch):
    """A list that grows by one with every walk."""
    found = []
    trace_back = stages.trace_back

    def counted(*args):
        found.append(args)
        return trace_back(*args)

    monkeypatch.setattr(stages, "trace_back", counted)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_shards_that_are_alike_are_walked_once(name, walks):
    fun, args, in_slices, most = PROGRAMS[name]
    shard_plan = plan(fun, *args, in_slices=in_slices)
    found = [[s.recipe(k) for k in range(s.num_shards)] for s in shard_plan.stages]
    assert len(walks) <= most
    for stage, row in zip(shard_plan.stages, found, strict=True):
        assert row == [walked(stage, k) for k in range(stage.num_shards)]


def test_parts_of_what_is_computed_whole_have_one_recipe():
    def fun(x, w):
        y = jnp.sort(w)
        return x - y + y[:3].sum() + y[-5]

    x = jax.ShapeDtypeStruct((240,), np.float32)
    [stage] = plan(fun, x, x, in_slices=({0: 24}, None)).stages
    recipes = {stage.recipe(number)[1].static for number in range(stage.num_shards)}
    assert len(recipes) <= 3


def test_a_second_run_walks_no_shard(walks):
    """Nor those that are like no other, such as the only shard of the last stage."""
    x = np.ones((64, 2), np.float32)
    shard_plan = plan(lambda x: x.std(0), x, in_slices={0: (20, 30, 14)})
    shard_plan.run(x)
    assert walks
    walks.clear()
    shard_plan.run(x)
    assert not walks


def test_a_chunked_function_is_walked_as_often_for_any_number_of_pieces(walks):
    counts, sizes = [], []
    for pieces in (16, 256):
        walks.clear()
        lowered = jax.jit(sm.chunked(smoothed, {0: pieces})).lower(floats(8192, 2))
        counts.append(len(walks))
        sizes.append(len(lowered.as_text()))
    assert counts[0] == counts[1] <= 6
    assert sizes[1] < 1.1 * sizes[0]


@examples(20)
@given(st.integers(0, 10**6), st.booleans())
def test_random_programs_are_walked_alike(seed, each):
    fun, args, in_slices = random_program(seed)
    for stage in plan(fun, *args, in_slices=EACH if each else in_slices).stages:
        step = max(1, stage.num_shards // 100)
        for number in range(0, stage.num_shards, step):
            assert stage.recipe(number) == walked(stage, number)
        for members in stage.members():
            number, starts = members.numbers[-1], members.starts[-1]
            assert members.pattern.at(starts) == walked(stage, number)


def test_shards_like_no_other_are_listed_without_a_look_at_all_others(monkeypatch):
    """Each reads where a sorted array of indices says."""
    where = np.sort(np.random.default_rng(0).integers(0, 5000, 1000))
    shard_plan = plan(lambda x: x[where], floats(5000, 2), out_slices={0: 500})
    compared, match = [], stages.Guards.match

    def counted(self, starts):
        compared.append(np.shape(starts)[-1])
        return match(self, starts)

    monkeypatch.setattr(stages.Guards, "match", counted)
    [stage] = shard_plan.stages
    every = list(stage.members())
    assert len(every) > 400
    assert sum(compared) <= 20 * 500


def test_a_fault_of_a_rule_for_symbolic_positions_is_told(monkeypatch):
    backward = Factors.backward

    def faulty(self, boxes, loops):
        if any(type(n) is not int for box in boxes for pair in box for n in pair):
            raise ArithmeticError("this rule needs plain integers")
        return backward(self, boxes, loops)

    monkeypatch.setattr(Factors, "backward", faulty)
    [stage] = plan(jnp.sin, floats(64, 2), in_slices={0: 8}).stages
    with pytest.raises(ArithmeticError, match="this rule needs plain integers"):
        stage.recipe(3)


def test_a_piece_beside_the_whole_is_read_apart():
    """In the whole its place would be static, and each shard would compile."""

    def attention(x):
        return jax.nn.softmax(x @ x.T) @ x

    shard_plan = plan(attention, floats(600, 8), in_slices={0: 50}, partial=False)
    assert shard_plan.num_shards == 50
    assert shard_plan.stage_costs[0].functions <= 2


def test_a_constant_of_two_axes_is_read_in_boxes_of_their_own():
    """Both axes are resized alike: XLA gets one array of indices for them."""

    def upsampled(x):
        x = x[1:] - x[:-1]
        return jax.image.resize(x, (128, 128), "nearest")

    x = np.arange(65 * 64, dtype=np.float32).reshape(65, 64) ** 0.5
    shard_plan = plan(upsampled, x, out_slices={0: 16})
    assert shard_plan.num_shards == 16
    assert shard_plan.stage_costs[0].functions <= 3
    np.testing.assert_array_equal(shard_plan.run(x), jax.jit(upsampled)(x))
