"""What the compilers of TPUs and GPUs record is read as what their programs do."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

KB, MB = 1 << 10, 1 << 20
MACHINES = {"tpu": "v5e:2x4", "cuda": "h100:8"}


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
    return mapped(lambda x: lax.psum(x, "i"), devices), shape(8, 8, 128, dtype="f8")


def ragged(devices):
    """An all-to-all of parts whose sizes the running program knows."""

    def fun(x, room, *where):
        return lax.ragged_all_to_all(x, room, *where, axis_name="i")

    where = [shape(8, 8, dtype=np.int32)] * 4
    return mapped(fun, devices), *[shape(8, 64, 128)] * 2, *where


def broadcast(devices):
    return mapped(lambda x: lax.pbroadcast(x, "i", 2), devices), shape(8, 64)


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


def convolutions(devices):
    """Of a loop, with padding and strides."""

    def fun(x, kernels):
        def layer(x, w):
            return jnp.tanh(lax.conv(x, w, (1, 1), "SAME")), None

        return lax.scan(layer, x, kernels)[0]

    images, kernels = shape(8, 32, 64, 32, 32), shape(5, 64, 64, 3, 3)
    return mapped(fun, devices, in_axes=(0, None)), images, kernels


SENT = {
    # A gather is in three fusions, each with a part of it.
    ("tpu", fsdp): {
        ("all-gather", "all_gather", 1, 64 * KB, 512 * KB): 3,
        ("reduce-scatter", "psum_scatter", 1, MB, 128 * KB): 3,
    },
    # In each of the eight steps of a scan, in bfloat16.
    ("tpu", ring): {("collective-permute", "ppermute", 8, 32 * KB, 32 * KB): 2},
    ("tpu", small): {
        ("all-reduce", "psum_scatter", 1, 4 * KB, 4 * KB): 1,
        ("all-reduce", "all_gather", 1, 32, 32): 1,
    },
    ("tpu", double): {("all-gather", "psum", 1, 4 * KB, 32 * KB): 2},
    ("tpu", ragged): {
        ("ragged-all-to-all", "ragged_all_to_all", 1, 32 * KB, 32 * KB): 1
    },
    ("tpu", offload): {},
    ("tpu", kernel): {},
    ("tpu", counted): {
        ("all-reduce", "psum", 21, 4 * KB, 4 * KB): 1,
        ("all-reduce", "pmax", None, 4 * KB, 4 * KB): 1,
    },
    ("tpu", doubled): {("all-reduce", "psum", None, 4 * KB, 4 * KB): 1},
    ("cuda", ring): {("collective-permute", "ppermute", 8, 64 * KB, 64 * KB): 2},
    ("cuda", large_fsdp): {
        ("all-gather", "all_gather", 1, 8 * MB, 64 * MB): 3,
        ("reduce-scatter", "psum_scatter", 1, 64 * MB, 8 * MB): 3,
    },
    ("cuda", data_parallel): {("all-reduce", "psum", 1, 64 * MB, 64 * MB): 3},
    ("cuda", ragged): {
        ("ragged-all-to-all", "ragged_all_to_all", 1, 32 * KB, 32 * KB): 1
    },
    ("cuda", broadcast): {("collective-broadcast", "pbroadcast", 1, 256, 256): 1},
    ("cuda", counted): {
        ("all-reduce", "psum", 21, 4 * KB, 4 * KB): 1,
        ("all-reduce", "pmax", None, 4 * KB, 4 * KB): 1,
    },
    ("cuda", double): {("all-reduce", "psum", 1, 8 * KB, 8 * KB): 1},
}
NOTES = {
    ("tpu", kernel): ["Kernels, such as those of Pallas,", "What callbacks send to"],
    ("tpu", ragged): ["A ragged all-to-all counts as if"],
    ("cuda", ragged): ["A ragged all-to-all counts as if"],
    ("cuda", data_parallel): [],
}
RING = 8 * 2 * (2 * 128**3)
IN_PLACE = 30 * 3 + 2 * 2  # The places of a window of 3 along 32 that are not padding.
CONVOLUTIONS = 5 * 2 * 32 * 64 * 64 * IN_PLACE**2
PRODUCTS = {
    ("tpu", ring): RING,
    ("cuda", ring): RING,  # Of which it makes parts, and adds them up.
    ("tpu", fsdp): 8 * 2 * 64 * 512**2,
    ("cuda", large_fsdp): 8 * 2 * 64 * 4096**2,
    ("tpu", convolutions): CONVOLUTIONS,
    ("cuda", convolutions): CONVOLUTIONS,
}


def explained(platform, program):
    with jax.enable_x64(program is double):
        fun, *args = program(sm.devices(MACHINES[platform]))
        return sm.explain(fun)(*args)


@pytest.mark.parametrize(
    ("platform", "program"), SENT, ids=lambda each: getattr(each, "__name__", each)
)
def test_what_is_sent_is_counted_once(platform, program):
    report = explained(platform, program)
    sent = collections.Counter(
        (each.kind, each.operation, each.count, each.bytes_in, each.bytes_out)
        for each in report.collectives
    )
    assert sent == SENT[platform, program]
    for each in report.collectives:
        assert not each.added_by_partitioner
        assert each.axes == ("i",)
        assert each.group_size == 8
        assert "tests/compilers/test_records.py:" in each.source
    starts = NOTES.get((platform, program))
    if starts is not None:
        assert len(report.notes) == len(starts)
        for note, start in zip(report.notes, starts, strict=True):
            assert note.startswith(start)
    assert sum(each.bytes for each in report.largest) <= report.peak_bytes
    assert report.cost.peak_bytes == (
        report.cost.argument_bytes
        + report.cost.output_bytes
        + report.cost.temporary_bytes
    )


@pytest.mark.parametrize(
    ("platform", "program"), PRODUCTS, ids=lambda each: getattr(each, "__name__", each)
)
def test_products_count_in_every_step(platform, program):
    flops = explained(platform, program).cost.flops
    # Sums and products of elements are there, too.
    assert PRODUCTS[platform, program] <= flops <= 1.05 * PRODUCTS[platform, program]


def test_operands_have_types():
    collectives = explained("cuda", large_fsdp).collectives
    assert {(each.before, each.after) for each in collectives} == {
        ("f32[512,4096]", "f32[4096,4096]"),
        ("f32[4096,4096]", "f32[512,4096]"),
    }


def test_what_is_on_the_host_or_the_chip_is_not_in_the_main_memory():
    report = explained("tpu", offload)
    assert report.cost.host_bytes == 2 * 512 * KB  # Before and after.
    types = {each.type for each in report.largest if each.bytes >= 512 * KB}
    assert types == {"f32[256,512]"}
    # The weights, the slopes and the new weights; the momentum on its way in and out.
    assert 3 * 512 * KB < report.peak_bytes <= 1.05 * 5 * 512 * KB
