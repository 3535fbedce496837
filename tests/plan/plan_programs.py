"""Programs for the plan's tests: mostly one primitive each, and some real ones.

A program is a function and its arguments. Every primitive that a plan can cut is in one
of them; `SINGLE` is keyed by what is shown when a test fails.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Program(NamedTuple):
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    tolerance: float = 2e-5


def reals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.abs(reals(*shape)) + np.float32(0.5)


def ints(*shape: int, high: int = 9) -> np.ndarray:
    return np.random.default_rng(1).integers(0, high, shape).astype(np.int32)


def fraction(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).random(shape, dtype=np.float32) * 0.8 + 0.1


X, Y, SQUARES = reals(8, 6), reals(8, 6, seed=3), reals(4, 5, 5)
SYMMETRIC = SQUARES @ SQUARES.swapaxes(1, 2) + 5 * np.eye(5, dtype=np.float32)
IMAGE, KERNEL = reals(2, 9, 8, 3), reals(3, 2, 3, 4, seed=4)
KEY = jax.random.key(7)

# Elementwise functions by what they take, all of one line in one program.
ELEMENTWISE = {
    "reals": ((X,), """abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc
        exp exp2 expm1 floor is_finite logistic neg round sign sin sinh square tan tanh
        """),
    "positive": ((positive(8, 6),), "digamma lgamma log log1p rsqrt sqrt"),
    "above one": ((positive(8, 6) + 1,), "acosh"),
    "fractions": ((fraction(8, 6),), "acos asin atanh erf_inv"),
    "integers": ((ints(8, 6),), "bitwise_not clz population_count"),
    "complex numbers": ((X + 1j * Y,), "conj real imag"),
    "two reals": ((X, Y), "add atan2 complex ge gt le lt max min mul nextafter sub"),
    "a real and a positive": ((X, positive(8, 6)), "div rem"),
    "two positive": ((positive(8, 6), positive(8, 6)), "igamma igammac"),
    "a positive and a real": ((positive(8, 6), Y), "pow"),
    "zeta": ((positive(8, 6) + 1, positive(8, 6)), "zeta"),
    "polygamma": ((np.ones_like(X), positive(8, 6)), "polygamma"),
    "two integers": ((ints(8, 6), ints(8, 6)), """bitwise_and bitwise_or bitwise_xor eq
        ne shift_left shift_right_arithmetic shift_right_logical"""),
}  # fmt: skip


def all_of(names: str) -> Callable[..., Any]:
    """Gives the results of each of these functions of `jax.lax`, by name."""
    return lambda *args: {name: getattr(lax, name)(*args) for name in names.split()}


def conv(x, w, strides=(1, 1), padding="SAME", **options):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=layout, **options
    )


def max_pool(x, padding="SAME"):
    window, strides = (1, 3, 2, 1), (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def sum_pool(x):
    padding = [(0, 0), (3, 2), (0, 1), (0, 0)]
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 2, 1, 1), padding)


def batched_gather(x, i):
    return jnp.take_along_axis(x, i, axis=1)


OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "argmax": (lambda x: jnp.argmax(x, 0), (ints(8, 6),)),
    "argmax nan": (lambda x: jnp.argmax(x, 1), (np.where(X > 1, np.nan, X),)),
    "argmin": (lambda x: jnp.argmin(x, 1), (ints(8, 6),)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "bitcast bytes": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (8, 3, 6)), (X,)),
    "cholesky": (lambda x: lax.linalg.cholesky(x), (SYMMETRIC,)),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (X,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y, x], 0), (X, Y)),
    "concatenate columns": (lambda x, y: jnp.concatenate([x, y], 1), (X, Y)),
    "conv": (conv, (IMAGE, KERNEL)),
    "conv strided": (lambda x, w: conv(x, w, (2, 3), "VALID"), (IMAGE, KERNEL)),
    "conv dilated": (
        lambda x, w: conv(
            x,
            w,
            (2, 1),
            [(4, 3), (-1, 5)],
            lhs_dilation=(3, 1),
            rhs_dilation=(2, 1),
        ),
        (IMAGE, KERNEL),
    ),
    "conv grouped": (
        lambda x, w: conv(x, w, feature_group_count=3),
        (IMAGE, reals(3, 3, 1, 6)),
    ),
    "convert": (lambda x: x.astype(jnp.float16), (X,)),
    "convert small": (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (X,)),
    "convert int4": (lambda x: x.astype(jnp.int4).astype(jnp.int32), (ints(8, 6),)),
    "cummax": (lambda x: lax.cummax(x, 0), (X,)),
    "cummin": (lambda x: lax.cummin(x, 1), (X,)),
    "cumprod": (lambda x: jnp.cumprod(x, 1), (X,)),
    "cumsum": (lambda x: jnp.cumsum(x, 0), (X,)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), (X,)),
    "dot": (jnp.dot, (X, reals(6, 4))),
    "dot ints": (jnp.dot, (ints(8, 6), ints(6, 4))),
    "dot batched": (jnp.matmul, (reals(3, 4, 6), reals(3, 6, 5))),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i, 1), (3, 5)),
        (X, np.int32(4)),
    ),
    "dynamic_slice rows": (
        lambda x, i: lax.dynamic_slice(x, (0, i), (8, 2)),
        (X, np.int32(40)),
    ),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 2)),
        (X, reals(3, 2), np.int32(4)),
    ),
    "eigh": (lambda x: lax.linalg.eigh(x)[1], (SYMMETRIC,)),
    "fft": (lambda x: jnp.abs(jnp.fft.fft2(x)), (reals(3, 4, 6),)),
    "gather": (lambda x, i: x[i], (X, ints(5, high=8))),
    "gather columns": (lambda x, i: x[:, i], (X, ints(5, high=6))),
    "gather points": (lambda x, i, j: x[i, j], (X, ints(5, high=8), ints(5, high=6))),
    "gather batched": (batched_gather, (X, np.argsort(X, 1).astype(np.int32))),
    "integer_pow": (lambda x: x**3, (X,)),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (8, 6), 1), (X,)),
    "lu": (lambda x: lax.linalg.lu(x)[0], (SQUARES,)),
    "one_hot": (lambda i: jax.nn.one_hot(i, 5), (ints(8, high=5),)),
    "optimization_barrier": (lambda x, y: lax.optimization_barrier((x, y)), (X, Y)),
    "pad": (lambda x: lax.pad(x, 1.5, ((2, 3, 0), (0, 0, 0))), (X,)),
    "pad inside": (lambda x: lax.pad(x, 0.0, ((1, -2, 2), (-1, 3, 1))), (X,)),
    "qr": (lambda x: jnp.linalg.qr(x)[1], (SQUARES,)),
    "random bits": (lambda k, x: x + jax.random.normal(k, (8, 6)), (KEY, X)),
    "random bytes": (
        lambda k, i: i + jax.random.bits(k, (8, 6), "uint8").astype(i.dtype),
        (KEY, ints(8, 6)),
    ),
    "random seed": (
        lambda i: jax.random.key_data(jax.vmap(jax.random.key)(i)),
        (ints(6),),
    ),
    "random split": (
        lambda k: jax.random.key_data(jax.vmap(lambda k: jax.random.split(k, 3))(k)),
        (jax.random.split(KEY, 6),),
    ),
    "random fold_in": (
        lambda k: jax.random.key_data(jax.vmap(jax.random.fold_in)(k, jnp.arange(6))),
        (jax.random.split(KEY, 6),),
    ),
    "reduce": (
        lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * 1, (0,)),
        (X,),
    ),
    "reduce_and": (lambda x: jnp.all(x < 1, 0), (X,)),
    "reduce_max": (lambda x: jnp.max(x, 1), (X,)),
    "reduce_min": (lambda x: jnp.min(x, (0, 1)), (X,)),
    "reduce_or": (lambda x: jnp.any(x > 1, 0), (X,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 7), (X,)),
    "reduce_prod": (lambda x: jnp.prod(x, 0), (X,)),
    "reduce_sum": (lambda x: jnp.sum(x, 0), (X,)),
    "reduce_sum ints": (lambda x: jnp.sum(x), (ints(8, 6),)),
    "reduce_window_max": (max_pool, (IMAGE,)),
    "reduce_window_sum": (sum_pool, (IMAGE,)),
    "regularized_incomplete_beta": (
        jax.scipy.special.betainc,
        (positive(8, 6), positive(8, 6), fraction(8, 6)),
    ),
    "reshape merge": (lambda x: x.reshape(24, 5), (reals(4, 6, 5),)),
    "reshape split": (lambda x: x.reshape(4, 2, 6), (X,)),
    "reshape mixed": (lambda x: x.reshape(6, 8), (X,)),
    "reshape permuted": (
        lambda x: lax.reshape(x, (5, 24), (2, 0, 1)),
        (reals(4, 6, 5),),
    ),
    "reshape ones": (lambda x: x.reshape(1, 8, 1, 6), (X,)),
    "rev": (lambda x: lax.rev(x, (0,)), (X,)),
    "roll": (lambda x: jnp.roll(x, 3, 0), (X,)),
    "scatter": (lambda x, i: x.at[i].set(2.0), (X, np.array([3, 1, 6, 99], np.int32))),
    "scatter-add": (lambda x, i: x.at[i].add(2.0), (X, ints(5, high=8))),
    "scatter-max": (
        lambda x, i: x.at[i, 1:3].max(1.5, mode="clip"),
        (X, ints(5, high=12)),
    ),
    "scatter-min": (lambda x, i: x.at[:, i].min(0.5), (X, ints(3, high=6))),
    "scatter-mul": (lambda x, i: x.at[i, 0].mul(2.0), (X, ints(5, high=8))),
    "scatter-sub": (lambda x, i: x.at[i].subtract(2.0), (X, ints(5, high=8))),
    "select_n": (lambda x, y: jnp.where(x > 0, x, y), (X, Y)),
    "slice": (lambda x: x[2:7:2, 1:], (X,)),
    "sort": (lambda x: jnp.sort(x, 1), (X,)),
    "sort pairs": (lambda x, y: lax.sort((x, y), dimension=0), (X, Y)),
    "split": (lambda x: jnp.split(x, [3, 4]), (X,)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (reals(8, 1, 6),)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (X, Y)),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), (SQUARES,)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (X,)),
    "top_k": (lambda x: lax.top_k(x, 3), (X,)),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), (reals(2, 3, 4),)),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (SYMMETRIC, reals(4, 5, 3)),
    ),
    "unstack": (lambda x: jnp.unstack(x, axis=1), (X,)),
    "cond": (lambda x, i: lax.cond(i > 0, jnp.sin, jnp.cos, x), (X, np.int32(1))),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + i, x), (X,)),
    "map": (lambda x: lax.map(jnp.cumsum, x), (X,)),
    "scan": (lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x), (X,)),
    "scan nothing": (lambda x: lax.scan(lambda c, r: (c, r), 0.0, x[:, :0])[1], (X,)),
    "while": (
        lambda x: jax.vmap(
            lambda r: lax.while_loop(lambda s: s.sum() < 9, lambda s: s + 1, r)
        )(x),
        (X,),
    ),
    "checkpoint": (lambda x: jax.checkpoint(jnp.sin)(x), (X,)),
    "relu": (jax.nn.relu, (X,)),
}

SINGLE: dict[str, Program] = {
    **{kind: Program(all_of(fs), args) for kind, (args, fs) in ELEMENTWISE.items()},
    **{name: Program(fun, args) for name, (fun, args) in OTHERS.items()},
}
