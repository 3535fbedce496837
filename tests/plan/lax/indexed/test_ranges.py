"""Known indices in any order: pieces of them look at pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

SIZE = 40
TABLE = reals(SIZE, 3)
COUNT = np.arange(SIZE)
AROUND = np.clip(COUNT[:, None] + np.array([-1, 3, 0, 1]), 0, SIZE - 1)
MIXED = np.random.default_rng(0).permutation(SIZE)
TAKEN = {
    "picked": lambda a: a[jnp.array([35, 2, 9])],
    "wrapped around": lambda a: a[(jnp.arange(SIZE) + 7) % SIZE],
    "blocks turned": lambda a: a[COUNT.reshape(-1, 4)[:, ::-1].reshape(-1)],
    "blocks moved": lambda a: a[COUNT.reshape(4, -1)[::-1].reshape(-1)],
    "there and back": lambda a: a[np.concatenate([COUNT, COUNT[::-1]])],
    "neighbours": lambda a: a[AROUND].sum(1),
    "neighbours' columns": lambda a: a.T[:, AROUND].max(2),
    "windows": lambda a: a[jnp.arange(0, 36, 2)[:, None] + jnp.arange(5)[None]].mean(1),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TAKEN)
def test_pieces_look_at_pieces(name):
    def fun(a):
        return jnp.tanh(TAKEN[name](a))

    shard_plan = check_cut(fun, TABLE, in_slices={0: 5})
    assert len(shard_plan.stages) == 1
    assert shard_plan.shards[0].combiner == "insert"
    boxes = {str(shard.in_slices): shard.in_slices[0] for shard in shard_plan.shards}
    assert max(len(TABLE[box]) for box in boxes.values()) <= SIZE // 2


PUT = {
    "wrapped around": lambda x, y: x.at[(jnp.arange(SIZE) + 7) % SIZE].set(y),
    "blocks turned": lambda x, y: x.at[
        COUNT.reshape(-1, 4)[:, ::-1].reshape(-1)
    ].multiply(y),
    "a few": lambda x, y: x.at[jnp.array([35, 2, 9])].set(y[:3]),
    "neighbours": lambda x, y: x.at[AROUND].add(jnp.stack([y, y * 2, y, -y], 1)),
    "some dropped": lambda x, y: x[:20].at[(COUNT * 2) % 20].max(y),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PUT)
@pytest.mark.parametrize("of", [({0: 5}, None), (None, {0: 5}), ({0: 3, 1: 2}, {0: 4})])
def test_pieces_get_pieces(name, of):
    def fun(x, y):
        return jnp.sin(PUT[name](x, y))

    shard_plan = plan(fun, TABLE, reals(SIZE, 3, seed=1) * 2, in_slices=of)
    args = TABLE, reals(SIZE, 3, seed=1) * 2
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args))
    if name not in ("some dropped", "a few"):
        assert shard_plan.num_shards > 1
        assert len(shard_plan.stages) == 1


@pytest.mark.deep
def test_tiles_are_cut_along_both_axes():
    rows = np.arange(0, 36, 2)[:, None, None, None] + np.arange(4)[:, None]
    columns = np.arange(9)[:, None, None] * 4 + np.arange(3)

    def fun(x):
        return jnp.sin(x[rows, columns]).sum((2, 3))

    shard_plan = check_cut(fun, reals(SIZE, SIZE), in_slices={0: 4, 1: 3})
    assert shard_plan.num_shards == 12
    assert len(shard_plan.stages) == 1
    # A cut of the places that are looked up together goes no further.
    shard_plan = plan(
        lambda x: jnp.sin(x[rows, columns]),
        reals(SIZE, SIZE),
        in_slices={0: 4},
        out_slices={2: 2},
    )
    assert_same(
        shard_plan.run(reals(SIZE, SIZE)), jnp.sin(reals(SIZE, SIZE)[rows, columns])
    )


def windows(starts, length):
    def fun(x):
        return jax.vmap(lambda k: jax.lax.dynamic_slice_in_dim(x, k, length))(starts)

    return fun


@pytest.mark.few(1)
@pytest.mark.parametrize("starts", [COUNT[:36:3], COUNT[36::-4], COUNT[[30, 2, 33]]])
def test_windows_at_known_starts_are_cut(starts):
    taken = windows(starts, 4)
    shard_plan = check_cut(lambda x: jnp.sin(taken(x)), TABLE, in_slices={0: 5, 1: 2})
    assert len(shard_plan.stages) == 1
    assert shard_plan.shards[0].combiner == "insert"
    rows = [shard.in_slices[0][0] for shard in shard_plan.shards]
    assert max(each.stop - each.start for each in rows) <= SIZE // 2
    check_cut(jax.grad(lambda x: jnp.sin(taken(x)).sum()), TABLE, in_slices={0: 5})


def test_a_spectrogram_reads_what_it_shows():
    def fun(x):
        return jnp.abs(jax.scipy.signal.stft(x, nperseg=16)[2])

    x = reals(4000)
    shard_plan = check_cut(fun, x, in_slices={0: 10})
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (10, 1)
    assert (
        max(s.in_slices[0][0].stop - s.in_slices[0][0].start for s in shard_plan.shards)
        < 500
    )


def test_windows_that_are_partly_outside_are_not_cut():
    taken = windows(COUNT[::3], 4)  # The last is moved inside.
    shard_plan = plan(taken, TABLE, in_slices={0: 5})
    assert_same(shard_plan.run(TABLE), jax.jit(taken)(TABLE))
    assert "windows of it are taken, all over it or partly outside" in str(shard_plan)


def test_of_what_is_all_over_it_is_said():
    shard_plan = check_cut(lambda a: a[MIXED], TABLE, in_slices={0: 5})
    assert shard_plan.shards[0].combiner == "add"
    shard_plan = plan(lambda a: (a * 0).at[MIXED].set(a + 1), TABLE, in_slices={0: 5})
    assert_same(
        shard_plan.run(TABLE), jax.jit(lambda a: (a * 0).at[MIXED].set(a + 1))(TABLE)
    )
    assert "go to places all over it (cut only the operand" in str(shard_plan)


def test_regular_windows_make_shards_that_are_alike():
    x = np.ones(2 * 10**5, np.float32)

    def fun(x):
        return x[jnp.arange(0, len(x) - 8, 4)[:, None] + jnp.arange(8)[None]].max(1)

    shard_plan = plan(fun, x, in_slices={0: 1000})
    assert shard_plan.num_shards == 1000
    assert shard_plan.stage_costs[0].functions <= 3
    [box] = shard_plan.shards[500].in_slices
    assert box[0].stop - box[0].start <= 210


@examples(6)
@given(st.data(), st.integers(0, 10**6))
def test_any_known_indices(data, seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 30))
    shape = tuple(rng.integers(1, 12, size=rng.integers(1, 3)).tolist())
    far = rng.integers(0, size, size=shape)
    near = np.clip(
        np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        + rng.integers(-1, 3, size=shape),
        0,
        size - 1,
    )
    index = (far, near, np.sort(far, 0)[::-1])[rng.integers(3)]
    x, y = reals(size, 4), reals(*shape, 4, seed=1)

    def fun(x, y):
        return jnp.sin(x[index]) + y, x.at[index].add(y), x.at[index].min(y)

    for_x, for_y = data.draw(cuts((x, y)))
    shard_plan = plan(fun, x, y, in_slices=(for_x, for_y))
    assert_same(shard_plan.run(x, y), jax.jit(fun)(x, y))


# Indices that are computed

KNOWN = {
    "a triangle": lambda: jnp.tril_indices(12)[0],
    "a step": lambda: jnp.arange(2, 30, 3)[::-1],
    "negative": lambda: jnp.array([-3, 1, 2]) % 7 + jnp.array([-7, 7, 8]) // 3 + 4,
    "clipped": lambda: jnp.clip(jnp.arange(-3, 36), 0, 31),
    "repeated": lambda: jnp.repeat(jnp.arange(10), 3) + jnp.repeat(jnp.arange(3), 10),
    "a grid": lambda: jnp.stack(jnp.meshgrid(jnp.arange(30), jnp.arange(3)))[0].T,
    "chosen": lambda: jnp.where(jnp.arange(30) > 2, jnp.arange(30), 3),
    "shifted": lambda: jnp.roll(jnp.cumsum(jnp.arange(5, 0, -1)), 2),
    "sorted truth": lambda: jnp.nonzero(jnp.arange(40) % 3 == 0, size=14)[0],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KNOWN)
def test_pieces_look_at_pieces_where_indices_are_known(name):
    shard_plan = check_cut(lambda x: jnp.sin(x[KNOWN[name]()]), TABLE, in_slices={0: 5})
    assert shard_plan.shards[0].combiner == "insert"
    assert len(shard_plan.stages) == 1


def test_indices_of_large_arrays_are_known_where_they_vary_along_few_axes():
    """A median that leaves out NaN looks its elements up, at places along each axis."""
    x = jax.ShapeDtypeStruct((730, 24, 200, 300), np.float32)
    for in_slices in ({0: 50}, {2: 50}):
        shard_plan = plan(lambda x: jnp.nanmedian(x, 1), x, in_slices=in_slices)
        assert shard_plan.num_shards == 50
        assert shard_plan.shards[0].combiner == "insert"
    check_cut(
        lambda x: jnp.nanquantile(x, jnp.array([0.1, 0.9]), 1),
        np.where(reals(6, 8, 4) > 1, np.float32(np.nan), reals(6, 8, 4)),
        in_slices={0: 3, 2: 2},
    )


def test_indices_that_depend_on_an_argument_are_not_known():
    def fun(x, k):
        return x[jnp.arange(30) + k]

    shard_plan = check_cut(fun, TABLE, np.int32(2), in_slices=({0: 5}, None))
    assert shard_plan.shards[0].combiner == "add"


def test_counts_that_wrap_around_are_no_rows():
    x, labels = reals(300, 2), np.zeros(300, np.int32)

    def fun(x, labels):
        return x[jnp.arange(300).astype(jnp.uint8), labels]

    shard_plan = plan(fun, x, labels, in_slices=({0: 3}, {0: 3}))
    assert_same(shard_plan.run(x, labels), jax.jit(fun)(x, labels))
