"""Random programs over arrays that are cut anyhow, of every way to cut them.

Each operation is a function of its own, so that the line of what it sends names it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

SIZES = {"data": 4, "model": 2}
MESH = sm.make_mesh(SIZES)
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
SPECS = [
    P(),
    P("data"),
    P("model"),
    P(None, "data"),
    P(None, "model"),
    P("data", "model"),
    P("model", "data"),
    P(("data", "model")),
    P(None, ("data", "model")),
]
SIDE = 16
X = np.ones((SIDE, SIDE), np.float32)


class Program(NamedTuple):
    """A function, what it is called with, and the operations in it.

    Attributes:
      around: gives what stands around the call, such as a mesh that is set.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    names: frozenset[str]
    around: Callable[[], Any]

    def compiled(self) -> jax.stages.Compiled:
        fun = self.fun if hasattr(self.fun, "lower") else jax.jit(self.fun)
        with self.around():
            return fun.lower(*self.args).compile()

    def explain(self, **kwargs: Any) -> sm.Explanation:
        with self.around():
            return sm.explain(self.fun, **kwargs)(*self.args)


def nothing() -> Any:
    return jax.default_device(None)


# What the partitioner cuts: functions of two matrices, to one


def product(x, w):
    return x @ w


def centre(x, w):
    return x - x.mean(0, keepdims=True)


def normalise(x, w):
    return x / (1 + jnp.abs(x).sum(1, keepdims=True))


def transpose(x, w):
    return x.T + w


def rolled(x, w):
    return jnp.roll(x, 1, 0)


def ordered(x, w):
    return jnp.sort(x, 0)


def backwards(x, w):
    return x[::-1] + w


def repeated(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]


def counted(x, w):
    return lax.fori_loop(0, 4, lambda k, c: c - c.mean(1, keepdims=True) * k, x)


def chosen(x, w):
    return lax.cond(w[0, 0] > 0, lambda c: c @ c, lambda c: c + 1, x)


def picked(x, w):
    return x[jnp.arange(SIDE)[::-1] // 2] * w


def written(x, w):
    return x.at[jnp.arange(0, SIDE, 2)].add(w[: SIDE // 2])


def summed_up(x, w):
    return jnp.cumsum(x, 1)


def reshaped(x, w):
    return x.reshape(-1)[::2].repeat(2).reshape(x.shape)


def stacked(x, w):
    return jnp.concatenate([x[SIDE // 2 :], w[: SIDE // 2]])


def best(x, w):
    return x * jnp.argmax(x, 1, keepdims=True).astype(x.dtype)


def mapped_rows(x, w):
    return jax.vmap(lambda row: row * row.sum())(x)


def smoothed(x, w):
    kernel = w[None, None, :3, :3]
    return lax.conv_general_dilated(x[None, None], kernel, (1, 1), "SAME")[0, 0]


PARTITIONED = [
    product, centre, normalise, transpose, rolled, ordered, backwards, repeated,
    counted, chosen, picked, written, summed_up, reshaped, stacked, best, mapped_rows,
    smoothed,
]  # fmt: skip


# What moves by the program's own word: functions of a block and axes, to such a block


def add_all(x, names):
    return lax.psum(x, names)


def mean_of(x, names):
    return x - lax.pmean(x, names)


def most(x, names):
    return x + lax.pmax(lax.stop_gradient(x).sum(0, keepdims=True), names)


def gather(x, names):
    return x * lax.all_gather(x, names).sum(0)


def gather_tiled(x, names):
    return x + lax.all_gather(x, names, tiled=True).mean(0, keepdims=True)


def scatter(x, names):
    wide = jnp.tile(x, (SIDE // 2, 1))
    return x + lax.psum_scatter(wide, names, tiled=True).sum()


def exchange(x, names):
    wide = jnp.tile(x, (SIDE // 2, 1))
    return x + lax.all_to_all(wide, names, 0, 1, tiled=True).sum()


def shift(x, names):
    name = names[0]
    size = SIZES[name]
    return lax.ppermute(x, name, [(k, (k + 1) % size) for k in range(size)])


def shift_some(x, names):
    return x + lax.ppermute(x, names[-1], [(0, 1)])


def add_in_steps(x, names):
    def step(c, _):
        return c - lax.pmean(c, names), None

    return lax.scan(step, x, None, length=5)[0]


def add_in_branch(x, names):
    return lax.cond(
        lax.psum(x.sum(), names) > 0, lambda c: lax.psum(c, names), lambda c: c, x
    )


def shift_twice(x, names):
    def step(_, c):
        return shift(c, names) + lax.psum(c[:1], names)

    return lax.fori_loop(0, 2, step, x)


def two_sums(x, names):
    a, b = lax.psum((x, x[:1] * 2), names)
    return a + b


SENT = [
    add_all, mean_of, most, gather, gather_tiled, scatter, exchange, shift, shift_some,
    add_in_steps, add_in_branch, shift_twice, two_sums,
]  # fmt: skip


def program(seed: int) -> Program:
    """The program of a number."""
    random = np.random.default_rng(seed)
    kinds = [partitioned, in_shard_map, both, explicit, in_spmap, in_mesh_map]
    return kinds[seed % len(kinds)](random)


def pick(random: Any, *among: Any) -> Any:
    return among[random.integers(len(among))]


def differentiated(random: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its gradient, or a sum of its results."""

    def total(*args):
        return jnp.sum(fun(*args) ** 2)

    return pick(random, fun, fun, jax.grad(total), total)


def partitioned(random: Any) -> Program:
    steps = [(pick(random, *PARTITIONED), pick(random, *SPECS)) for _ in range(3)]

    def fun(x, w):
        for operation, spec in steps:
            sharding = NamedSharding(MESH, spec)
            x = lax.with_sharding_constraint(operation(x, w), sharding)
        return x

    shardings = tuple(NamedSharding(MESH, pick(random, *SPECS)) for _ in range(2))
    jitted = jax.jit(differentiated(random, fun), in_shardings=shardings)
    return Program(jitted, (X, X), names_of(o for o, _ in steps), nothing)


def names_of(operations: Any) -> frozenset[str]:
    return frozenset(operation.__name__ for operation in operations)


def body(random: Any, axes: tuple[str, ...]) -> tuple[Callable[..., Any], frozenset]:
    """Some operations that send, one after the other, over some of the axes."""
    steps = [
        (
            pick(random, *SENT),
            pick(random, *((name,) for name in axes), axes),
        )
        for _ in range(random.integers(1, 4))
    ]

    def fun(x):
        for operation, names in steps:
            x = operation(jnp.sin(x), names)
        return x

    called = {shift} if any(o is shift_twice for o, _ in steps) else set()
    return fun, names_of({*(o for o, _ in steps), *called})


def in_shard_map(random: Any) -> Program:
    fun, names = body(random, ("data", "model"))
    spec = pick(random, P("data", "model"), P(("data", "model")), P("model", "data"))
    mapped = jax.shard_map(
        fun, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False
    )
    return Program(differentiated(random, mapped), (X,), names, nothing)


def both(random: Any) -> Program:
    """A map in what the partitioner cuts."""
    fun, names = body(random, ("data", "model"))
    mapped = jax.shard_map(
        fun, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    before, after = pick(random, *PARTITIONED), pick(random, *PARTITIONED)

    def whole(x, w):
        return after(mapped(before(x, w)), w)

    shardings = tuple(NamedSharding(MESH, pick(random, *SPECS)) for _ in range(2))
    jitted = jax.jit(differentiated(random, whole), in_shardings=shardings)
    # In the gradient, what all devices have is summed up in the line of the map.
    names = names | names_of([before, after, whole])
    return Program(jitted, (X, X), names, nothing)


def explicit(random: Any) -> Program:
    """Axes are part of the types; what cannot be cut so is first made whole."""
    operations = [product, centre, normalise, transpose, mapped_rows, repeated]
    steps = [(pick(random, *operations), pick(random, *SPECS)) for _ in range(3)]

    def fun(x, w):
        for operation, spec in steps:
            x, whole = jax.sharding.reshard((x, w), P())
            x = jax.sharding.reshard(operation(x, whole), spec)
        return x

    args = tuple(
        jax.device_put(X, NamedSharding(EXPLICIT, pick(random, *SPECS)))
        for _ in range(2)
    )
    names = names_of(o for o, _ in steps) | {"fun"}
    return Program(jax.jit(fun), args, names, functools.partial(jax.set_mesh, EXPLICIT))


def in_spmap(random: Any) -> Program:
    steps = [pick(random, *SENT[:5], *SENT[9:11], two_sums) for _ in range(2)]

    def fun(x):
        for operation in steps:
            x = operation(jnp.sin(x), ("data",))
        return x

    size = int(pick(random, 8, 16, 24, 13))
    mapped = sm.spmap(fun, "data", lowering=pick(random, "manual", "manual", "spmd"))
    fun = differentiated(random, mapped)
    return Program(fun, (np.ones((size, 2, 16), np.float32),), names_of(steps), nothing)


def in_mesh_map(random: Any) -> Program:
    fun, names = body(random, ("data", "model"))
    axes = {"data": 0, "model": 1}
    mapped = sm.mesh_map(fun, MESH, (axes,), axes)
    return Program(differentiated(random, mapped), (X,), names, nothing)
