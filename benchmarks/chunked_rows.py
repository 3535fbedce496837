"""Functions in pieces against the same functions as a whole, and loops by hand.

    python -m benchmarks.chunked_rows [--repeats 20] [--only NAME]

prints for each program how large the temporaries of `shardmap.chunked` are beside the
whole program's (as the compiler counts them, with equal options), and how long it takes
beside the whole program and, where they apply, beside a loop by hand, `jax.lax.map`
with ``batch_size``, optax's `microbatch`, and the way of NetKet's `vmap_chunked`.
These are told which axis, how long the pieces are, and how results are combined;
"wrong" marks one that gives something else than the function.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardmap as sm
from benchmarks.harness import OURS, Contender, interleave

WHOLE, BY_HAND = "as a whole", "by hand"
# Without it, the fused operations of CPU keep memory that the compiler does not count.
OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
MOST_TEMPORARIES, MOST_TIME = 0.2, 1.1
LAX_MAP, OPTAX, NETKET = "lax.map", "optax", "NetKet"
CONCAT, SUM, MEAN = "CONCAT", "SUM", "MEAN"
MOST_TIMES = {BY_HAND: 1.2, LAX_MAP: 1.05, OPTAX: 1.05, NETKET: 1.05}
"""How much of another form's time is allowed."""
PIECES = 16


class Program(NamedTuple):
    """A function, its arguments, how to cut them, and other forms of it in pieces."""

    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    in_slices: Any
    others: Mapping[str, Callable[..., Any]] = {}


def rows_by_lax_map(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of rows, a few rows at a time, each by itself."""

    def by_rows(x, *rest):
        def of_row(row):
            return fun(row[None], *rest)[0]

        return jax.lax.map(of_row, x, batch_size=x.shape[0] // PIECES)

    return by_rows


def vmap_in_chunks(fun: Callable[..., Any], length: int) -> Callable[..., Any]:
    """A function of samples as NetKet's `vmap_chunked` has it, the rest after them."""
    vmapped = jax.vmap(fun, (None, 0))

    def in_chunks(w, x):
        count = x.shape[0] // length
        whole, rest = x[: count * length], x[count * length :]
        chunks = whole.reshape(count, length, *x.shape[1:])
        _, found = jax.lax.scan(
            lambda _, chunk: (None, vmapped(w, chunk)), None, chunks
        )
        return jnp.concatenate(
            [found.reshape(count * length, *found.shape[2:]), vmapped(w, rest)]
        )

    return in_chunks


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


def microbatch(fun, argnums, size, results):
    """`optax.microbatching.microbatch`, by the names of what is done with results."""

    def run(*args):
        from optax import microbatching

        kinds = jax.tree.map(lambda name: microbatching.AccumulationType[name], results)
        return microbatching.microbatch(fun, argnums, size, kinds)(*args)

    return run


def cross_entropy_by_optax(x, table):
    """The mean of means; each piece's own gradient is of its own mean."""
    wanted = MEAN, (CONCAT, MEAN)
    gradient = jax.value_and_grad(cross_entropy, (0, 1))
    loss, (of_x, of_table) = microbatch(gradient, 0, 2048 // PIECES, wanted)(x, table)
    return loss, (of_x / PIECES, of_table)


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


def energy_of_one(w, x):
    def wave(x):
        return jnp.tanh(x @ w).sum()

    return -jnp.trace(jax.hessian(wave)(x)) / 2


def local_energy(w, x):
    return jax.vmap(energy_of_one, (None, 0))(w, x)


def local_energy_by_hand(w, x):
    pieces = x.reshape(16, -1, x.shape[1])
    return jax.lax.map(lambda x: local_energy(w, x), pieces).reshape(-1)


def convolutions(x, k):
    for _ in range(3):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"))
    return x


def spectrum(x):
    return jnp.abs(jnp.fft.fft(x)) ** 2


def lagged(x):
    y = jnp.tanh(x)
    return y[:-1] @ y[1:]


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
        attention,
        ((4096, 64),) * 3,
        ({0: PIECES}, None, None),
        {BY_HAND: attention_by_hand, LAX_MAP: rows_by_lax_map(attention)},
    ),
    "layer norm and MLP": Program(
        mlp,
        ((ROWS, 64), (64, 512), (512, 64)),
        ({0: PIECES}, None, None),
        {BY_HAND: mlp_by_hand, LAX_MAP: rows_by_lax_map(mlp)},
    ),
    "cross-entropy with gradient": Program(
        jax.value_and_grad(cross_entropy, (0, 1)),
        ((2048, 64), (64, 8192)),
        ({0: PIECES}, None),
        {OPTAX: cross_entropy_by_optax},
    ),
    "kernel times vector": Program(
        kernel,
        ((4096, 8), (4096, 8), (4096, 1)),
        ({0: PIECES}, None, None),
        {BY_HAND: kernel_by_hand, LAX_MAP: rows_by_lax_map(kernel)},
    ),
    "k-means step": Program(k_means_step, ((ROWS, 16), (64, 16)), ({0: PIECES}, None)),
    "clipped gradients of samples": Program(
        clipped_gradient,
        ((64, 64), (2048, 64), (2048, 64)),
        (None, {0: PIECES}, {0: PIECES}),
        {OPTAX: microbatch(clipped_gradient, (1, 2), 2048 // PIECES, MEAN)},
    ),
    "local energy": Program(
        local_energy,
        ((32, 64), (2048, 32)),
        (None, {0: PIECES}),
        {
            BY_HAND: local_energy_by_hand,
            NETKET: vmap_in_chunks(energy_of_one, 2048 // PIECES),
        },
    ),
    "convolutions": Program(
        convolutions, ((1, 8, 512, 512), (8, 8, 3, 3)), ({2: PIECES}, None)
    ),
    "FFT of a batch": Program(
        spectrum, ((2048, 2048),), ({0: PIECES},), {LAX_MAP: rows_by_lax_map(spectrum)}
    ),
    "ODE step": Program(
        ode_step,
        ((ROWS, 128), (128, 128)),
        ({0: PIECES}, None),
        {LAX_MAP: rows_by_lax_map(ode_step)},
    ),
    "moving statistics": Program(moving, ((ROWS, 256),), ({0: PIECES},)),
    "lagged product": Program(
        lagged,
        ((PIECES * 64,),),
        ({0: PIECES},),
        {OPTAX: microbatch(lagged, 0, 64, SUM)},
    ),
}


def compiled(fun: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.jit(fun).lower(*arguments).compile(compiler_options=OPTIONS)


class Measured(NamedTuple):
    """What a program took.

    Attributes:
      temporaries: beside the whole program's; None for one that has none as a whole.
      seconds: the median of each contender.
      wrong: those that give something else than the function.
    """

    temporaries: float | None
    seconds: Mapping[str, float]
    wrong: frozenset[str]


def measured(program: Program, repeats: int) -> Measured:
    random = np.random.default_rng(0)
    arguments = tuple(
        jnp.asarray(random.standard_normal(shape, np.float32) / 4)
        for shape in program.shapes
    )
    forms = {
        OURS: sm.chunked(program.fun, program.in_slices),
        WHOLE: program.fun,
        **program.others,
    }
    made = {name: compiled(form, arguments) for name, form in forms.items()}
    expected = made[WHOLE](*arguments)
    wrong = {
        name for name, form in made.items() if not is_close(form(*arguments), expected)
    }
    assert OURS not in wrong
    contenders = {
        name: Contender(lambda f=f: jax.block_until_ready(f(*arguments)))
        for name, f in made.items()
    }
    samples = interleave(contenders, repeats)
    ours, whole = (
        made[name].memory_analysis().temp_size_in_bytes for name in (OURS, WHOLE)
    )
    medians = {name: statistics.median(each) for name, each in samples.items()}
    # What is fused to nothing as a whole leaves nothing to save.
    return Measured(ours / whole if whole else None, medians, frozenset(wrong))


def is_close(results: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return all(np.allclose(a, b, rtol=2e-2, atol=2e-3) for a, b in pairs)


def told(ratio: float, limit: float) -> str:
    return f"{ratio:5.2f} {'ok' if ratio <= limit else 'MISS'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, shardmap {sm.__version__}, {PIECES} pieces")
    print(f"{'':30} temporaries  time/whole  time/others")
    times = []
    for name, program in PROGRAMS.items():
        if options.only not in name:
            continue
        found = measured(program, options.repeats)
        ours = found.seconds[OURS]
        times.append(ours / found.seconds[WHOLE])
        saved = found.temporaries
        needed = "none whole" if saved is None else told(saved, MOST_TEMPORARIES)
        line = f"{name:30} {needed:11}  {times[-1]:10.2f}"
        for other in program.others:
            ratio = told(ours / found.seconds[other], MOST_TIMES[other])
            line += f"  {other} {'wrong' if other in found.wrong else ratio.strip()}"
        print(line, flush=True)
    print(f"time/whole in the median: {told(statistics.median(times), MOST_TIME)}")


if __name__ == "__main__":
    main()
