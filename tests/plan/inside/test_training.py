"""A transformer of flax, trained with adam through `chunked` in as much as fits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm

nn, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")
WORDS, WIDTH, LENGTH, BATCH = 64, 32, 16, 48


class Transformer(nn.Module):
    """One block, with a mask, dropout and statistics of the batch."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH)(tokens)
        mask = nn.combine_masks(
            nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0)
        )
        y = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        x += nn.Dropout(0.2, deterministic=False)(y)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(WORDS)(x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x))))


def by_index(logits, labels):
    rows = jax.nn.log_softmax(logits).reshape(-1, WORDS)
    return -rows[jnp.arange(len(rows)), labels.reshape(-1)].mean()


def by_one_hot(logits, labels):
    hot = jax.nn.one_hot(labels, WORDS)
    return -(jax.nn.log_softmax(logits) * hot).sum(-1, where=hot > 0).mean()


def by_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


MODEL, ADAM = Transformer(), optax.adam(1e-2, eps=1e-4)
TOKENS = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, WORDS)
LABELS = jnp.roll(TOKENS, -1, 1)


def step(of, cross_entropy):
    """A step of training, whose gradient is what ``of`` makes of it."""

    def loss(weights, stats, key, tokens, labels):
        logits, changed = MODEL.apply(
            {"params": weights, **stats}, tokens, rngs={"dropout": key}, mutable=True
        )
        changed.pop("params", None)
        return cross_entropy(logits, labels), changed

    gradient = of(jax.value_and_grad(loss, has_aux=True))

    def run(weights, stats, state, key, tokens, labels):
        (value, stats), found = gradient(weights, stats, key, tokens, labels)
        updates, state = ADAM.update(found, state, weights)
        return value, optax.apply_updates(weights, updates), stats, state

    return run


@pytest.mark.deep
@pytest.mark.parametrize(
    ("cross_entropy", "share"),
    [
        (by_index, 2),  # In two pieces, of which none is like the other.
        (by_index, 4),
        (by_one_hot, 4),
        (by_optax, 4),
    ],
)
def test_a_step_in_pieces_is_the_step(cross_entropy, share):
    # flax and optax are not written for JAX's strict promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check_a_step(cross_entropy, share)


def check_a_step(cross_entropy, share):
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    stats = MODEL.init(keys, TOKENS)
    weights = stats.pop("params")
    args = weights, stats, ADAM.init(weights), jax.random.key(3), TOKENS, LABELS
    whole = step(lambda f: f, cross_entropy)
    compiled = jax.jit(whole).lower(*args).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    cuts = (None, None, None, {0: sm.AUTO}, {0: sm.AUTO})
    in_pieces = step(
        lambda f: sm.chunked(f, cuts, memory=held // share, strict=True), cross_entropy
    )
    compiled = jax.jit(in_pieces).lower(*args).compile()
    found, expected = compiled(*args), jax.jit(whole)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        found,
        expected,
    )
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert compiled.memory_analysis().temp_size_in_bytes < held // share + gradients
