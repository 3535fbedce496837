"""Idioms of the field as plans, against one `jax.jit` and the loop by hand."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import OURS, Benchmark, Contender

BY_HAND, WHOLE = "a loop by hand", "one jax.jit"
LIMITS = {BY_HAND: 1.2}
PIECES = 16


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def spans(size: int, pieces: int) -> Iterator[slice]:
    for k in range(pieces):
        yield slice(k * size // pieces, (k + 1) * size // pieces)


def contenders(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    in_slices: Any,
    by_hand: Callable[[], np.ndarray],
    whole: Callable[[], np.ndarray] | None = None,
) -> Mapping[str, Contender]:
    """A plan, which is made before, and the loop; and the function as it is."""
    from shardmap.planning.plan import plan

    made, compiled = plan(fun, *args, in_slices=in_slices), jax.jit(fun)
    return {
        OURS: Contender(lambda: made.run(*args)),
        BY_HAND: Contender(by_hand),
        WHOLE: Contender(whole or (lambda: np.asarray(compiled(*args)))),
    }


SIDE, CHANNELS, LAYERS, TILES = 1024, 4, 3, 4


def convolved(image: Any, kernels: Any) -> Any:
    """A stack of convolutions of 3 x 3, one image."""
    x = image[None]
    for kernel in kernels:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=numbers
        )
        x = jax.nn.relu(x)
    return x[0]


def cnn() -> Mapping[str, Contender]:
    image = normal(0, SIDE, SIDE, CHANNELS)
    kernels = normal(1, LAYERS, 3, 3, CHANNELS, CHANNELS) / 6
    tile, halo = jax.jit(convolved), 2 * LAYERS
    size = SIDE - halo

    def by_hand() -> np.ndarray:
        out = np.empty((size, size, CHANNELS), np.float32)
        for rows in spans(size, TILES):
            for columns in spans(size, TILES):
                part = image[rows.start : rows.stop + halo]
                part = part[:, columns.start : columns.stop + halo]
                out[rows, columns] = tile(part, kernels)
        return out

    cuts = {0: TILES, 1: TILES}
    return contenders(convolved, (image, kernels), (cuts, None), by_hand)


WORDS, SAMPLES = 256, 65_536


def cross_entropy(logits: Any, labels: Any) -> Any:
    rows = jnp.arange(logits.shape[0])
    return -jax.nn.log_softmax(logits)[rows, labels].mean()


def losses() -> Mapping[str, Contender]:
    logits = normal(0, SAMPLES, WORDS)
    labels = np.random.default_rng(1).integers(0, WORDS, SAMPLES, np.int32)
    of_piece = jax.jit(lambda x, y: cross_entropy(x, y) * len(x))

    def by_hand() -> np.ndarray:
        parts = [of_piece(logits[k], labels[k]) for k in spans(SAMPLES, PIECES)]
        return np.float32(sum(float(part) for part in parts) / SAMPLES)

    rows = {0: PIECES}
    return contenders(cross_entropy, (logits, labels), (rows, rows), by_hand)


QUERIES, KEYS, WIDTH = 64, 65_536, 64


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T / np.float32(np.sqrt(WIDTH)), axis=-1) @ v


def over_keys() -> Mapping[str, Contender]:
    q, k, v = normal(0, QUERIES, WIDTH), normal(1, KEYS, WIDTH), normal(2, KEYS, WIDTH)

    @jax.jit
    def step(largest, total, result, q, k, v):
        logits = q @ k.T / np.float32(np.sqrt(WIDTH))
        new = jnp.maximum(largest, logits.max(-1, keepdims=True))
        weights, old = jnp.exp(logits - new), jnp.exp(largest - new)
        total = total * old + weights.sum(-1, keepdims=True)
        return new, total, result * old + weights @ v

    def by_hand() -> np.ndarray:
        state = (
            np.full((QUERIES, 1), -np.inf, np.float32),
            np.zeros((QUERIES, 1), np.float32),
            np.zeros((QUERIES, WIDTH), np.float32),
        )
        for piece in spans(KEYS, PIECES):
            state = step(*state, q, k[piece], v[piece])
        return np.asarray(state[2] / state[1])

    keys = {0: PIECES}
    return contenders(attention, (q, k, v), (None, keys, keys), by_hand)


ROWS, COLUMNS = 65_536, 128


def standardised(x: Any) -> Any:
    return (x - x.mean(0)) / x.std(0)


def from_zarr() -> Mapping[str, Contender]:
    import zarr

    host = normal(0, ROWS, COLUMNS) * 3 + 5
    x = zarr.create_array(
        zarr.storage.MemoryStore(),
        shape=host.shape,
        chunks=(ROWS // PIECES, COLUMNS),
        dtype="float32",
    )
    x[...] = host
    whole = jax.jit(standardised)

    @jax.jit
    def moments(x):
        mean = x.mean(0)
        return mean, ((x - mean) ** 2).sum(0)

    scaled = jax.jit(lambda x, mean, deviation: (x - mean) / deviation)

    def by_hand() -> np.ndarray:
        count, mean = 0, np.zeros(COLUMNS, np.float32)
        squares = np.zeros(COLUMNS, np.float32)
        for rows in spans(ROWS, PIECES):
            own, more = map(np.asarray, moments(x[rows]))
            new = rows.stop - rows.start
            away = own - mean
            squares += more + away**2 * (count * new / (count + new))
            count += new
            mean += away * (new / count)
        deviation = np.sqrt(squares / count)
        out = np.empty(x.shape, np.float32)
        for rows in spans(ROWS, PIECES):
            out[rows] = scaled(x[rows], mean, deviation)
        return out

    def at_once() -> np.ndarray:
        return np.asarray(whole(x[...]))

    return contenders(standardised, (x,), {0: PIECES}, by_hand, at_once)


BENCHMARKS = (
    Benchmark(
        "plan, a stack of convolutions",
        "three layers of 3 x 3 on 16 MiB, in 16 tiles",
        cnn,
        LIMITS,
        repeats=10,
    ),
    Benchmark(
        "plan, cross-entropy",
        "x[arange(n), y] of 64 MiB of logits, in 16 pieces of rows",
        losses,
        LIMITS,
        repeats=10,
    ),
    Benchmark(
        "plan, attention over keys",
        "64 queries, 65,536 keys in 16 pieces",
        over_keys,
        LIMITS,
        repeats=20,
    ),
    Benchmark(
        "plan, standardised from zarr",
        "32 MiB in 16 chunks, compressed, into a NumPy array",
        from_zarr,
        LIMITS,
        repeats=10,
    ),
)
