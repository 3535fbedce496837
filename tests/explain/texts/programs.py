"""Programs that XLA for TPU and for GPUs compiled, and the texts of what it made.

The texts are in folders for the releases of JAX, and need no compiler to be read.
``python -m tests.explain.texts.programs`` makes them again, with the compilers of TPUs
and GPUs installed. What `explain` does not read of them is left out.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

FOLDER = pathlib.Path(__file__).parent
RELEASES = ("0.10", "0.12")


def text_of(name, release):
    """The text of a program, by the XLA of a release of JAX."""
    return (FOLDER / release / f"{name}.hlo").read_text(encoding="utf-8")


def shape(*sizes, dtype=np.float32, **options):
    return jax.ShapeDtypeStruct(sizes, dtype, **options)


def mapped(fun, devices, **options):
    return jax.jit(sm.spmap(fun, "i", devices=devices, **options))


def ring(devices):
    """Attention to the keys and values of all devices, which go around in a scan."""
    following = [(k, (k + 1) % 8) for k in range(8)]

    def attention(q, k, v):
        def step(carry, _):
            k, v, total, weight = carry
            scores = jnp.exp(q @ k.T)
            total, weight = total + scores @ v, weight + scores.sum(-1)
            return (*lax.ppermute((k, v), "i", following), total, weight), None

        start = (k, v, jnp.zeros_like(q), jnp.zeros(len(q)))
        (_, _, total, weight), _ = lax.scan(step, start, length=8)
        return total / weight[:, None]

    return mapped(attention, devices), *[shape(8, 128, 128)] * 3


def _squared(weights, x, gathered):
    for w in weights:
        x = jnp.tanh(x @ gathered(w))
    return (x * x).mean()


def fsdp(devices, size=512):
    """Weights that are sharded by rows, gathered for each layer."""

    def gathered(w):
        return lax.all_gather(w, "i", tiled=True)

    def step(weights, x):
        slopes = jax.grad(_squared)(weights, x, gathered)
        return [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)]

    weights = [shape(8, size // 8, size)] * 3
    return mapped(step, devices), weights, shape(8, 64, size)


def large_fsdp(devices):
    """Sizes of which XLA for GPUs sends some on the side."""
    return fsdp(devices, 4096)


def data_parallel(devices):
    """Replicated weights, and gradients that are summed."""

    def step(weights, x):
        slopes = jax.grad(_squared)(weights, x, lambda w: w)
        slopes = lax.psum(slopes, "i")
        return [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)]

    fun = mapped(step, devices, in_axes=(None, 0), out_axes=None)
    return fun, [shape(4096, 4096)] * 3, shape(8, 64, 4096)


def small(devices):
    """A reduce-scatter and an all-gather that XLA for TPU writes as all-reduces."""

    def fun(x):
        return lax.psum_scatter(x, "i"), lax.all_gather(x.sum(), "i")

    return mapped(fun, devices), shape(8, 8, 128)


def double(devices):
    """A sum of values of 64 bits, which XLA for TPU gathers."""

    def fun(x):
        return lax.psum(x, "i")

    return mapped(fun, devices), shape(8, 8, 128, dtype=np.float64)


def ragged(devices):
    """An all-to-all of parts whose sizes the running program knows."""

    def fun(x, room, *where):
        return lax.ragged_all_to_all(x, room, *where, axis_name="i")

    where = [shape(8, 8, dtype=np.int32)] * 4
    return mapped(fun, devices), *[shape(8, 64, 128)] * 2, *where


def broadcast(devices):
    def fun(x):
        return lax.pbroadcast(x, "i", 2)

    return mapped(fun, devices), shape(8, 64)


def offload(devices):
    """Momentum in the memory of the host."""
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))
    here, host = (
        NamedSharding(mesh, P("i"), memory_kind=kind)
        for kind in ("device", "pinned_host")
    )

    def step(weights, momentum, slope):
        momentum = 0.9 * jax.device_put(momentum, here) + slope
        return weights - 0.1 * momentum, jax.device_put(momentum, host)

    shardings = (here, host)
    fun = jax.jit(step, in_shardings=(*shardings, here), out_shardings=shardings)
    return fun, *[shape(2048, 512)] * 3


def kernel(devices):
    """A kernel of Pallas, and a callback to the host."""

    def double_it(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fun(x):
        jax.debug.print("{}", x[0, 0])
        return pl.pallas_call(double_it, out_shape=shape(*x.shape))(x)

    return mapped(fun, devices), shape(8, 8, 128)


def counted(devices):
    """Loops with a known number of steps, and one that stops when it wants."""

    def fun(x):
        def step(k, c):
            return lax.psum(c, "i") * 0.1 + k

        def nested(c, _):
            return lax.fori_loop(2, 5, step, c), None

        x = lax.scan(nested, x, length=7)[0]
        return lax.while_loop(lambda c: c[0, 0] < 9, lambda c: lax.pmax(c, "i") * 2, x)

    return mapped(fun, devices), shape(8, 8, 128)


def doubled(devices):
    """A loop whose counter does not count by a constant."""

    def step(carry):
        k, c = carry
        return 2 * k, lax.psum(c, "i")

    def fun(x):
        return lax.while_loop(lambda carry: carry[0] < 100, step, (1, x))[1]

    return mapped(fun, devices), shape(8, 8, 128)


PROGRAMS = {
    "tpu": (ring, fsdp, small, double, ragged, offload, kernel, counted, doubled),
    "cuda": (ring, large_fsdp, data_parallel, ragged, broadcast),
}


def trimmed(text):
    """The text without what is not read, and without folders of this machine."""
    root = FOLDER.parents[2]
    lines = []
    for line in text.replace(f"{root}/", "").splitlines():
        if line.startswith("HloModule"):
            partitions = re.search(r"num_partitions=\d+", line)
            line = f"HloModule {line.split()[1]} {partitions[0]}"
        line, _, config = line.partition(", backend_config=")
        steps = re.search(r'"known_trip_count":\{"n":"\d+"\}', config)
        product = re.search(r'"lhs_contracting_dimensions":\[[^]]*\]', config)
        kept = [each[0] for each in (steps, product) if each]
        if kept:
            line += f", backend_config={{{','.join(kept)}}}"
        lines.append(re.sub(r' ?scheduling_name="[^"]*"', "", line).rstrip())
    return "\n".join(lines) + "\n"


def main():
    for platform, machine in (("tpu", "v5e:2x4"), ("cuda", "h100:8")):
        for program in PROGRAMS[platform]:
            write(platform, program, sm.devices(machine))


def write(platform, program, devices):
    release = ".".join(jax.__version__.split(".")[:2])
    with jax.enable_x64(program is double):
        fun, *args = program(devices)
        compiled = fun.lower(*args).compile()
    file = FOLDER / release / f"{platform}_{program.__name__}.hlo"
    file.parent.mkdir(exist_ok=True)
    file.write_text(trimmed(compiled.as_text()), encoding="utf-8")


if __name__ == "__main__":
    main()
