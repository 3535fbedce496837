"""Functions in pieces against the same functions as a whole, and loops by hand.

    python -m benchmarks.chunked_rows [--repeats 20] [--only NAME]

prints for each program how large the temporaries of `shardmap.chunked` are beside the
whole program's (as the compiler counts them, with equal options), and how long it takes
beside the whole program and, where one line says it, beside a loop by hand.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardmap as sm
from benchmarks.harness import OURS, Contender, interleave

WHOLE, BY_HAND = "as a whole", "by hand"
# Without it, the fused operations of CPU keep memory that the compiler does not count.
OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
MOST_TEMPORARIES, MOST_TIME, MOST_TIME_BY_HAND = 0.2, 1.1, 1.2


class Program(NamedTuple):
    """A function, its arguments, how to cut them, and a loop by hand."""

    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    in_slices: Any
    by_hand: Callable[..., Any] | None = None


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8) @ v


def attention_by_hand(q, k, v):
    pieces = q.reshape(16, -1, q.shape[1])
    return jax.lax.map(lambda q: attention(q, k, v), pieces).reshape(q.shape)


def mlp(x, up, down):
    normal = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normal @ up) @ down


def mlp_by_hand(x, up, down):
    pieces = x.reshape(16, -1, x.shape[1])
    return jax.lax.map(lambda x: mlp(x, up, down), pieces).reshape(x.shape)


def cross_entropy(x, table):
    logits = x @ table
    return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()


def kernel(x, y, v):
    distance = (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T
    return jnp.exp(-distance) @ v


def kernel_by_hand(x, y, v):
    pieces = x.reshape(16, -1, x.shape[1])
    return jax.lax.map(lambda x: kernel(x, y, v), pieces).reshape(-1, v.shape[1])


def k_means_step(x, centers):
    distance = ((x[:, None] - centers[None]) ** 2).sum(-1)
    nearest = jax.nn.one_hot(distance.argmin(1), centers.shape[0])
    return nearest.T @ x / (nearest.sum(0)[:, None] + 1)


def clipped_gradient(w, x, y):
    def loss(w, x, y):
        return ((jnp.tanh(x @ w) - y) ** 2).sum()

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, y)
    norms = jnp.sqrt((gradients**2).sum((1, 2), keepdims=True))
    return (gradients / jnp.maximum(norms, 1)).mean(0)


def local_energy(w, x):
    def wave(x):
        return jnp.tanh(x @ w).sum()

    return jax.vmap(lambda x: -jnp.trace(jax.hessian(wave)(x)) / 2)(x)


def local_energy_by_hand(w, x):
    pieces = x.reshape(16, -1, x.shape[1])
    return jax.lax.map(lambda x: local_energy(w, x), pieces).reshape(-1)


def convolutions(x, k):
    for _ in range(3):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"))
    return x


def moving(x):
    mean = jax.lax.reduce_window(x, 0.0, jax.lax.add, (9, 1), (1, 1), "SAME") / 9
    return (x - mean) ** 2


def ode_step(x, w):
    def field(x):
        return jnp.tanh(x @ w)

    k1 = field(x)
    k2 = field(x + 0.05 * k1)
    k3 = field(x + 0.05 * k2)
    k4 = field(x + 0.1 * k3)
    return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


ROWS = 16_384
PROGRAMS = {
    "attention": Program(
        attention, ((4096, 64),) * 3, ({0: 16}, None, None), attention_by_hand
    ),
    "layer norm and MLP": Program(
        mlp, ((ROWS, 64), (64, 512), (512, 64)), ({0: 16}, None, None), mlp_by_hand
    ),
    "cross-entropy with gradient": Program(
        jax.value_and_grad(cross_entropy, (0, 1)),
        ((2048, 64), (64, 8192)),
        ({0: 16}, None),
    ),
    "kernel times vector": Program(
        kernel,
        ((4096, 8), (4096, 8), (4096, 1)),
        ({0: 16}, None, None),
        kernel_by_hand,
    ),
    "k-means step": Program(k_means_step, ((ROWS, 16), (64, 16)), ({0: 16}, None)),
    "clipped gradients of samples": Program(
        clipped_gradient, ((64, 64), (2048, 64), (2048, 64)), (None, {0: 16}, {0: 16})
    ),
    "local energy": Program(
        local_energy,
        ((32, 64), (2048, 32)),
        (None, {0: 16}),
        local_energy_by_hand,
    ),
    "convolutions": Program(
        convolutions, ((1, 8, 512, 512), (8, 8, 3, 3)), ({2: 16}, None)
    ),
    "FFT of a batch": Program(
        lambda x: jnp.abs(jnp.fft.fft(x)) ** 2, ((2048, 2048),), ({0: 16},)
    ),
    "ODE step": Program(ode_step, ((ROWS, 128), (128, 128)), ({0: 16}, None)),
    "moving statistics": Program(moving, ((ROWS, 256),), ({0: 16},)),
}


def compiled(fun: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.jit(fun).lower(*arguments).compile(compiler_options=OPTIONS)


def measured(program: Program, repeats: int) -> tuple[float | None, dict[str, float]]:
    """Temporaries beside the whole program's, and median seconds by contender.

    None for a program that has no temporaries as a whole.
    """
    random = np.random.default_rng(0)
    arguments = tuple(
        jnp.asarray(random.standard_normal(shape, np.float32) / 4)
        for shape in program.shapes
    )
    made = {
        OURS: compiled(sm.chunked(program.fun, program.in_slices), arguments),
        WHOLE: compiled(program.fun, arguments),
    }
    if program.by_hand:
        made[BY_HAND] = compiled(program.by_hand, arguments)
    for result, expected in zip(
        jax.tree.leaves(made[OURS](*arguments)),
        jax.tree.leaves(made[WHOLE](*arguments)),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=2e-2, atol=2e-3)
    contenders = {
        name: Contender(lambda f=f: jax.block_until_ready(f(*arguments)))
        for name, f in made.items()
    }
    samples = interleave(contenders, repeats)
    temporaries = [
        made[name].memory_analysis().temp_size_in_bytes for name in (OURS, WHOLE)
    ]
    medians = {name: statistics.median(each) for name, each in samples.items()}
    # What is fused to nothing as a whole leaves nothing to save.
    saved = temporaries[0] / temporaries[1] if temporaries[1] else None
    return saved, medians


def told(ratio: float, limit: float) -> str:
    return f"{ratio:5.2f} {'ok' if ratio <= limit else 'MISS'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, shardmap {sm.__version__}, 16 pieces")
    print(f"{'':30} temporaries  time/whole  time/by hand")
    times = []
    for name, program in PROGRAMS.items():
        if options.only not in name:
            continue
        memory, seconds = measured(program, options.repeats)
        times.append(seconds[OURS] / seconds[WHOLE])
        needed = "none whole" if memory is None else told(memory, MOST_TEMPORARIES)
        line = f"{name:30} {needed:11}  {times[-1]:10.2f}"
        if BY_HAND in seconds:
            ratio = seconds[OURS] / seconds[BY_HAND]
            line += f"  {told(ratio, MOST_TIME_BY_HAND)}"
        print(line, flush=True)
    print(f"time/whole in the median: {told(statistics.median(times), MOST_TIME)}")


if __name__ == "__main__":
    main()
