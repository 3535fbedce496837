"""How long planning takes, beside what JAX takes for the same function.

    python -m benchmarks.planning [--only NAME]

All figures are CPU seconds of one process, caches empty for each: of
``jax.jit(f).lower()``, of `plan` with ``in_slices`` and the compilation of its shards,
of `plan` with ``memory=``, and of the first call of `chunked` with ``memory=``, without
running it. Next to each stands how many times the one before it that is, and whether
that is within its limit.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardmap as sm

MOST_TIMES_LOWERING = 4
"""``plan(in_slices)``, in times of ``jit(f).lower()``."""

MOST_TIMES_PLANNING = 4
"""With ``memory=``, in times of ``plan(in_slices)`` and the compilation of shards."""

MOST_SECONDS_WITH_LABELS = 1
"""``plan(in_slices)`` of arrays of xarray, which `jax.jit` does not take."""

MOST_TIMES_TWO_LAYERS = 8
"""``plan(memory=)`` of 12 layers, in times of that of 2."""


class Program(NamedTuple):
    """A function, its arguments, how to cut them, and a memory that is too little."""

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    in_slices: Any
    memory: str | None = None


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def transformer(layers: int, gradient: bool) -> Program:
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=8)(y, y)
            y = linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x))
            return x + linen.Dense(x.shape[-1])(linen.gelu(y))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(layers):
                x = Block()(x)
            return x

    x, model = floats(16, 512, 256), Model()
    weights = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(weights, x):
        return (model.apply(weights, x) ** 2).mean()

    fun = jax.grad(loss) if gradient else model.apply
    memory = f"{100 * layers} MB" if gradient else "200 MB"
    return Program(fun, (weights, x), (None, {0: 8}), memory)


def u_net() -> Program:
    def conv(x, k):
        return jax.nn.relu(jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ))  # fmt: skip

    def pooled(x):
        n, h, w, c = x.shape
        return x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))

    def fun(kernels, x):
        beside = []
        for k in kernels[:3]:
            x = conv(x, k)
            beside.append(x)
            x = pooled(x)
        x = conv(x, kernels[3])
        for k, left in zip(kernels[4:], beside[::-1], strict=True):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = conv(jnp.concatenate([x, left], -1), k)
        return x

    widths = [(3, 16), (16, 32), (32, 64), (64, 64), (128, 32), (64, 16), (32, 3)]
    kernels = [floats(3, 3, *width) for width in widths]
    return Program(fun, (kernels, floats(8, 128, 128, 3)), (None, {0: 4}), "16 MB")


def t_sne() -> Program:
    def fun(y, p):
        for _ in range(5):
            apart = ((y[:, None] - y[None]) ** 2).sum(-1)
            q = 1 / (1 + apart)
            share = (p - q / q.sum()) * q
            y = y - 4 * (share[:, :, None] * (y[:, None] - y[None])).sum(1)
        return y

    return Program(fun, (floats(2000, 2), floats(2000, 2000)), (None, {0: 8}), "16 MB")


def kalman() -> Program:
    def one(seen):
        a, h = jnp.eye(4) + 0.1 * jnp.eye(4, k=1), jnp.eye(2, 4)

        def step(carry, z):
            x, p = carry
            x, p = a @ x, a @ p @ a.T + 0.01 * jnp.eye(4)
            gain = jnp.linalg.solve(h @ p @ h.T + 0.1 * jnp.eye(2), h @ p).T
            x = x + gain @ (z - h @ x)
            return (x, p - gain @ h @ p), x

        return jax.lax.scan(step, (jnp.zeros(4), jnp.eye(4)), seen)[1]

    return Program(jax.vmap(one), (floats(5000, 200, 2),), {0: 10}, "8 MB")


def hessian() -> Program:
    def energy(x):
        apart = ((x[:, None] - x[None]) ** 2).sum(-1)
        return (1 / (1 + apart)).sum()

    return Program(jax.hessian(energy), (floats(60, 3),), {0: 4}, "1 MB")


def private_gradients() -> Program:
    def loss(w, x, y):
        return ((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2).sum()

    def fun(w, x, y):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, y)
        norms = jnp.sqrt(sum((g**2).sum((1, 2)) for g in each))
        scale = jnp.minimum(1, 1 / norms)[:, None, None]
        return [(g * scale).mean(0) for g in each]

    weights = [floats(128, 256), floats(256, 8)]
    arguments = weights, floats(1024, 128), floats(1024, 8)
    return Program(fun, arguments, (None, {0: 16}, {0: 16}), "32 MB")


def classes() -> Program:
    def fun(x, table, labels):
        def loss(x, table):
            logits = x @ table
            rows = jnp.arange(len(labels))
            at = logits[rows, labels]
            return (jax.nn.logsumexp(logits, -1) - at).mean()

        return jax.value_and_grad(loss, (0, 1))(x, table)

    labels = jax.ShapeDtypeStruct((256,), np.int32)
    arguments = floats(256, 64), floats(64, 100_000), labels
    return Program(fun, arguments, (None, {1: 10}, None), "96 MB")


def resampled() -> Program:
    import xarray

    days = np.datetime64("1980-01-01", "ns") + np.arange(3653).astype("m8[D]")
    x = np.zeros((3653, 64), np.float32)
    t = xarray.DataArray(x, {"time": days}, ("time", "x"))
    return Program(lambda t: t.resample(time="MS").mean(), (t,), {"time": 10})


def normalised() -> Program:
    import xarray

    days = np.datetime64("2020-01-01", "ns") + np.arange(400).astype("m8[D]")
    x = np.zeros((400, 48), np.float32)
    t = xarray.DataArray(x, {"time": days}, ("time", "x"))

    def fun(t):
        apart = t.groupby("time.month") - t.groupby("time.month").mean()
        return apart.groupby("time.month") / t.groupby("time.month").std()

    return Program(fun, (t,), {"time": 4})


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    **{
        f"{'gradient of ' * gradient}{layers} layers": (
            lambda layers=layers, gradient=gradient: transformer(layers, gradient)
        )
        for gradient in (False, True)
        for layers in (2, 6, 12)
    },
    "U-Net": u_net,
    "t-SNE, 5 steps": t_sne,
    "Kalman filter": kalman,
    "hessian of pair distances": hessian,
    "DP-SGD": private_gradients,
    "100,000 classes": classes,
    "xarray, 120 months": resampled,
    "xarray, grouped z-score": normalised,
}


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """The CPU seconds of a call with empty caches, and what it returned."""
    jax.clear_caches()
    start = time.process_time()
    made = run()
    return time.process_time() - start, made


def measured(program: Program) -> dict[str, float]:
    """The CPU seconds of each way."""
    fun, arguments, in_slices, memory = program
    found = {}
    if memory is not None:  # `jax.jit` takes no labels.
        found["lower"], _ = seconds(lambda: jax.jit(again(fun)).lower(*arguments))
    found["plan"], made = seconds(
        lambda: sm.plan(again(fun), *arguments, in_slices=in_slices)
    )
    start = time.process_time()
    _ = made.peak_bytes
    found["shards"] = time.process_time() - start
    if memory is not None:
        found["memory"], _ = seconds(
            lambda: sm.plan(again(fun), *arguments, memory=memory)
        )
        pieces = jax.jit(sm.chunked(again(fun), memory=memory))
        found["chunked"], _ = seconds(lambda: pieces.lower(*arguments))
    return found


def again(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which no cache knows."""
    return lambda *args: fun(*args)


def told(found: Mapping[str, float], name: str, beside: float, limit: float) -> str:
    """A figure, and how many times another one it is."""
    if name not in found:
        return f"{'':20}"
    ratio = found[name] / beside
    return f"{found[name]:7.2f}{ratio:6.1f} {'ok' if ratio <= limit else 'MISS':6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, shardmap {sm.__version__}")
    heads = ("plan(in_slices)", "plan(memory=)", "chunked(memory=)")
    print(f"{'':26}{'lower':>7} " + " ".join(f"{head:20}" for head in heads))
    sm.plan(jnp.sin, floats(8), memory="1 MB")  # The imports are not counted.
    all_found = {}
    for name, make in PROGRAMS.items():
        if options.only not in name:
            continue
        found = all_found[name] = measured(make())
        lowering = found.get("lower")
        given = found["plan"] + found["shards"]
        columns = (
            told(found, "plan", 1.0, MOST_SECONDS_WITH_LABELS)
            if lowering is None
            else told(found, "plan", lowering, MOST_TIMES_LOWERING),
            told(found, "memory", given, MOST_TIMES_PLANNING),
            told(found, "chunked", given, MOST_TIMES_PLANNING),
        )
        lowered = "" if lowering is None else f"{lowering:.2f}"
        print(f"{name:26}{lowered:>7} {' '.join(columns)}".rstrip(), flush=True)
    if {"2 layers", "12 layers"} <= all_found.keys():
        ratio = all_found["12 layers"]["memory"] / all_found["2 layers"]["memory"]
        verdict = "ok" if ratio <= MOST_TIMES_TWO_LAYERS else "MISS"
        print(f"plan(memory=) of 12 layers: {ratio:.1f} times that of 2: {verdict}")


if __name__ == "__main__":
    main()
