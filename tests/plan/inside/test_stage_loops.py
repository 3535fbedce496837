"""Shards that are alike share a loop; those that are not run one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.plan.checks import assert_same


def temporaries(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def loss(q, k, v):
    return (attention(q, k, v) ** 2).sum()


X = np.random.default_rng(0).standard_normal((601, 16), np.float32)
ROWS = jax.ShapeDtypeStruct((601, 16), np.float32)
TRANSFORMED = {
    "plain": lambda of: of(attention),
    "grad": lambda of: jax.grad(of(loss), (0, 1, 2)),
    "vmap": lambda of: jax.vmap(of(attention)),
    "grad of vmap": lambda of: jax.grad(
        lambda *args: jax.vmap(of(loss))(*args).sum(), (0, 1, 2)
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pieces",
    [
        (300, 301),
        pytest.param((200, 199, 202), marks=pytest.mark.deep),
        pytest.param((299, 300, 2), marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_unlike_pieces_run_one_after_the_other(name, pieces):
    of = TRANSFORMED[name]
    leading = (2,) if "vmap" in name else ()
    rows = [jax.ShapeDtypeStruct((*leading, *ROWS.shape), ROWS.dtype)] * 3
    in_pieces = of(lambda f: sm.chunked(f, ({0: pieces}, None, None)))
    share = max(pieces) / sum(pieces)
    whole = temporaries(of(lambda f: f), *rows)
    assert temporaries(in_pieces, *rows) < 1.1 * share * whole
    args = [np.broadcast_to(X, row.shape) for row in rows]
    assert_same(in_pieces(*args), of(lambda f: f)(*args), tolerance=1e-3)


MATRICES = {
    "svd": lambda x: jnp.linalg.svd(x, full_matrices=False),
    "qr": jnp.linalg.qr,
    "solve": lambda x: jnp.linalg.solve(x[..., :12], x[..., 12:]),
    "gradient": jax.grad(lambda x: jnp.linalg.svd(x, compute_uv=False).sum()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_laid_out_by_columns_piece_by_piece(name):
    """LAPACK takes them so; XLA would lay out all of them before the loop."""
    fun, memory = MATRICES[name], 200_000
    x = np.random.default_rng(0).standard_normal((2000, 12, 16), np.float32)
    in_pieces = sm.chunked(fun, memory=memory)
    assert temporaries(in_pieces, x) <= memory
    assert_same(jax.jit(in_pieces)(x), jax.jit(fun)(x), 1e-3)


def test_there_is_one_loop_however_many_pieces():
    def rows(x, w):
        return jnp.tanh(x @ w)

    x, w = jnp.ones((64, 4)), jnp.ones((4, 8))
    for pieces in (4, 32):
        lowered = jax.jit(sm.chunked(rows, ({0: pieces}, None))).lower(x, w)
        assert lowered.as_text().count("stablehlo.while") == 1
