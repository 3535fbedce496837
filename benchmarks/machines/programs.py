"""Eight programs of pods, as `spmap`, by hand with `jax.shard_map`, and as `jax.pmap`.

Each is a function of eight devices, and gives for each way of writing it the function
and the avals of its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardmap as sm
from benchmarks.harness import OURS

N = 8
BY_HAND = "jax.shard_map"
PMAP = "jax.pmap"
RING = [(k, (k + 1) % N) for k in range(N)]

Avals = Sequence[Any]
Forms = Mapping[str, tuple[Callable[..., Any], Avals]]


def aval(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def avals(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def forms(
    body: Callable[..., Any],
    arguments: Avals,
    devices: Sequence[jax.Device],
    in_axes: tuple[int | None, ...],
    out_axes: Any = 0,
    donate: tuple[int, ...] = (),
) -> Forms:
    """The three ways to run a function of one element on each of the devices."""
    options: dict[str, Any] = {"in_axes": in_axes, "out_axes": out_axes}
    is_axis = {"is_leaf": lambda axis: axis is None}

    def specs(axes: Any) -> Any:
        return jax.tree.map(lambda a: P() if a is None else P("i"), axes, **is_axis)

    def block(*args: Any) -> Any:
        elements = [
            x if axis is None else jax.tree.map(lambda leaf: leaf[0], x)
            for x, axis in zip(args, in_axes, strict=True)
        ]
        results = body(*elements)

        def back(axis: int | None, tree: Any) -> Any:
            return tree if axis is None else jax.tree.map(lambda y: y[None], tree)

        return jax.tree.map(back, out_axes, results, **is_axis)

    by_hand = jax.shard_map(
        block,
        mesh=Mesh(np.array(devices), ("i",)),
        in_specs=specs(in_axes),
        out_specs=specs(out_axes),
        check_vma=False,
    )
    ours = sm.spmap(body, "i", devices=devices, donate_argnums=donate, **options)
    pmap = jax.pmap(body, "i", devices=devices, donate_argnums=donate, **options)
    return {
        OURS: (ours, arguments),
        BY_HAND: (jax.jit(by_hand, donate_argnums=donate), arguments),
        PMAP: (pmap, arguments),
    }


def data_parallel(devices: Sequence[jax.Device]) -> Forms:
    """A step of gradient descent with momentum, of 4 MB of weights."""

    def step(state, batch):
        weights, momentum = state

        def loss(weights):
            hidden = jnp.tanh(batch @ weights["in"])
            return ((hidden @ weights["out"] - batch) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        gradient = lax.pmean(gradient, "i")
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
        return (weights, momentum), lax.pmean(value, "i")

    weights = {"in": aval(512, 1024), "out": aval(1024, 512)}
    arguments = ((weights, weights), aval(N, 64, 512))
    return forms(step, arguments, devices, (None, 0), None, donate=(0,))


def ring_attention(devices: Sequence[jax.Device]) -> Forms:
    """Keys and values go around, and each device keeps its queries."""

    def attend(q, k, v):
        def step(carry, _):
            k, v, peak, total, output = carry
            scores = q @ k.T
            highest = jnp.maximum(peak, scores.max(1, keepdims=True))
            weights = jnp.exp(scores - highest)
            before = jnp.exp(peak - highest)
            total = total * before + weights.sum(1, keepdims=True)
            output = output * before + weights @ v
            k, v = lax.ppermute((k, v), "i", RING)
            return (k, v, highest, total, output), None

        start = jnp.full((q.shape[0], 1), -jnp.inf), jnp.zeros((q.shape[0], 1))
        carry = k, v, *start, jnp.zeros_like(q)
        (*_, total, output), _ = lax.scan(step, carry, length=N)
        return output / total

    rows = aval(N, 128, 128)
    return forms(attend, (rows, rows, rows), devices, (0, 0, 0))


def fully_sharded(devices: Sequence[jax.Device]) -> Forms:
    """Six layers, whose weights are gathered for each and are sharded between them."""

    def step(weights, batch):
        def layer(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "i", tiled=True))

        def loss(weights):
            x = batch
            for w in weights:
                x = jax.checkpoint(layer)(x, w)
            return (x**2).mean()

        gradient = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradient, strict=True)]

    weights = [aval(N, 64, 512) for _ in range(6)]
    arguments = (weights, aval(N, 64, 512))
    return forms(step, arguments, devices, (0, 0), donate=(0,))


def tensor_parallel(devices: Sequence[jax.Device]) -> Forms:
    """Two rows of devices share the batch, and four columns the hidden features."""

    def part(w, v, x):
        def loss(w, v):
            return (lax.psum(jnp.tanh(x @ w) @ v, "model") ** 2).mean()

        return lax.pmean(jax.grad(loss, (0, 1))(w, v), "i")

    model = sm.spmap(part, "model", in_axes=(0, 0, None))
    mesh = Mesh(np.array(devices).reshape(2, 4), ("i", "model"))
    ours = sm.spmap(model, "i", devices=devices, in_axes=(None, None, 0), out_axes=None)

    def block(w, v, x):
        return jax.tree.map(lambda g: g[None], part(w[0], v[0], x[0]))

    by_hand = jax.shard_map(
        block,
        mesh=mesh,
        in_specs=(P("model"), P("model"), P("i")),
        out_specs=P("model"),
        check_vma=False,
    )
    arguments = (aval(4, 256, 256), aval(4, 256, 256), aval(2, 64, 256))
    return {OURS: (ours, arguments), BY_HAND: (jax.jit(by_hand), arguments)}


def mixture_of_experts(devices: Sequence[jax.Device]) -> Forms:
    """Tokens travel to the device of their expert, and back."""

    def layer(w, tokens):
        sent = lax.all_to_all(tokens, "i", 0, 0, tiled=True)
        return lax.all_to_all(jnp.tanh(sent @ w), "i", 0, 0, tiled=True)

    return forms(layer, (aval(N, 128, 128), aval(N, 64, 128)), devices, (0, 0))


def halo_exchange(devices: Sequence[jax.Device]) -> Forms:
    """A hundred steps of the heat equation, with a row from each neighbour."""

    def steps(u):
        def step(_, u):
            above = lax.ppermute(u[-1:], "i", RING)
            below = lax.ppermute(u[:1], "i", [(b, a) for a, b in RING])
            wide = jnp.concatenate([above, u, below])
            return u + 0.1 * (wide[2:] - 2 * u + wide[:-2])

        return lax.fori_loop(0, 100, step, u)

    return forms(steps, (aval(N, 64, 256),), devices, (0,), donate=(0,))


def evolution(devices: Sequence[jax.Device]) -> Forms:
    """64 candidates on eight devices, each with noise and a fitness of its own."""

    def candidate(weights, noise, batch):
        fitness = -(((batch @ (weights + noise)) - 1) ** 2).mean()
        score = (fitness - lax.pmean(fitness, "p")) / 64
        return weights + 0.1 * lax.psum(score * noise, "p")

    options: dict[str, Any] = {"in_axes": (None, 0, None), "out_axes": None}
    mesh = Mesh(np.array(devices), ("i",))
    arguments = (aval(256, 64), aval(64, 256, 64), aval(128, 256))

    def block(weights, noise, batch):
        def one(noise):
            fitness = -(((batch @ (weights + noise)) - 1) ** 2).mean()
            score = (fitness - lax.pmean(fitness, ("i", "p"))) / 64
            return weights + 0.1 * lax.psum(score * noise, ("i", "p"))

        return jax.vmap(one, axis_name="p", out_axes=None)(noise)

    by_hand = jax.shard_map(
        block,
        mesh=mesh,
        in_specs=(P(), P("i"), P()),
        out_specs=P(),
        check_vma=False,
    )
    ours = sm.spmap(candidate, "p", devices=devices, **options)
    return {OURS: (ours, arguments), BY_HAND: (jax.jit(by_hand), arguments)}


def pipeline(devices: Sequence[jax.Device]) -> Forms:
    """Eight stages, one a device, and eight batches that go from each to the next."""

    def stages(w, batches):
        index = lax.axis_index("i")

        def step(carry, k):
            x, outputs = carry
            x = jnp.where(index == 0, batches[jnp.minimum(k, N - 1)], x)
            x = jnp.tanh(x @ w)
            last = jnp.where(index == N - 1, x, 0.0)
            outputs = lax.dynamic_update_index_in_dim(
                outputs, last, jnp.maximum(k - N + 1, 0), 0
            )
            return (lax.ppermute(x, "i", RING), outputs), None

        carry = jnp.zeros_like(batches[0]), jnp.zeros_like(batches)
        (_, outputs), _ = lax.scan(step, carry, jnp.arange(2 * N - 1))
        return lax.psum(outputs, "i")

    arguments = (aval(N, 128, 128), aval(N, 16, 128))
    return forms(stages, arguments, devices, (0, None), None)


PROGRAMS: dict[str, Callable[[Sequence[jax.Device]], Forms]] = {
    "data parallel, momentum": data_parallel,
    "ring attention": ring_attention,
    "fully sharded, 6 layers": fully_sharded,
    "tensor x data parallel": tensor_parallel,
    "mixture of experts": mixture_of_experts,
    "halo exchange, 100 steps": halo_exchange,
    "evolution, 64 on 8": evolution,
    "pipeline, 8 stages": pipeline,
}
