"""Cuts are moved to the borders of what results are written to, where they may be."""

import threading
from concurrent.futures import Executor, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.arrays.array_likes import register_shard_handler
from shardmap.arrays.sources import registry
from shardmap.plan.borders import Borders, cells_of
from shardmap.plan.cutting import cut_function
from shardmap.plan.plan import plan
from tests.plan.plan_programs import reals

X = reals(64, 8)


class Stored:
    """An array in chunks, as stores have them."""

    def __init__(self, shape, chunks, barrier=None):
        self.array, self.chunks = np.zeros(shape, np.float32), chunks
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self.barrier = barrier
        self.writers = set()

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, value):
        if self.barrier is not None:
            self.writers.add(threading.get_ident())
            self.barrier.wait(60)
        self.array[index] = value


def moved(fun, args, in_slices, out, **options):
    made = Borders(cut_function(fun, args, in_slices, **options)).moved(out)
    return [
        [stop for _, stop in loop.pieces[:-1]]
        for stage in made.stages
        for loop in stage.loops
    ]


@pytest.mark.parametrize(
    ("cut", "length", "want"),
    [
        (5, 8, [16, 24, 40, 56]),
        (5, 12, [12, 24, 36, 48]),
        (5, 13, [13, 26, 39, 52]),
        (5, 14, [14, 28, 42, 56]),
        (5, 30, [13, 26, 39, 52]),  # The pieces are shorter.
        (3, 30, [22, 43]),  # No border but 30 and 60 is left, the axis ends at 64.
        ((13, 13, 13, 13, 12), 8, [13, 26, 39, 52]),  # As asked for.
        ([(0, 30), (30, 64)], 8, [30]),
        (5, 1, [13, 26, 39, 52]),
    ],
)
def test_numbers_of_pieces_are_moved(cut, length, want):
    out = Stored((64, 8), (length, 8))
    assert moved(lambda x: x * 2, (X,), ({0: cut},), out) == [want]


def test_what_meets_is_moved_together():
    out = Stored((64, 8), (8, 8))
    cut = {0: 5}
    assert moved(jnp.add, (X, X), (cut, cut), out) == [[16, 24, 40, 56]]
    # One of the two is where it was asked to be.
    lengths = {0: (13, 13, 13, 13, 12)}
    assert moved(jnp.add, (X, X), (cut, lengths), out) == [[13, 26, 39, 52]]


def test_shifted_and_turned_axes():
    out = Stored((63, 8), (8, 8))
    assert moved(lambda x: x[1:] - x[:-1], (X,), {0: 5}, out) == [[16, 24, 40, 48]]
    out = Stored((64, 8), (24, 8))
    assert moved(lambda x: x[::-1] * 2, (X,), {0: 4}, out) == [[16, 32, 48]]
    assert moved(lambda x: x[::-1] * 2, (X,), {0: 5}, out) == [[12, 25, 38, 51]]


def test_later_stages_and_several_outs():
    def fun(x):
        y = x - x.mean(0)[None]
        return y, y.T

    outs = Stored((64, 8), (4, 8)), Stored((8, 64), (8, 6))
    for found in moved(fun, (X,), {0: 5}, outs):
        assert found == [12, 24, 36, 48]


def test_cuts_that_memory_chose(tmp_path):
    made = plan(lambda x: x * 2, X, memory="2.1 KiB")
    own = [shard.out_slices for shard in made.shards]
    out = Stored((64, 8), (8, 8))
    found = made._borders.moved(out)
    assert all(stop % 8 == 0 for _, stop in found.stages[0].loops[0].pieces)
    assert [shard.out_slices for shard in made.shards] == own
    # Pieces of 24 rows would be too large.
    out = Stored((64, 8), (24, 8))
    tight = plan(lambda x: x * 2, X, memory=made.peak_bytes)
    assert tight._borders.moved(out) is tight._cut_program


def test_cells_of_arrays(tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    options = {"shape": (64, 8), "dtype": "f4"}
    plain = zarr.create_array(tmp_path / "a", chunks=(7, 3), **options)
    sharded = zarr.create_array(
        tmp_path / "b", chunks=(2, 8), shards=(32, 8), **options
    )
    h5py = pytest.importorskip("h5py", reason="writes the file")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        dataset = file.create_dataset("x", (64, 8), "f4", chunks=(16, 8))
        assert [cells_of(each) for each in (plain, sharded, dataset, X, None)] == [
            (7, 3),
            (32, 8),
            (16, 8),
            None,
            None,
        ]
        plan(lambda x: x * 2, X, in_slices={0: 3}).run(X, out=dataset)
        np.testing.assert_array_equal(dataset[:], X * 2)


class Pool(Executor):
    """Threads that shardmap takes for other processes."""

    def __init__(self, count):
        self.threads = ThreadPoolExecutor(count)

    def submit(self, *call):
        return self.threads.submit(*call)

    def shutdown(self, *args, **options):
        self.threads.shutdown(*args, **options)


@pytest.fixture
def stored_away(monkeypatch):
    """Registers `Stored` as something that other processes open."""
    monkeypatch.setattr(registry, "_kinds", dict(registry._kinds))
    known = {}

    def describe(value):
        known[str(id(value))] = value
        return {"place": str(id(value))}

    register_shard_handler(
        Stored,
        describe=describe,
        reopen=lambda about, writable: known[about["place"]],
        grain=lambda value: value.chunks,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("cut", "at_once"), [(4, True), ((31, 1, 31, 1), False)])
def test_moved_pieces_are_written_at_the_same_time(cut, at_once, stored_away):
    """Each writing waits for another one, which one writer would never see."""
    pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
    x = reals(60, 8) if at_once else X
    barrier = threading.Barrier(2) if at_once else None
    out = Stored(x.shape, (8, 8), barrier)
    made = plan(lambda x: (jnp.sin(x), x.sum(0)), x, in_slices={0: cut})
    with Pool(2) as pool:
        _, total = made.run(x, out=(out, None), executor=pool)
    assert len(out.writers) == 2 * at_once
    told = str(made.traffic(x, out=(out, None)))
    assert ("are written by the workers" in told) is at_once
    here = Stored(x.shape, (8, 8))
    _, want = made.run(x, out=(here, None))
    assert total.tobytes() == want.tobytes()
    assert out.array.tobytes() == here.array.tobytes()
