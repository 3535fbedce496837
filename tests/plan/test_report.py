"""What a plan tells about itself."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.plan_programs import X, Y


def test_explain_and_str():
    def fun(x, w):
        return jnp.fft.fft(x, axis=0).real @ w, x.sum(0)

    shard_plan = plan(fun, X, Y[:6], in_slices=({0: 2, 1: 3}, None))
    text = str(shard_plan.explain())
    for line in (
        "args[0]: float32[8, 6]",
        "axis 0: cut into 2 pieces of 4",
        "gives parts of result[1], combined by add",
        "reaches axis 0 of result[1]",
        "stops at fft",
        "test_report.py",
        "(cut a batch axis instead)",
        "axis 0: whole",
    ):
        assert line in text
    assert text.startswith(f"fun: {shard_plan.num_shards} shards")
    assert text == str(shard_plan)
    assert text == str(plan(fun, X, Y[:6], in_slices=({0: 2, 1: 3}, None)).explain())


def test_a_plan_begins_with_its_memory_and_what_it_reads():
    shard_plan = plan(lambda x: x * 2, X, in_slices=({0: (5, 3)},))
    assert shard_plan.peak_bytes == 2 * 5 * 6 * 4
    first, second, *_ = str(shard_plan).splitlines()
    assert first == "<lambda>: 2 shards"
    assert (
        second == "  a shard holds at most 240 B; together the shards read args[0] once"
    )


def test_slices_of_each_output():
    def fun(x, y):
        return {"both": x + y, "row": y.sum(0), "two": 2}

    shard_plan = plan(fun, X, Y, in_slices=({0: 2}, {1: 3}))
    assert shard_plan.out_slices == {
        "both": {0: [(0, 4), (4, 8)], 1: [(0, 2), (2, 4), (4, 6)]},
        "row": {0: [(0, 2), (2, 4), (4, 6)]},
        "two": {},
    }


def test_what_is_kept_counts_and_is_told():
    def standard(x):
        y = x - x.mean(0, keepdims=True)
        return y / jnp.abs(y).mean(0, keepdims=True)

    shard_plan = plan(standard, X, in_slices=({0: 4},))
    assert len(shard_plan.stages) == 3
    # The second stage reads two rows and a mean of six numbers, and writes six sums.
    # Both are kept.
    read, written, kept = 3 * 6 * 4, 6 * 4, 2 * 6 * 4
    assert shard_plan.peak_bytes >= read + written + kept
    for line in (
        "stage 0: 4 shards",
        "24 B kept",
        "48 B kept; ",
        "reads args[0] once",
    ):
        assert line in str(shard_plan)
        assert line in str(shard_plan.explain())


def test_a_neighbour_is_read_twice_and_so_it_says():
    shard_plan = plan(lambda x: x[1:] - x[:-1], X, in_slices=({0: 2},))
    assert "reads args[0] 1.12 times" in str(shard_plan.explain())


def test_what_a_slice_leaves_out_is_no_news_of_a_cut_that_arrives():
    shard_plan = plan(
        lambda x: jnp.roll(x, 1), np.arange(12, dtype=np.float32), in_slices=({0: 3},)
    )
    assert "reaches axis 0 of result" in str(shard_plan.explain())
    assert "beside" not in str(shard_plan.explain())
    lost = plan(
        lambda x: x[:2], np.arange(12, dtype=np.float32), in_slices=({0: (6, 6)},)
    )
    assert "every cut lies beside" in str(lost.explain())


def test_a_plan_is_short_where_it_is_shown():
    shard_plan = plan(jnp.sin, np.arange(12, dtype=np.float32), in_slices=({0: 3},))
    assert repr(shard_plan) == "<ShardPlan: 3 shards in 1 stage>"


def test_stages_are_shown_with_what_they_make():
    shard_plan = plan(lambda x: x - x.mean(0)[None], X, in_slices=({0: 4},))
    assert [repr(stage) for stage in shard_plan.stages] == [
        "<Stage 0: 4 shards make float32[6]>",
        "<Stage 1: 4 shards make float32[8,6]>",
    ]


def test_many_leaves_of_one_tree_are_counted():
    params = {f"w{k}": np.ones((2, 3), np.float32) for k in range(5)}

    def fun(params, x):
        return {k: (x @ w).sum(0) for k, w in params.items()}, x * 2

    shard_plan = plan(
        fun, params, np.ones((4, 2), np.float32), in_slices=(None, {0: 2})
    )
    told = str(shard_plan.explain())
    assert "    gives parts of 5 arrays of result[0], combined by add\n" in told
    assert "2 shards make 5 arrays of result[0], result[1]; " in told
    assert "; reads 5 arrays of args[0] twice, args[1] once" in told


def test_how_many_functions_are_compiled():
    def fun(x):
        return jnp.tanh(x - x.mean(0, keepdims=True)).sum(0)

    x = np.ones((45, 2), np.float32)
    even = plan(fun, x, in_slices={0: 5})
    assert "functions compiled" not in str(even.explain())
    assert "lengths" not in str(even.explain())
    two = plan(fun, x, in_slices={0: (20, 20, 5)})
    assert [cost.functions for cost in two.stage_costs] == [2, 2]
    assert "; 2 functions compiled; reads args[0] once" in str(two)
    every = plan(jnp.sin, x, in_slices={0: tuple(range(1, 10))})
    told = "9 functions compiled for pieces of 9 lengths (see Pieces)"
    assert told in str(every)
    assert told in str(every.explain())
    # The first, the last, and those between them.
    halo = plan(
        lambda x: jnp.diff(jnp.pad(x, 1)),
        np.ones(9000, np.float32),
        in_slices={0: 1000},
    )
    assert "about 3 functions compiled" in str(halo.explain())


def test_equal_values_that_are_kept_are_told_once():
    x, weights = jax.ShapeDtypeStruct((64, 512), np.float32), np.ones((3, 512, 4))

    def fun(x):
        products = [x @ w.astype(x.dtype) for w in weights]
        return [y - y.mean(0, keepdims=True) for y in products]

    told = str(plan(fun, x, in_slices={0: 2})).splitlines()
    [line] = [line for line in told if line.startswith("    keeps the dot_general ")]
    assert line.endswith(", 1.0 KiB, and 2 more such values")


def test_equal_stages_are_told_once():
    def powers(x):
        def step(w, _):
            return w - x.T @ (x @ w), None

        return lax.scan(step, jnp.ones(8), None, length=12)[0]

    shard_plan = plan(powers, np.ones((64, 8), np.float32), in_slices={0: 4})
    assert len(shard_plan.stages) > 10
    for lines in (str(shard_plan), str(shard_plan.explain())):
        lines = [line.split(":")[0].strip() for line in lines.splitlines()]
        found = [line for line in lines if line.startswith("stage")]
        assert len(found) <= 6
        assert any(line.startswith("stages ") for line in found)
