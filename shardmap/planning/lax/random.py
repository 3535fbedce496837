"""Rules of random numbers: a piece has the same bits as the whole call.

With partitionable threefry, JAX's default, a random bit is a function of the key and of
its flat position, so a shard computes the bits of its piece only.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors, Local, taken_whole
from shardmap.planning.engine.nodes import Node, key_impl
from shardmap.planning.engine.rules import Factor, Reason, RuleMaker
from shardmap.planning.lax.pointwise import pointwise
from shardmap.planning.lax.primitives import (
    RANDOM_CLONE,
    RANDOM_SEED,
    RANDOM_UNWRAP,
    RANDOM_WRAP,
)
from shardmap.planning.lax.shape import in_parts

GENERATOR = Reason(
    "this generator makes all its bits at once",
    "use threefry keys with jax_threefry_partitionable",
)
SEQUENCE = Reason("the primitive draws from one sequence", "draw with jax.random.bits")
POSITIONS = 2**32
TOO_MANY = Reason(
    "more than 2**32 numbers are drawn with one key",
    "split the key, and draw with one for each row: jax.vmap(jax.random.bits)(keys)",
)
ONE_KEY = Reason(
    "gamma draws of one key are made at once",
    "draw with a key for each row: jax.vmap(jax.random.gamma)(keys, a)",
)
HASH = 64
"""The operations of a number: one of 32 bits is drawn again, not kept for itself."""

DRAWN_WHOLE = frozenset({GENERATOR, ONE_KEY, SEQUENCE, TOO_MANY})
"""The reasons for which each shard draws all numbers and takes some of them."""


def by_position(node: Node, is_split: bool) -> Factors:
    """Key axes pass; on the others the bits are drawn by position."""
    keys = node.in_shapes[0]
    shape = node.params["shape"]
    impl = key_impl(node.ins[0].aval)
    partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    if not partitionable or impl != "threefry2x32":
        return taken_whole(node, GENERATOR)
    if math.prod(shape) >= POSITIONS:
        return taken_whole(node, TOO_MANY)
    out: list[Factor] = list(range(len(keys) + len(shape)))
    drawn = out[len(keys) :]
    behind = range(len(keys), len(out))

    def emitter(local: Local) -> Sequence[Any]:
        data = jax.random.key_data(local.values[0])
        sizes = [local.sizes[factor] for factor in drawn]
        place = jnp.zeros(sizes, jnp.uint32)
        for k, factor in enumerate(drawn):
            step = jnp.uint32(math.prod(shape[k + 1 :]))
            along = lax.broadcasted_iota(jnp.uint32, sizes, k)
            start = jnp.asarray(local.starts[factor]).astype(jnp.uint32)
            place = place + (along + start) * step
        words = (jnp.expand_dims(word, behind) for word in jnp.moveaxis(data, -1, 0))
        first, second, place = jnp.broadcast_arrays(*words, place)
        high, low = p.threefry2x32_p.bind(first, second, jnp.zeros_like(place), place)
        if is_split:
            return [jax.random.wrap_key_data(jnp.stack([high, low], -1), impl=impl)]
        width = node.params["bit_width"]
        dtype = node.outs[0].aval.dtype
        if width == 64:
            return [high.astype(dtype) << 32 | low.astype(dtype)]
        return [(high ^ low).astype(dtype)]

    ins = [out[: len(keys)]]
    return Factors(
        node, ins, [out], starts=drawn, emitter=emitter, cheap=False, each=HASH
    )


def gamma(node: Node) -> Factors:
    """Key axes pass; all numbers of one key are drawn at once."""
    return taken_whole(node, ONE_KEY, range(len(node.in_shapes[0])))


WORDS = Reason("these are the words of one key")

RULES: dict[Any, RuleMaker] = {
    **dict.fromkeys([p.random_fold_in_p, RANDOM_CLONE, RANDOM_SEED], pointwise()),
    **dict.fromkeys([RANDOM_UNWRAP, RANDOM_WRAP], partial(in_parts, reason=WORDS)),
    p.random_bits_p: partial(by_position, is_split=False),
    p.random_split_p: partial(by_position, is_split=True),
    p.random_gamma_p: gamma,
    p.rng_bit_generator_p: partial(taken_whole, reason=SEQUENCE),
}
