"""Indices that are known, and in order: a piece looks at a stretch of an axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, times_read
from tests.plan.plan_programs import reals

TABLE = reals(12, 12)
PLACES = np.array([1, 1, 4, 7, 11])
TAKEN = {
    "a triangle": lambda a: a[jnp.tril_indices(12)],
    "reversed": lambda a: a[::-1][jnp.arange(0, 12, 3)],
    "taken": lambda a: jnp.take(a, PLACES, 0),
    "descending": lambda a: jnp.take(a, PLACES[::-1], 0) * 2,
    "columns": lambda a: jnp.take(a, PLACES, 1),
    "both": lambda a: a[PLACES[:, None], np.array([0, 3, 5])[None]],
    "from the end": lambda a: a[np.array([-12, -3, -1])],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TAKEN)
def test_only_what_is_looked_at_is_read(name):
    cuts = {0: (2, 3, 7), 1: (5, 7)}
    shard_plan = check_cut(TAKEN[name], TABLE, in_slices=(cuts,))
    assert len(shard_plan.stages) == 1
    # The columns of a triangle come in no order.
    in_order = name != "a triangle"
    assert shard_plan.shards[0].combiner == ("insert" if in_order else "add")
    boxes = {str(shard.in_slices): shard.in_slices[0] for shard in shard_plan.shards}
    read = sum(len(TABLE[box].reshape(-1)) for box in boxes.values())
    assert read <= TABLE.size * (0.7 if in_order and name != "columns" else 1)


def test_runs_of_places_longer_than_pieces():
    """Pieces of the runs are rounded up, past the beginnings of the next ones."""
    places = np.flatnonzero(np.arange(600) % 90 < 31)
    check_cut(lambda x: x[places].sum(0), reals(600, 2), in_slices={0: 24})


@pytest.mark.deep
def test_what_comes_of_it_need_not_be_linear():
    def fun(a):
        return (jnp.tanh(a[PLACES]) * jnp.arange(5.0)[:, None]).sum(0)

    shard_plan = check_cut(fun, TABLE, in_slices=({0: (5, 7)},))
    assert shard_plan.num_shards == 2
    check_cut(jax.grad(lambda a: fun(a).sum()), TABLE, in_slices=({0: (5, 7)},))
    got = chunked(fun, ({0: (5, 7)},))(TABLE)
    assert_same(got, fun(jnp.asarray(TABLE)))


PUT = {
    "set": lambda x, y: x.at[PLACES[1:]].set(y[1:]),
    "added": lambda x, y: x.at[PLACES].add(y),
    "descending": lambda x, y: x.at[PLACES[::-1]].multiply(y),
    "every second": lambda x, y: x.at[1:11:2].set(y),
    "columns": lambda x, y: x.T.at[:, PLACES].max(y.T),
    "single elements": lambda x, y: x.at[PLACES, PLACES % 3].add(y[:, 0]),
    "in no order": lambda x, y: x.at[np.array([3, 1, 7, 7, 0])].add(y),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PUT)
def test_a_piece_reads_the_updates_that_go_there(name):
    fun = PUT[name]
    y = reals(5, 12) * 2
    shard_plan = check_cut(fun, TABLE, y, in_slices=({0: (2, 3, 7)}, None))
    rows = [
        box[1] for box in (s.in_slices for s in shard_plan.shards) if box[1] is not None
    ]
    read = sum(len(y[box].reshape(-1)) for box in rows) / y.size
    assert read <= (3 if name == "in no order" else 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in PUT if name != "in no order"])
def test_cuts_of_updates_pass_to_where_they_go(name):
    fun = PUT[name]
    y = reals(5, 12) * 2
    shard_plan = check_cut(fun, TABLE, y, in_slices=(None, {0: (1, 2, 2)}))
    assert shard_plan.num_shards >= 2
    assert shard_plan.shards[0].combiner == "insert"
    check_cut(fun, TABLE, y, in_slices=({0: 4, 1: 2}, {0: 3}))


def test_sums_of_known_segments_are_whole_ones():
    segments = np.repeat(np.arange(40), 3)

    def fun(y):
        return jax.nn.softmax(jax.ops.segment_sum(y, segments, 40), axis=-1)

    y = reals(120, 4)
    shard_plan = check_cut(fun, y, in_slices={0: 4})
    assert shard_plan.num_shards == 4
    assert len(shard_plan.stages) == 1

    # All of a segment is in one piece: a few long segments give parts as before.
    def few(y):
        return jax.ops.segment_sum(y, np.arange(120) // 40, 3)

    shard_plan = check_cut(few, y, in_slices={0: 8})
    assert shard_plan.num_shards == 8
    assert shard_plan.shards[0].combiner == "add"


def test_irregular_places_compile_few_functions():
    places = np.sort(np.random.default_rng(0).choice(10**5, 3 * 10**4, replace=False))
    x = jax.ShapeDtypeStruct((10**5, 2), np.float32)
    y = jax.ShapeDtypeStruct((len(places), 2), np.float32)
    for fun, args, cuts in (
        (lambda x: x[places], (x,), {0: 100}),
        (lambda x, y: x.at[places].add(y), (x, y), ({0: 100}, None)),
        (lambda x, y: x.at[places].add(y), (x, y), (None, {0: 100})),
    ):
        shard_plan = plan(fun, *args, in_slices=cuts)
        assert shard_plan.num_shards >= 75
        [stage] = shard_plan.stages
        every = range(stage.num_shards)
        assert len({stage.recipe(k)[1].static for k in every}) <= 20


ROUNDED = {
    "floor": lambda x: x[jnp.floor(0.5 * jnp.arange(80.0)).astype(jnp.int32)],
    "linspace": lambda x: x[jnp.linspace(0.0, 39.0, 70).astype(jnp.int32)],
    "nearest": lambda x: jax.image.resize(x, (80, 3), "nearest"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_floats_are_known(name):
    shard_plan = check_cut(ROUNDED[name], reals(40, 3), in_slices={0: 4})
    assert [shard.combiner for shard in shard_plan.shards] == ["insert"] * 4
    assert times_read(shard_plan) < 1.1


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [7, 40])
def test_a_float_is_rounded_once(count):
    """A product that XLA fuses with a sum may be rounded to another integer."""

    def places():
        scaled = jnp.arange(400, dtype=jnp.float32) * np.float32(0.9)
        return (scaled + np.float32(0.2)).astype(jnp.int32)

    x = np.arange(400, dtype=np.float32)
    want = x[np.asarray(jax.jit(places)())] * 2

    def fun(x):
        return x[places()] * 2

    assert_same(plan(fun, x, in_slices={0: count}).run(x), want, 0)
    assert_same(chunked(fun, {0: count})(x), want, 0)
    assert_same(jax.jit(jax.vmap(chunked(fun, {0: count})))(x[None]), want[None], 0)
