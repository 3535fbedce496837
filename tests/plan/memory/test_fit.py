"""Cuts that fit into memory: as few pieces as it takes, along the axes that help."""

import collections
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.plan.checks import assert_same

ROWS, COLUMNS = 1000, 64
X = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)


def cut_axes(made):
    """The axes along which shards begin at several places of the first argument."""
    boxes = [box for shard in made.shards if (box := shard.in_slices[0])]
    return {k for box in boxes for k, part in enumerate(box) if part.start}


@pytest.mark.parametrize("memory", [10_000, 600_000])
@pytest.mark.parametrize(
    "fun", [jnp.sin, lambda x: (jnp.sin(x) + x.sum(0, keepdims=True)).sum(1)]
)
def test_few_more_pieces_than_it_takes(fun, memory):
    def held(count):
        return sm.plan(fun, X, in_slices={0: count}).peak_bytes

    made = sm.plan(fun, X, in_slices={0: sm.AUTO}, memory=memory)
    assert made.peak_bytes <= memory
    count = len(made.out_slices.get(0, [0]))
    fewer = count - count // 16 - 1
    assert not fewer or held(fewer) > memory


def test_the_axis_that_saves_the_most_is_cut():
    x = jax.ShapeDtypeStruct((64, 4096), np.float32)
    made = sm.plan(lambda x, y: jnp.sin(x).sum(1), x, x, memory=50_000)
    assert cut_axes(made)
    assert "args[1]: float32[64, 4096]\n    axis 0: whole\n    axis 1: whole" in str(
        made
    )


@pytest.mark.deep
def test_of_two_axes_the_one_that_moves_less_is_cut():
    """Quantiles along a cut axis keep the argument."""

    def outliers(x):
        low, high = (jnp.quantile(x, q, axis=0, keepdims=True) for q in (0.1, 0.9))
        return (x - jnp.median(x, axis=0, keepdims=True)) / (high - low)

    x = jax.ShapeDtypeStruct((20_000, 400), np.float32)
    made = sm.plan(outliers, x, memory="4 MB")
    assert len(made.stage_costs) == 1
    assert "together the shards read args[0] once" in str(made)


def test_what_is_moved_counts_more_than_the_size_of_shards():
    """Cut along rows, twice as large pieces would fit, but be read twice."""
    x = jax.ShapeDtypeStruct((2048, 256), np.float32)
    made = sm.plan(lambda x: jax.nn.log_softmax(x, 0), x, memory="700 kB")
    assert "together the shards read args[0] once" in str(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [60_000, 300_000])
def test_what_only_the_compiler_finds_too_large_is_cut(memory):
    def values(z):
        return jnp.linalg.svd(z, compute_uv=False)

    z = np.random.default_rng(0).normal(size=(64, 24, 24)).astype(np.float32)
    made = sm.plan(values, z, memory=memory)
    assert made.num_shards > 1
    first = made.shards[0]
    compiled = first.function.lower(*first.args(z)).compile().memory_analysis()
    held = compiled.temp_size_in_bytes + first.nbytes
    assert held <= made.peak_bytes <= memory
    expected = jax.jit(values)(z)
    np.testing.assert_allclose(made.run(z), expected, atol=1e-3)
    np.testing.assert_allclose(
        sm.chunked(values, memory=memory)(z), expected, atol=1e-3
    )


def test_the_axis_that_is_cut_need_not_have_the_most_pieces():
    x = np.ones(100_000, np.float32)
    assert sm.plan(lambda x: jnp.cumsum(x), x, memory=60_000).peak_bytes <= 60_000


def centred(x):
    y = x - x.mean(0, keepdims=True)
    return y, y.T @ jnp.abs(y)


def test_one_axis_that_is_enough_is_cut_rather_than_two():
    """More columns at once save more, but so few pieces of them do not fit."""
    x = jax.ShapeDtypeStruct((2**15, 256), np.float32)
    made = sm.plan(lambda x: centred(x)[1], x, memory="4 MB")
    assert made.stages[-1].num_shards < 100
    assert "the shards read args[0] twice" in str(made)
    assert cut_axes(made) == {0}


@pytest.mark.deep
def test_numbers_between_those_that_do_not_fit_are_tried():
    """In 8 pieces a block is too large, in 32 the triangles of all blocks are."""

    def axes(x):
        return jnp.linalg.svd(x - x.mean(0, keepdims=True), full_matrices=False)[1]

    x = normal(4000, 24)
    values = sm.chunked(axes, memory=200_000)
    assert temporaries(values, x) <= 200_000
    assert_same(values(x), jax.jit(axes)(x), 1e-3)


class Chunked:
    shape, dtype, chunks = (4096, 256), np.dtype(np.float32), (128, 256)

    def __getitem__(self, index):
        return np.ones(self.shape, self.dtype)[index]


class Written(Chunked):
    def __setitem__(self, index, part):
        """Only planned with."""


def test_axes_with_one_chunk_are_cut_last():
    """Each piece of such an axis would read every chunk again."""

    def standard(x):
        return (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)

    made = sm.plan(standard, Chunked(), memory="2 MB")
    assert cut_axes(made) == {0}


def test_the_axis_is_cut_along_which_chunks_are_read_once():
    """Along axis 1, each of the two chunks would be read by four pieces."""
    x = Chunked()
    x.chunks = (512, 128)
    made = sm.plan(lambda x: jnp.cumsum(x, 0)[-1], x, memory="600 kB")
    assert made.out_slices == {}
    assert cut_axes(made) == {0}
    x.chunks = (4096, 32)
    assert cut_axes(sm.plan(lambda x: x.sum(0), x, memory="600 kB")) == {1}


def test_an_axis_in_one_chunk_is_cut_where_others_are_whole_or_short():
    """A median reads the first axis whole, and the second one is in pieces of one."""
    x = Chunked()
    x.shape, x.chunks = (730, 12, 10), (100, 6, 10)
    made = sm.plan(lambda x: jnp.median(x, 0), x, memory="20 kB")
    assert made.peak_bytes <= 20_000
    assert cut_axes(made) >= {1, 2}


def touched(made, chunks):
    """How many chunks of the first argument the shards read."""
    every = [shard.in_slices[0] for shard in made.shards]
    return sum(
        math.prod(
            (part.stop - 1) // n - part.start // n + 1
            for part, n in zip(box, chunks, strict=True)
        )
        for box in every
        if box is not None
    )


PROJECTION = np.ones((64, 48), np.float32)
IN_CHUNKS = {
    "one axis": (lambda x: jnp.exp(x) @ PROJECTION, (12, 90, 64), {0: sm.AS_CHUNKED}),
    "two axes": (
        lambda x: jnp.cumsum(jnp.exp(x), 2),
        (54, 30, 32),
        {0: sm.AS_CHUNKED, 1: sm.AS_CHUNKED},
    ),
}


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_are_read_once_where_a_cut_between_them_fits(name):
    fun, chunks, cuts = IN_CHUNKS[name]
    x = Chunked()
    x.shape, x.chunks = (216, 90, 64), chunks
    by_hand = sm.plan(fun, x, in_slices=cuts)
    memory = by_hand.peak_bytes * 6 // 5
    made = sm.plan(fun, x, memory=memory)
    assert made.peak_bytes <= memory
    assert touched(made, x.chunks) <= 1.1 * touched(by_hand, x.chunks)


def test_chunks_are_read_less_often_where_those_of_out_begin_with_some_of_them():
    """Cut along axis 1 alone, which begins with none, chunks are read 3.25 times."""
    x, out = Chunked(), Written()
    x.shape, x.chunks = (292, 181, 24), (292, 46, 12)
    out.shape, out.chunks = x.shape[::-1], (2, 20, 292)
    made = sm.plan(jnp.transpose, x, memory="1.45 MB", out=out)
    assert made.peak_bytes <= 1_450_000
    assert touched(made, x.chunks) == 2 * 4 * 2


def test_pieces_smaller_than_chunks_are_parts_of_one_chunk():
    x = Chunked()
    made = sm.plan(lambda x: jnp.sin(x).sum(1), x, memory="100 kB")
    assert made.peak_bytes <= 100_000
    assert touched(made, x.chunks) == made.num_shards


def test_a_median_over_an_axis_in_the_middle_reads_its_argument_once():
    """It takes elements at known places of the other axes, at which cuts begin, too."""
    x = normal(730, 24, 72)
    made = sm.plan(lambda x: jnp.nanmedian(x, 1), x, memory="1 MB")
    assert made.peak_bytes <= 1_000_000
    assert 10 <= made.num_shards <= 40
    assert "read args[0] once" in str(made)


@pytest.mark.parametrize(
    ("columns", "memory", "most"), [(1000, "3.5 MB", 3), (10_000, "2 MB", 5)]
)
def test_products_of_rows_are_parts_of_sums_where_pairs_of_rows_read_often(
    columns, memory, most
):
    """XLA holds a second copy of rows, of which more pieces are 100 pairs."""
    x = Chunked()
    x.shape, x.chunks = (200, 10_000), (20, columns)
    made = sm.plan(lambda x: x @ x.T, x, memory=memory)
    assert cut_axes(made) == {1}
    assert made.num_shards <= most


def test_arrays_that_the_function_does_not_use_change_nothing():
    def smoothed(d):
        return lax.reduce_window(d["t"], 0.0, lax.add, (30, 1, 1), (1, 1, 1), "SAME")

    t = jax.ShapeDtypeStruct((180, 22, 45), np.float32)
    alone, beside = (
        sm.plan(smoothed, given, memory="200 kB")
        for given in ({"t": t}, {"t": t, "u": t, "v": t})
    )
    assert [shard.in_slices[0]["t"] for shard in alone.shards] == [
        shard.in_slices[0]["t"] for shard in beside.shards
    ]


def test_a_graph_is_cut_along_its_edges():
    """The estimate holds more than XLA, and advised seven times what is enough."""
    n, e, d = 1000, 10_000, 32

    def network(x, w1, w2, s, t):
        for _ in range(2):
            m = jax.nn.relu(jnp.concatenate([x[s], x[t]], 1) @ w1)
            x = jnp.concatenate([x, jax.ops.segment_sum(m, t, n)], 1) @ w2
            x = jnp.tanh(x)
        return x

    ends = np.random.default_rng(0).integers(0, n, (2, e)).astype(np.int32)
    args = normal(n, d), normal(2 * d, d), normal(2 * d, d), *ends
    by_hand = sm.chunked(network, (None, None, None, {0: 32}, {0: 32}))
    memory = temporaries(by_hand, *args) * 103 // 100
    assert temporaries(sm.chunked(network, memory=memory), *args) <= memory


def test_pages_of_a_mapped_file_are_read_once(tmp_path):
    """A page holds 16 rows: each piece of a few columns would read all pages."""

    def standard(x):
        return (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)

    shape, dtype = (20_000, 64), np.float32
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", dtype, shape)
    assert cut_axes(sm.plan(standard, x, memory="1 MB")) == {0}
    in_memory = sm.plan(standard, np.zeros(shape, dtype), memory="1 MB")
    assert cut_axes(in_memory) == {1}
    x = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", dtype, shape, True)
    assert cut_axes(sm.plan(standard, x, memory="1 MB")) == {1}


def test_a_refusal_names_the_least_that_it_can_do_with():
    def fun(x):
        return jnp.linalg.inv(x @ x.T)

    x = jax.ShapeDtypeStruct((512, 4), np.float32)
    message = (
        r"in \d+ pieces .* holds 2\.0 MiB \(2,\d+,\d+ bytes\) at .* "
        r"Pass memory=2\d+ or more\.$"
    )
    with pytest.raises(ValueError, match=message):
        sm.plan(fun, x, memory="300 KB")
    # All axes were tried, unless the cuts are given.
    with pytest.raises(
        ValueError, match=r"Pass memory=\d+ or more, or cut other axes\.$"
    ):
        sm.plan(fun, x, in_slices={1: sm.AUTO}, memory="300 KB")


def test_a_refusal_names_what_is_kept_if_that_is_the_largest_value():
    def fun(x):
        return (x @ x.T) @ (x @ x.T) @ x

    message = (
        r"in \d+ pieces .* holds 36\.\d KiB \(3.,... bytes\) at once, of it 36\.0 KiB "
        r"in float32\[96,96\] made at .*test_fit.py:\d+ .*, kept for later stages"
    )
    with pytest.raises(ValueError, match=message):
        sm.chunked(fun, memory="30 kB")(np.ones((96, 16), np.float32))


def test_a_refusal_names_scratch_for_what_has_to_be_kept(tmp_path):
    def fun(x):
        return jnp.histogram(jnp.exp(x) * 1.1, 50)[0]

    x = jax.ShapeDtypeStruct((300_000,), np.float32)
    message = r"1\.1 MiB in float32\[300000\].*, or a folder as scratch\.$"
    with pytest.raises(ValueError, match=message):
        sm.plan(fun, x, memory="500 kB")
    assert sm.plan(fun, x, memory="500 kB", scratch=tmp_path).num_shards > 1


def test_attention_of_rows_with_themselves_fits():
    def attention(x):
        return jax.nn.softmax(x @ x.T) @ x

    x = jax.ShapeDtypeStruct((2000, 32), np.float32)
    assert sm.plan(attention, x, memory="500 kB").peak_bytes <= 500_000


def test_what_is_kept_leaves_room_for_shards_that_are_not_tiny():
    def fun(x, w):
        y = jnp.tanh(x @ w)
        return y - y.mean(0, keepdims=True)

    x, w = normal(4000, 64), normal(64, 64)
    memory = x.nbytes + w.nbytes + 2000
    made = sm.plan(fun, x, w, in_slices=({0: sm.AUTO}, None), memory=memory)
    assert made.num_shards < 20
    assert made.peak_bytes <= memory
    assert_same(made.run(x, w), jax.jit(fun)(x, w), 1e-4)


def test_the_bytes_of_a_refusal_are_enough():
    def fun(x):
        return (x @ x.T) @ (x @ x.T) @ x

    x = jax.ShapeDtypeStruct((96, 16), np.float32)
    with pytest.raises(ValueError, match="too little") as refused:
        sm.plan(fun, x, memory="30 kB")
    found = re.search(r"\(([\d,]+) bytes\)", str(refused.value))
    assert found
    enough = math.ceil(1.02 * int(found[1].replace(",", "")))
    assert sm.plan(fun, x, memory=enough).peak_bytes <= enough


def test_what_no_argument_has_is_cut_with_what_one_has():
    def fun(key, x):
        return jax.random.normal(key, (10**6,)).sum() + x.sum()

    x = jax.ShapeDtypeStruct((10**6,), np.float32)
    made = sm.plan(fun, jax.random.key(0), x, memory="1 MB")
    assert made.peak_bytes <= 1_000_000


def test_axes_that_fit_only_together_are_cut_together():
    """Gradients of the weights of many classes: cut by classes, logits are whole."""

    def loss(w, x, y):
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logits, y[:, None], 1).mean()

    args = normal(32, 2000), normal(512, 32), np.arange(512, dtype=np.int32)
    grad = jax.grad(loss)
    made = sm.plan(grad, *args, memory=800_000)
    assert made.peak_bytes <= 800_000
    assert_same(made.run(*args), jax.jit(grad)(*args), 1e-4)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def values_of(x):
    return jnp.linalg.svd(x, compute_uv=False)


WITHIN = {
    "kernels of a later stage": (
        lambda x: values_of(x) / jnp.abs(x).max(),
        normal(400, 16, 16),
        200_000,
    ),
    "a piece beside the whole": (
        lambda x: jnp.linalg.qr(x - x.mean(0, keepdims=True)),
        normal(400, 16, 16),
        200_000,
    ),
    "a tall matrix": (
        lambda x: jnp.linalg.qr(x - x.mean(0, keepdims=True)),
        normal(4000, 24),
        300_000,
    ),
    "two batch axes": (values_of, normal(20, 30, 16, 16), 150_000),
    "sums as large as the result": (lambda x: x.T @ x, normal(800, 300), 50_000),
    "a long sum": (lambda x: x[:500] @ x[500:].T, normal(1000, 24), 100_000),
}


def temporaries(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WITHIN)
def test_what_is_compiled_fits(name):
    fun, x, memory = WITHIN[name]
    in_loops = sm.chunked(fun, memory=memory)
    assert temporaries(in_loops, x) <= memory
    made = sm.plan(fun, x, memory=memory)
    assert made.peak_bytes <= memory
    kept = None
    for shard in made.shards:
        args = shard.args(x, values=kept)
        held = temporaries(shard.function, *args) + shard.nbytes
        assert held <= 1.02 * made.peak_bytes
        kept = shard.reduce(shard.function(*args), kept)
    result = kept.result()
    for ours in (result, in_loops(x)):
        assert_same(ours, jax.jit(fun)(x), 1e-3)


@pytest.mark.deep
def test_a_gradient_is_cut_where_the_function_need_not_be():
    def loss(fun):
        return lambda x: (fun(x) ** 2).sum()

    def values(x):
        return jnp.linalg.eigh(x)[0]

    x = normal(64, 8, 8)
    x = x @ x.mT
    grad = jax.grad(loss(sm.chunked(values, memory=40_000)))
    assert temporaries(grad, x) <= 40_000
    assert_same(grad(x), jax.grad(loss(values))(x), 1e-3)


def descent(x, steps=6, per_step=lambda w: None):
    """Steps of gradient descent, and what is returned of each."""

    def step(w, _):
        w = w - 0.1 * (x.T @ (x @ w - x[:, 0])) / x.shape[0]
        return w, per_step(w)

    return lax.scan(step, jnp.zeros(x.shape[1], np.float32), length=steps)


def spans(x):
    return jnp.stack([x[4 * k : 4 * k + 4].mean(0) for k in range(100)])


def calls(run):
    """The number of calls of our functions."""
    counts = collections.Counter()

    def count(frame, event, argument):
        counts[event, "shardmap" in frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts["call", True]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fun", "shape", "times"), [(descent, (20_000, 32), 5), (spans, (400, 64), 12)]
)
def test_cuts_that_fit_are_found_in_few_calls(fun, shape, times):
    """Few numbers of pieces are tried, and equal steps are compiled once."""
    x = jax.ShapeDtypeStruct(shape, np.float32)
    found = calls(lambda: sm.plan(fun, x, memory="200 kB"))
    assert found < times * calls(lambda: sm.plan(fun, x, in_slices={0: 20}))


@pytest.mark.few(1)
def test_pieces_are_as_large_as_memory_has_room_for():
    """XLA is asked again where the first cuts that it judges do not fit."""

    def divergence(y, p):
        q = 1 / (1 + ((y[:, None] - y[None]) ** 2).sum(-1)) * (1 - jnp.eye(len(y)))
        q = q / q.sum()
        return (p * jnp.log((p + 1e-9) / (q + 1e-9))).sum()

    args = normal(200, 2), normal(200, 200)
    assert sm.plan(jax.grad(divergence), *args, memory=53_000).num_shards < 300
    cut = sm.chunked(descent, memory=10_689).explain(normal(4_000, 32))
    pieces = re.search(r"axis 0: cut into (\d+) pieces", str(cut))
    assert pieces
    assert int(pieces[1]) < 300


def test_a_refusal_of_attention_names_the_least():
    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    x = normal(2, 128, 4, 16)
    with pytest.raises(ValueError, match=r"too little: .* Pass memory=1\d{4} or more"):
        sm.chunked(attention, memory=100)(x, x, x)


def test_few_stages_cost_less_than_small_shards():
    """Descent over batches: a stage for each would hold less, and take longer."""

    def epoch(x):
        def step(w, batch):
            return w - 0.1 * batch.T @ (batch @ w - batch[:, 0]), None

        return lax.scan(step, jnp.zeros(8, x.dtype), x.reshape(-1, 16, 8))[0]

    x = jax.ShapeDtypeStruct((2**12, 8), np.float32)
    made = sm.plan(epoch, x, memory=2**15)
    assert made.num_shards == len(made.stages) < 10


@pytest.mark.deep
def test_each_of_many_stages_goes_on_from_the_last_one():
    """To find out, samples of shards would compute all rows before each stage."""

    def nearest(x):
        places = jnp.arange(x.shape[1], dtype=x.dtype)

        def step(before, row):
            row = jnp.minimum(row, before + 1)
            row = jnp.minimum(row, lax.cummin(row - places) + places)
            return row, row

        return lax.scan(step, jnp.full(x.shape[1], 9.0), x)[1]

    def planned(rows):
        x = jax.ShapeDtypeStruct((rows, 12), np.float32)
        return calls(lambda: sm.plan(nearest, x, in_slices={1: 3}))

    planned(10)
    assert planned(20) < 2.5 * planned(10)
    x = np.random.default_rng(0).standard_normal((10, 12), np.float32)
    made = sm.plan(nearest, x, in_slices={1: 3})
    assert len(made.stages) == 21
    assert_same(made.run(x), jax.jit(nearest)(x))


@pytest.mark.deep
def test_a_refusal_takes_few_calls():
    """What was found with values kept is not found again without them."""

    def within(x):
        low, high = jnp.quantile(x, jnp.array([0.25, 0.75]), axis=0)
        return ((x > low[None]) & (x < high[None])).sum(0)

    def refused():
        with pytest.raises(ValueError, match="too little: in 4 pieces the function"):
            sm.plan(within, x, memory=500)

    x = jax.ShapeDtypeStruct((80, 4), np.float32)
    given = calls(lambda: sm.plan(within, x, in_slices={0: 20}))
    assert calls(refused) < 60 * given


@pytest.fixture
def compiled():
    """A list that each compilation makes longer."""
    events = []

    def listen(event, duration, **_):
        events.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_refusal_compiles_little_and_its_bytes_are_enough(compiled):
    """A deep stack of unequal layers, of which no cut is as small as is asked."""

    def loss(weights, x):
        for w, u in weights:
            x = x + jax.nn.gelu(jax.nn.softmax(x @ x.mT) @ x @ w) @ u
        return (x**2).mean()

    widths = (8, 24, 16, 28)
    weights = [(normal(20, width), normal(width, 20)) for width in widths]
    args = weights, normal(4, 48, 20)
    with pytest.raises(ValueError, match=r"Pass memory=\d+ or more") as refused:
        sm.plan(jax.grad(loss), *args, memory="20 kB")
    assert len(compiled) <= 32
    enough = re.search(r"Pass memory=(\d+) or more", str(refused.value))
    assert enough
    made = sm.plan(jax.grad(loss), *args, memory=int(enough[1]))
    assert made.peak_bytes <= int(enough[1])


def convolved(x, kernel):
    axes = "NHWC", "HWIO", "NHWC"
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)
    return jax.nn.relu(y)


def u_net(kernels, x):
    beside = []
    for kernel in kernels[: len(kernels) // 2]:
        beside.append(x := convolved(x, kernel))
        n, h, w, c = x.shape
        x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))
    for kernel in kernels[len(kernels) // 2 : -1]:
        x = jnp.repeat(jnp.repeat(convolved(x, kernel), 2, 1), 2, 2)
        x = jnp.concatenate([x, beside.pop()], -1)
    return convolved(x, kernels[-1])


def kernels_of(*widths):
    return [jax.ShapeDtypeStruct((3, 3, *width), np.float32) for width in widths]


def test_what_the_whole_takes_of_its_estimate_scales_that_of_pieces(compiled):
    """The padded concatenation of a U-Net is not seen in its equations."""
    kernels = kernels_of((3, 16), (16, 32), (48, 16))
    x = jax.ShapeDtypeStruct((8, 32, 32, 3), np.float32)
    made = sm.plan(u_net, kernels, x, memory="1200 kB")
    assert made.num_shards == 4
    assert len(compiled) == 2  # The whole function, and its shards.


def convolutions(kernels, x):
    for kernel in kernels:
        x = convolved(x, kernel)
    return x


IMAGES = {
    "ten convolutions": (
        convolutions,
        [(3, 8), *[(8, 8)] * 9],
        (1, 64, 64, 3),
        {1: 8},
    ),
    "a U-Net": (
        u_net,
        [(3, 8), (8, 16), (16, 32), (32, 32), (64, 16), (32, 8), (16, 3)],
        (8, 32, 32, 3),
        {0: 8, 1: 4},
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_axes_of_images_are_cut_behind_any_number_of_layers(name):
    fun, widths, shape, cuts = IMAGES[name]
    kernels, x = kernels_of(*widths), jax.ShapeDtypeStruct(shape, np.float32)
    by_hand = sm.plan(fun, kernels, x, in_slices=(None, cuts)).peak_bytes
    memory = by_hand * 9 // 8
    assert sm.plan(fun, kernels, x, memory=memory).peak_bytes <= memory


def test_of_shards_with_the_same_equations_the_largest_one_tells(compiled):
    kernels = kernels_of((3, 8), *[(8, 8)] * 9)
    x = jax.ShapeDtypeStruct((1, 256, 256, 3), np.float32)
    made = sm.plan(convolutions, kernels, x, memory=1_667_445)
    assert len(compiled) == 1
    assert made.peak_bytes <= 1_667_445
    assert len(compiled) == 3


def test_rows_of_a_kernel_are_computed_again_where_all_of_it_does_not_fit():
    """In few pieces none is kept, in more pieces all of them were."""

    def squared(x):
        kernel = jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1))
        return kernel @ kernel

    x = jax.ShapeDtypeStruct((700, 3), np.float32)
    for memory in (20_000, 100_000):
        assert sm.plan(squared, x, memory=memory).peak_bytes <= memory


def test_a_refusal_of_loops_compiles_no_cut_twice(compiled):
    kernels, x = [normal(3, 3, *w) for w in ((3, 8), (8, 8))], normal(1, 128, 128, 3)
    with pytest.raises(ValueError, match=r"Pass memory=[23],?\d{3} or more") as refused:
        sm.chunked(lambda x: convolutions(kernels, x), memory=1024)(x)
    assert "in 4,096 pieces" in str(refused.value)
    assert len(compiled) <= 4


def test_what_all_steps_of_a_loop_keep_is_counted():
    x = np.random.default_rng(0).standard_normal((400, 16), np.float32)

    def fun(x):
        return descent(x, 8, lambda w: jnp.outer(w, w))[1].sum(0)

    made = sm.plan(fun, x, memory=17_000)
    assert len(made.stages) > 8
    assert made.peak_bytes <= 17_000
    np.testing.assert_allclose(made.run(x), fun(x), rtol=1e-4)


def test_more_pieces_that_hardly_help_end_a_way():
    """Its queries and keys take most: the examples are cut too, read once."""

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    x = jax.ShapeDtypeStruct((4, 256, 4, 16), np.float32)
    made = sm.plan(attention, x, x, x, memory=917_504)
    assert len(made.stage_costs) == 1
    assert made.num_shards <= 16


def test_arguments_that_are_returned_are_cut():
    shard_plan = sm.plan(jnp.copy, X, memory="100 kB")
    assert shard_plan.peak_bytes <= 100_000
    assert cut_axes(shard_plan)
    arrays = [np.full((300, 200), k, np.float32) for k in range(9)]

    def fun(x, *others):
        return x * 2, *others

    shard_plan = sm.plan(fun, *arrays, memory="300 kB")
    assert shard_plan.peak_bytes <= 300_000
    assert_same(shard_plan.run(*arrays), fun(*arrays))
