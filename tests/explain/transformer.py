"""A step of training for a transformer of two blocks, on devices that share the batch
alone, or the weights as well."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm


def explained(names):
    """The explanation of a step on eight devices.

    Args:
      names: ``"data"``, where each device has all weights, or ``"data, model"``.
    """
    nn, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
            h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
            return x + nn.Dense(x.shape[-1])(h)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(32, 16)(tokens)
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(32)(nn.LayerNorm()(x))

    model, adam = Transformer(), optax.adam(1e-3)

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        labels = jax.nn.one_hot(tokens[:, 1:], 32)
        return optax.softmax_cross_entropy(logits, labels).mean()

    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = adam.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    mesh = sm.make_mesh({"data": 8} if names == "data" else {"data": 4, "model": 2})

    def cut(leaf):
        last = names != "data" and leaf.ndim > 1 and leaf.shape[-1] % 2 == 0
        spec = P(*[None] * (leaf.ndim - 1), "model") if last else P()
        return NamedSharding(mesh, spec)

    tokens = jax.ShapeDtypeStruct((16, 9), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = jax.eval_shape(adam.init, params)
    cuts = jax.tree.map(cut, (params, state))
    jitted = jax.jit(step, in_shardings=(*cuts, NamedSharding(mesh, P("data"))))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return sm.explain(jitted)(params, state, tokens)
