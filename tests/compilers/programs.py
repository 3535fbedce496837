"""One small program for each feature of maps, to be compiled for real machines.

A program is a function of eight devices, which gives what is lowered and the avals of
its arguments. `ONE_EACH` has the functions of one element, mapped over as many elements
as devices: each can be written by hand with `jax.shard_map`, so the compiled texts are
compared. `PROGRAMS` has the rest.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardmap as sm

N = 8
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def aval(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def ring(size=N, step=1):
    return [(k, (k + step) % size) for k in range(size)]


def ragged(x):
    """Each device sends one row to each other."""
    ones, index = jnp.ones(N, np.int32), lax.axis_index("i").astype(np.int32)
    return lax.ragged_all_to_all(
        x,
        jnp.zeros_like(x),
        jnp.arange(N, dtype=np.int32),
        ones,
        jnp.full(N, index),
        ones,
        axis_name="i",
    )


@jax.custom_vjp
def scaled(x):
    return x * lax.psum(1.0, "i")


scaled.defvjp(lambda x: (scaled(x), x), lambda x, ct: (lax.pmean(ct, "i") + x,))


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda x, t: (doubled(*x), lax.psum(t[0], "i")))

ROW = aval(N, 8, 128)

# The function of one element, and the arguments of all.
ONE_EACH = {
    "psum": (lambda x: lax.psum(x, "i"), ROW),
    "psum of a tree": (
        lambda x: lax.psum({"a": x, "b": x.sum(), "c": (x > 0).sum()}, "i"),
        ROW,
    ),
    "pmean": (lambda x: lax.pmean(x, "i"), ROW),
    "pmax and pmin": (lambda x: lax.pmax(x, "i") - lax.pmin(x, "i"), ROW),
    "psum in groups": (
        lambda x: lax.psum(x, "i", axis_index_groups=HALVES),
        ROW,
    ),
    "pmax in groups": (lambda x: lax.pmax(x, "i", axis_index_groups=PAIRS), ROW),
    "all_gather": (lambda x: lax.all_gather(x, "i"), ROW),
    "all_gather tiled": (lambda x: lax.all_gather(x, "i", axis=1, tiled=True), ROW),
    "all_gather in groups": (
        lambda x: lax.all_gather(x, "i", axis_index_groups=PAIRS),
        ROW,
    ),
    "ppermute": (lambda x: lax.ppermute(x, "i", ring()), ROW),
    "ppermute to some": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)]), ROW),
    "pshuffle": (lambda x: lax.pshuffle(x, "i", [3, 1, 4, 0, 5, 7, 2, 6]), ROW),
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 0, 1), ROW),
    "all_to_all tiled": (lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), ROW),
    "all_to_all in groups": (
        lambda x: lax.all_to_all(x, "i", 0, 0, axis_index_groups=HALVES, tiled=True),
        ROW,
    ),
    "small psum_scatter": (lambda x: lax.psum_scatter(x, "i"), ROW),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        aval(N, 1024, 128),
    ),
    "psum_scatter in groups": (
        lambda x: lax.psum_scatter(x, "i", axis_index_groups=HALVES, tiled=True),
        aval(N, 1024, 128),
    ),
    "ragged_all_to_all": (ragged, ROW),
    "axis_index and axis_size": (
        lambda x: x * lax.axis_index("i").astype(x.dtype) / lax.axis_size("i"),
        ROW,
    ),
    "scan": (
        lambda x: lax.scan(
            lambda c, _: (lax.ppermute(c, "i", ring()) + 1, None), x, None, length=5
        )[0],
        ROW,
    ),
    "fori_loop": (
        lambda x: lax.fori_loop(0, 4, lambda k, c: lax.pmean(c, "i") * 2, x),
        ROW,
    ),
    "while_loop": (
        lambda x: lax.while_loop(
            lambda c: lax.psum(c.sum(), "i") < 100, lambda c: c + 1, x
        ),
        ROW,
    ),
    "cond": (
        lambda x: lax.cond(
            lax.psum(x.sum(), "i") > 0, lambda v: lax.pmax(v, "i"), jnp.sin, x
        ),
        ROW,
    ),
    "switch": (
        lambda x: lax.switch(
            lax.psum(x.sum(), "i").astype(np.int32),
            [jnp.sin, jnp.cos, lambda v: lax.psum(v, "i")],
            x,
        ),
        ROW,
    ),
    "gradient": (jax.grad(lambda x: jnp.sin(lax.pmean(x, "i")).sum()), ROW),
    "checkpoint": (
        jax.grad(jax.checkpoint(lambda x: jnp.sin(lax.psum(jnp.sin(x), "i")).sum())),
        ROW,
    ),
    "custom_vjp": (jax.grad(lambda x: scaled(x).sum()), ROW),
    "custom_jvp": (jax.grad(lambda x: doubled(x).sum()), ROW),
    "jit inside": (jax.jit(lambda x: lax.psum(x, "i") + 1), ROW),
    "vmap inside": (jax.vmap(lambda x: lax.psum(x, "i")), ROW),
    "threefry": (
        lambda k: jax.random.normal(jax.random.wrap_key_data(k), (4, 128)),
        aval(N, 2, dtype=np.uint32),
    ),
    "rbg": (
        lambda k: jax.random.normal(jax.random.wrap_key_data(k, impl="rbg"), (4, 128)),
        aval(N, 4, dtype=np.uint32),
    ),
    "bfloat16": (
        lambda x: lax.psum(x, "i"),
        aval(N, 16, 128, dtype=jnp.bfloat16),
    ),
    "float16": (lambda x: lax.pmean(x, "i"), aval(N, 16, 128, dtype=np.float16)),
    "float8": (
        lambda x: lax.all_gather(x, "i"),
        aval(N, 32, 128, dtype=jnp.float8_e4m3fn),
    ),
    "int8": (lambda x: lax.psum(x, "i"), aval(N, 32, 128, dtype=np.int8)),
    "int4": (
        lambda x: lax.ppermute(x, "i", ring()),
        aval(N, 64, 128, dtype=jnp.int4),
    ),
    "bool": (lambda x: lax.all_gather(x, "i"), aval(N, 32, 128, dtype=np.bool_)),
    "complex": (lambda x: lax.psum(x, "i"), aval(N, 8, 128, dtype=np.complex64)),
    "cholesky, qr and eigh": (
        lambda x: (
            jnp.linalg.cholesky(x @ x.T + jnp.eye(8)),
            jnp.linalg.qr(x)[1],
            jnp.linalg.eigh(x + x.T)[0],
        ),
        aval(N, 8, 8),
    ),
    "fft": (lambda x: jnp.fft.fft(x).real, ROW),
    "convolution": (
        lambda x: lax.conv_general_dilated(
            x,
            jnp.ones((3, 3, 4, 4)),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        aval(N, 1, 8, 8, 4),
    ),
    "sort and top_k": (lambda x: (jnp.sort(x), lax.top_k(x, 3)[0]), ROW),
    "pallas": (
        lambda x: pl.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
        )(x),
        ROW,
    ),
    "pallas with a grid": (
        lambda x: pl.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda k: (k, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda k: (k, 0)),
        )(x),
        aval(N, 16, 128),
    ),
}


def double(x, out):
    out[...] = x[...] * 2


def mapped(devices, name, **options):
    body, argument = ONE_EACH[name]
    return sm.spmap(body, "i", devices=devices, **options), (argument,)


def by_hand(devices, name):
    """The same with `jax.shard_map`: a block of one element on each device."""
    body, argument = ONE_EACH[name]

    def block(x):
        return jax.tree.map(lambda y: y[None], body(x[0]))

    mesh = Mesh(np.array(devices), ("i",))
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": False}
    return jax.jit(jax.shard_map(block, mesh=mesh, **specs)), (argument,)


def of_many(kind, size):
    """A collective over an axis longer than the devices, and an element's aval."""
    x = jnp.arange(1.0, size + 1)
    thirds = np.arange(size).reshape(-1, size // (3 if size % 3 == 0 else 4))
    return {
        "psum": lambda v: lax.psum(v, "i"),
        "pmax in groups": lambda v: lax.pmax(v, "i", axis_index_groups=thirds.tolist()),
        "all_gather": lambda v: lax.all_gather(v, "i"),
        "ppermute": lambda v: lax.ppermute(v, "i", ring(size)),
        "all_to_all": lambda v: lax.all_to_all(jnp.outer(x, v[0]), "i", 0, 0),
        "psum_scatter": lambda v: lax.psum_scatter(jnp.outer(x, v[0]), "i"),
    }[kind]


def soft(kind, size):
    def program(devices):
        return over(devices, of_many(kind, size), aval(size, 8, 128))

    return program


def over(devices, body, *arguments, **options):
    return sm.spmap(body, "i", devices=devices, **options), arguments


OF_MANY = (
    "psum",
    "pmax in groups",
    "all_gather",
    "ppermute",
    "all_to_all",
    "psum_scatter",
)
PROGRAMS = {
    f"{kind} of {size} elements": soft(kind, size)
    for size in (4 * N, N + 1)
    for kind in OF_MANY
}


def program(function):
    """Adds a function of devices, under its name, to the programs."""
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def step(w, x):
    """A training step of one layer."""
    gradient = jax.grad(lambda w: jnp.sin(x @ w).sum())(w)
    return w - 0.1 * lax.pmean(gradient, "i")


LAYER = (aval(128, 128), aval(N, 8, 128))
STEP = {"in_axes": (None, 0), "out_axes": None}


@program
def a_training_step(devices):
    return over(devices, step, *LAYER, **STEP)


@program
def a_training_step_with_donation(devices):
    return over(devices, step, *LAYER, **STEP, donate_argnums=0)


@program
def loops_of_batch_size(devices):
    many = aval(128, 128), aval(4 * N, 8, 128)
    return over(devices, step, *many, **STEP, batch_size=2)


@program
def as_many_as_fit(devices):
    many = aval(128, 128), aval(4 * N, 8, 128)
    return over(devices, step, *many, **STEP, batch_size=sm.AUTO, memory="1 MB")


@program
def the_partitioner(devices):
    return over(devices, step, *LAYER, **STEP, lowering="spmd")


@program
def two_axes(devices):
    inner = sm.spmap(lambda x: lax.psum(jnp.sin(x), ("i", "j")), "j")
    return over(devices, inner, aval(2, 4, 8, 128))


@program
def three_axes(devices):
    def body(x):
        return lax.psum(x, ("i", "k")) + lax.ppermute(x, "j", [(0, 1), (1, 0)])

    inner = sm.spmap(sm.spmap(body, "k"), "j")
    return over(devices, inner, aval(2, 2, 2, 8, 128))


@program
def inner_map_closes_over_the_outer_value(devices):
    def outer(x):
        return sm.spmap(lambda y: lax.psum(x * y[None], "j"), "j", out_axes=None)(x)

    return over(devices, outer, aval(2, 4, 128))


@program
def data_by_model(devices):
    def layer(w, x):
        def part(w):
            return lax.psum(jnp.sin(x @ w) @ w.T, "model")

        loss = sm.spmap(part, "model", out_axes=None)
        return lax.pmean(jax.grad(lambda w: loss(w).sum())(w), "i")

    arguments = aval(4, 128, 32), aval(2, 8, 128)
    return over(devices, layer, *arguments, **STEP)


@program
def named_mesh_axes(devices):
    mesh = sm.make_mesh({"data": 4, "model": 2}, devices=devices)
    function = sm.spmap(lambda x: lax.psum(x, "i"), "i", mesh=mesh, mesh_axes="data")
    return function, (aval(4, 8, 128),)


@program
def blocks_of_a_mesh(devices):
    mesh = sm.make_mesh({"data": 4, "model": 2}, devices=devices)
    function = sm.mesh_map(
        lambda x: lax.psum(x, "model"),
        mesh,
        in_axes={"data": 0, "model": 1},
        out_axes={"data": 0},
    )
    return function, (aval(8, 256),)


@program
def gradient_of_blocks_of_a_mesh(devices):
    mesh = sm.make_mesh({"data": 4, "model": 2}, devices=devices)
    function = sm.mesh_map(
        lambda x: jnp.sin(lax.psum(x, "model")),
        mesh,
        in_axes={"data": 0, "model": 1},
        out_axes={"data": 0},
    )
    return jax.jit(jax.grad(lambda x: function(x).sum())), (aval(8, 256),)


@program
def partitioned_blocks_of_a_mesh(devices):
    mesh = sm.make_mesh({"data": 8}, devices=devices)
    function = sm.mesh_map(
        lambda x: lax.all_gather(x, "data"),
        mesh,
        in_axes={"data": 0},
        out_axes={"data": 1},
        lowering="spmd",
    )
    return function, (aval(8, 128),)


@program
def constraint_inside(devices):
    def body(x):
        return sm.with_sharding_constraint(jnp.sin(x), (2, 1)) @ x.T

    return over(devices, body, aval(4, 8, 128))


@program
def partitions_inside(devices):
    inner = sm.sharded_jit(lambda x: jnp.sin(x) @ x.T, in_parts=(2, 1), out_parts=None)
    return over(devices, inner, aval(4, 8, 128))


def shared_and_summed(w, x):
    """A loss of weights that all share, alone and in what is added up."""
    total = lax.psum(jnp.sin(x @ w).sum(), "i")
    return jnp.tanh(w).sum() * total + (w**2).sum()


@program
def gradient_around(devices):
    loss, arguments = over(devices, shared_and_summed, *LAYER, **STEP)
    return jax.jit(jax.grad(loss)), arguments


def gradient_by_hand(devices):
    """`gradient_around` with `jax.shard_map`."""

    def block(w, x):
        return shared_and_summed(w, x[0])

    mesh = Mesh(np.array(devices), ("i",))
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    return jax.jit(jax.grad(jax.shard_map(block, mesh=mesh, **specs))), LAYER


@program
def vmap_around(devices):
    function, (_, x) = over(devices, step, *LAYER, **STEP)
    return jax.jit(jax.vmap(function, in_axes=(0, None))), (aval(3, 128, 128), x)


@program
def hessian_around(devices):
    function, (x,) = over(devices, lambda x: lax.psum(jnp.sin(x), "i"), aval(N, 2))
    return jax.jit(jax.hessian(lambda x: function(x).sum())), (x,)


@program
def linearize_around(devices):
    function, arguments = over(devices, lambda x: lax.psum(jnp.sin(x), "i"), ROW)

    def tangent(x):
        return jax.linearize(function, x)[1](x)

    return jax.jit(tangent), arguments


@program
def two_maps_in_a_jit(devices):
    first, arguments = over(devices, lambda x: lax.psum(x, "i"), ROW)
    second, _ = over(devices, lambda x: lax.pmax(x, "i"))
    return jax.jit(lambda x: second(first(x)[:4]).sum()), arguments


@program
def map_in_a_scan(devices):
    function, arguments = over(devices, lambda x: lax.pmean(jnp.sin(x), "i"), ROW)

    def steps(x):
        return lax.scan(lambda c, _: (function(c), c.sum()), x, None, length=3)

    return jax.jit(steps), arguments


@program
def map_in_a_shard_map(devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "i"))
    function = sm.spmap(lambda x: lax.psum(x, "i"), "i", mesh=mesh, mesh_axes="i")
    around = jax.shard_map(
        lambda x: function(x),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    return jax.jit(around), (aval(8, 8, 128),)


@program
def prefix_axes(devices):
    def body(batch, scale):
        return {"sum": lax.psum(batch["x"], "i"), "each": batch["x"] * scale[None]}

    return over(
        devices,
        body,
        {"x": aval(8, N, 128)},
        aval(128),
        in_axes=({"x": 1}, None),
        out_axes={"sum": None, "each": 1},
    )


@program
def keywords_and_static_arguments(devices):
    def body(x, power, *, shift):
        return lax.psum(x**power, "i") + shift

    function = sm.spmap(body, "i", devices=devices, static_broadcasted_argnums=1)
    return jax.jit(lambda x, s: function(x, 2, shift=s)), (ROW, ROW)


@program
def typed_keys(devices):
    function = sm.spmap(lambda k: jax.random.normal(k, (4, 128)), "i", devices=devices)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2 * N))
    return function, (keys,)


@program
def rbg_keys(devices):
    function = sm.spmap(lambda k: jax.random.normal(k, (4, 128)), "i", devices=devices)
    keys = jax.eval_shape(
        lambda: jax.random.split(jax.random.key(0, impl="rbg"), 2 * N)
    )
    return function, (keys,)


@program
def offloaded_residuals(devices):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def body(w, x):
        def loss(w):
            hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
            return jnp.sin(hidden @ w).sum()

        return lax.pmean(jax.grad(jax.checkpoint(loss, policy=policy))(w), "i")

    return over(devices, body, *LAYER, **STEP)


@program
def chunked_inside(devices):
    body = sm.chunked(lambda x: jax.nn.softmax(x @ x.T) @ x, {0: 4})
    return over(devices, lambda x: lax.psum(body(x), "i"), aval(N, 64, 128))


@program
def map_in_chunks(devices):
    function, _ = over(devices, lambda x: lax.pmean(jnp.sin(x), "i"))
    return jax.jit(sm.chunked(function, {1: 4})), (aval(N, 16, 128),)


@program
def explicit_axes(devices):
    mesh = Mesh(np.array(devices), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.ShapeDtypeStruct(
        ROW.shape, ROW.dtype, sharding=jax.sharding.NamedSharding(mesh, P("i"))
    )
    function = sm.spmap(lambda x: lax.psum(x, "i"), "i", mesh=mesh, mesh_axes="i")
    return jax.jit(function), (x,)


@program
def old_pmap(devices):
    function = sm.compat.pmap(lambda x: lax.psum(x, "i"), "i", devices=devices)
    return function, (ROW,)


@program
def double_precision(devices):
    return over(
        devices, lambda x: lax.psum(x * 2, "i"), aval(N, 8, 128, dtype=np.float64)
    )


@program
def long_integers(devices):
    return over(devices, lambda x: lax.psum(x, "i"), aval(N, 8, 128, dtype=np.int64))


@program
def flash_attention(devices):
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    def body(q):
        return flash.flash_attention(q, q, q)

    return over(devices, body, aval(N, 1, 1, 128, 128))


@program
def remote_copy(devices):
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x, out, sent, received):
        right = (lax.axis_index("i") + 1) % N
        copy = pltpu.make_async_remote_copy(
            src_ref=x,
            dst_ref=out,
            send_sem=sent,
            recv_sem=received,
            device_id=(right,),
        )
        copy.start()
        copy.wait()

    def body(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        )(x)

    return over(devices, body, ROW)


def ignore(*_):
    """A callback that looks at nothing."""


@program
def taps(devices):
    def body(x):
        x = sm.tap(ignore, lax.psum(x, "i"), with_device=True)
        return sm.tap_print(x)

    return over(devices, body, ROW)


@program
def callbacks(devices):
    def body(x):
        jax.debug.print("{x}", x=x[0])
        io_callback(ignore, None, x)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x)

    return over(devices, body, ROW)
