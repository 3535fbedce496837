"""Programs in pieces take what `memory=` allows, as the compiler counts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.plan.inside.liveness import peak
from tests.plan.checks import assert_same

# Without it, the fused operations of CPU keep memory that is not counted.
COUNTED = {"xla_cpu_experimental_ynn_fusion_type": ""}


def temporaries(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile(compiler_options=COUNTED)
    return compiled.memory_analysis().temp_size_in_bytes


def said(fun, *args):
    return peak(jax.make_jaxpr(fun)(*args).jaxpr).bytes


# Pieces that stand alone


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


@pytest.mark.parametrize(
    ("branch", "copies"),
    [
        (lambda each: each.at[2:4].set(1.0), 1),
        (lambda each: each[::-1], 2),
    ],
)
def test_a_branch_may_write_over_what_it_is_given(branch, copies):
    def fun(flag):
        held = jnp.zeros(1000, np.float32)
        return jax.lax.cond(flag, branch, lambda each: each, held).sum()

    assert said(fun, True) // 4000 == copies
