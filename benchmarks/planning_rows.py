"""Planning long programs, and sums over leading axes in pieces."""

from typing import Any

import numpy as np

from benchmarks.harness import OURS, Benchmark, Contender

LIMIT_TRACING = 5
EQUATIONS, SHARDS = 5_000, 1_000


def deep(x: Any) -> Any:
    import jax.numpy as jnp

    for _ in range(EQUATIONS // 3):
        x = jnp.sin(x) * 0.5 + x
    return x


def many_equations() -> dict[str, Contender]:
    """Planning alone: what every shard of a long program reads, runs and writes."""
    import jax

    from shardmap.planning.plan import plan

    x = jax.ShapeDtypeStruct((SHARDS * 16, 8), np.float32)

    def recipes() -> None:
        [stage] = plan(deep, x, in_slices={0: SHARDS}).stages
        for number in range(SHARDS):
            stage.recipe(number)

    return {
        OURS: Contender(recipes),
        "tracing the function": Contender(lambda: jax.make_jaxpr(lambda x: deep(x))(x)),
    }


LAYERS, WIDTH, ROWS = 12, 64, 4096


def layers(x: Any, weights: Any) -> Any:
    import jax

    for w in weights:
        x = x + jax.nn.gelu(jax.nn.softmax(x @ w) @ w)
    return x


def within_memory() -> dict[str, Contender]:
    """Planning in as few pieces as fit: the shards are compiled, as for a run."""
    import jax

    from shardmap.planning.plan import plan

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * LAYERS
    small = jax.ShapeDtypeStruct((ROWS // 8, WIDTH), np.float32)

    def planned() -> None:
        plan(layers, x, weights, memory="1 MB")

    def compiled() -> None:
        plan(layers, x, weights, in_slices=({0: 8}, None))
        jax.jit(lambda *args: layers(*args)).lower(small, weights).compile()

    return {
        OURS: Contender(planned),
        "given pieces, one compiled": Contender(compiled),
    }


FIELDS, PIECES = (256, 256, 256), 8


def squares(u: Any) -> Any:
    return (u * u).mean(0)


def over_time() -> dict[str, Contender]:
    """A mean over time of fields, which lie one after the other in memory."""
    import jax
    import jax.numpy as jnp

    from shardmap.planning.chunked import chunked
    from shardmap.planning.plan import plan

    host = np.random.default_rng(0).standard_normal(FIELDS, np.float32)
    u = jnp.asarray(host)

    @jax.jit
    def loop(u):
        def add(k, total):
            return total + u[k] * u[k]

        return jax.lax.fori_loop(0, u.shape[0], add, jnp.zeros(u.shape[1:])) / len(u)

    made = plan(squares, u, in_slices={0: PIECES})
    pieces, whole = jax.jit(chunked(squares, {0: PIECES})), jax.jit(squares)
    return {
        OURS: Contender(lambda: jax.block_until_ready(pieces(u))),
        "as a plan": Contender(lambda: made.run(u)),
        "one jax.jit": Contender(lambda: jax.block_until_ready(whole(u))),
        "a loop by hand": Contender(lambda: jax.block_until_ready(loop(u))),
        "numpy": Contender(lambda: squares(host)),
    }


BENCHMARKS = (
    Benchmark(
        "plan within memory",
        "12 layers in as few pieces as fit into 1 MB, their shards compiled",
        within_memory,
        {"given pieces, one compiled": 4},
        repeats=3,
    ),
    Benchmark(
        "mean over time, chunked",
        "the mean of squares over the leading axis, 64 MiB in 8 pieces",
        over_time,
        {"one jax.jit": 1.2, "a loop by hand": 1.5, "numpy": 1.0},
        repeats=10,
    ),
    Benchmark(
        "plan, many equations",
        "tracing and planning 5,000 equations x 1,000 shards",
        many_equations,
        {"tracing the function": LIMIT_TRACING},
        repeats=5,
    ),
)
