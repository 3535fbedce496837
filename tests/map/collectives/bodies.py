"""Functions with collectives, over an axis of any length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm
from tests.map_programs import float_index


def ring(size, step=1):
    return [(k, (k + step) % size) for k in range(size)]


BODIES = {
    "psum": lambda x, n: lax.psum(x, "i"),
    "psum of a constant": lambda x, n: x * 0 + lax.psum(1, "i"),
    "psum of an unmapped value": lambda x, n: x + lax.psum(jnp.ones(3), "i"),
    "pmean": lambda x, n: lax.pmean(x, "i"),
    "pmax": lambda x, n: lax.pmax(x, "i"),
    "pmin": lambda x, n: lax.pmin(x, "i"),
    "normalise": lambda x, n: x / lax.psum(jnp.abs(x) + 1, "i"),
    "all_gather": lambda x, n: lax.all_gather(x, "i"),
    "all_gather axis 1": lambda x, n: lax.all_gather(x, "i", axis=1) * x[0],
    "all_gather tiled": lambda x, n: lax.all_gather(x, "i", tiled=True),
    "ppermute by 1": lambda x, n: lax.ppermute(x, "i", ring(n)),
    "ppermute back by 3": lambda x, n: lax.ppermute(x, "i", ring(n, n - 3 % n)),
    "ppermute reversed": lambda x, n: lax.ppermute(
        x, "i", [(k, n - 1 - k) for k in range(n)]
    ),
    "pshuffle": lambda x, n: lax.pshuffle(
        x, "i", list(np.random.default_rng(n).permutation(n))
    ),
    "all_to_all": lambda x, n: lax.all_to_all(
        jnp.outer(jnp.arange(1.0, n + 1), x), "i", 0, 0
    ),
    "all_to_all to another axis": lambda x, n: lax.all_to_all(
        jnp.outer(jnp.arange(1.0, n + 1), x), "i", 0, 1
    ),
    "all_to_all tiled": lambda x, n: lax.all_to_all(
        jnp.outer(jnp.arange(1.0, 2 * n + 1), x), "i", 0, 1, tiled=True
    ),
    "psum_scatter": lambda x, n: lax.psum_scatter(
        jnp.outer(x, jnp.arange(1.0, n + 1)), "i", scatter_dimension=1
    ),
    "psum_scatter tiled": lambda x, n: lax.psum_scatter(
        jnp.outer(jnp.arange(1.0, 2 * n + 1), x), "i", tiled=True
    ),
    "axis_index": lambda x, n: x * float_index("i"),
    "axis_size": lambda x, n: x * lax.axis_size("i"),
    "pbroadcast": lambda x, n: lax.psum(
        jnp.where(lax.axis_index("i") == n // 2, x, 0), "i"
    ),
    "in a scan": lambda x, n: lax.scan(
        lambda c, _: (c / 2 + lax.pmean(c, "i"), c), x, None, length=3
    ),
    "in a while": lambda x, n: lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, lax.ppermute(c[1], "i", ring(n))),
        (0, x),
    )[1],
    "in a cond": lambda x, n: lax.cond(
        x[0] > 0, lambda v: v + float_index("i"), lambda v: -v, x
    ),
    "in jit": lambda x, n: jax.jit(lambda v: lax.psum(v, "i") + float_index("i"))(x),
    "in checkpoint": lambda x, n: jax.checkpoint(lambda v: lax.pmean(jnp.sin(v), "i"))(
        x
    ),
}


def both(name, size, **options):
    body = functools.partial(lambda x, n, f: f(x, n), n=size, f=BODIES[name])
    return sm.spmap(body, "i", **options), jax.jit(jax.vmap(body, axis_name="i"))
