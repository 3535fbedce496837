"""What the model of memory says is at least what compilers and processes count."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.plan.inside.primitive import Options, cut
from shardmap.plan.inside.stage_loops import run_in_loops
from shardmap.plan.memory.liveness import peak
from shardmap.plan.memory.plan_peak import plan_peak
from tests.plan.run.peaks import PROGRAMS, in_a_fresh_process

# Without it, the fused operations of CPU keep memory that is not counted.
COUNTED = {"xla_cpu_experimental_ynn_fusion_type": ""}
ROWS, COLUMNS, PIECES = 2048, 256, 7
KEY = np.array([0, 1], np.uint32)


def normal(x, draw):
    return x * draw(jax.random.wrap_key_data(KEY), x.shape)


def mlp(x):
    ones = jnp.ones((COLUMNS, 512), x.dtype)
    centred = x - x.mean(-1, keepdims=True)
    return x + jax.nn.gelu(centred / (x.std(-1, keepdims=True) + 1) @ ones) @ ones.T


def attention(x):
    return jax.nn.softmax(x @ x[:1024].T) @ x[:1024]


def per_sample(x):
    def loss(w, row):
        return (jnp.tanh(row @ w) ** 2).sum()

    found = jax.vmap(jax.grad(loss), (None, 0))(jnp.ones((COLUMNS, 8)), x)
    return jnp.clip(found, -1, 1).mean(0)


def of(fun):
    return jax.grad(lambda x: (fun(x) ** 2).sum())


def filtered(x):
    return jax.vmap(lambda row: jnp.convolve(row, jnp.ones(9), "same"))(x)


def moving_average(x):
    return sum(x[k : k - 6 or None] for k in range(7)) / 7


MORE = {
    "filtered": filtered,
    "moving average": moving_average,
    "largest of moving averages": lambda x: moving_average(moving_average(x)).max(0),
    "moving averages of tanh": lambda x: jnp.tanh(moving_average(x)).sum(1),
    "products of moving averages": lambda x: moving_average(x) @ x[:64].T,
    "running moving averages": lambda x: jnp.cumsum(moving_average(x), 1),
    "largest of filtered": lambda x: filtered(jax.nn.relu(filtered(x))).max(0),
    "branches": lambda x: sum(jax.nn.softmax(x * k).max(0) for k in (1.0, 2.0, 3.0)),
    "sorts": lambda x: sum(jnp.sort(x * k, 1) for k in (1.0, 2.0, 3.0)),
    "sums": lambda x: (x.sum(0), (x * x).sum(0), jnp.exp(x).sum(0)),
    "sum of rows": lambda x: x.sum(1),
    "half precision": lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype).sum(1),
    "uniform": lambda x: normal(x, jax.random.uniform),
    "normal": lambda x: normal(x, jax.random.normal).max(0),
    "dropout": lambda x: jnp.where(normal(x, jax.random.uniform) > 0.5, x, 0.0).sum(1),
    "median": lambda x: jnp.median(x, 1),
    "running sum of rows": lambda x: jnp.cumsum(x, 1),
    "largest of rows": lambda x: jax.lax.top_k(jnp.sin(x), 4)[0],
    "pooled": lambda x: jax.lax.reduce_window(
        jnp.sin(x), -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME"
    ),
    "pairs": lambda x: jnp.abs(x[:, None, :8] - x[None, :64, :8]).sum(-1),
    "incomplete gamma": lambda x: jax.scipy.special.gammainc(x * x + 1, x * x),
    "attention": attention,
    "layer norm and MLP": mlp,
    "per sample": per_sample,
    "gradient of attention": of(attention),
    "gradient of layer norm and MLP": of(mlp),
    "gradient of softmax": of(jax.nn.softmax),
    "gradient of log-sum-exp": of(lambda x: jax.nn.logsumexp(x, 1)),
    "gradient of running sum": of(lambda x: jnp.cumsum(x, 1)),
}
LATE = 2**20
"""The kernel counts the pages of a process in batches, one for each thread."""

QUICK = ("branches", "running sum", "sums", "uniform", "softmax of rows")
ALL = {**PROGRAMS, **MORE}
MEASURED = ("softmax of rows", "standardised", "product", "sorted rows")


def some(names, quick):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.deep) for n in names]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", some(ALL, QUICK))
def test_the_compiler_counts_at_most_what_the_model_says(name):
    points = tuple(np.linspace(0, ROWS, PIECES + 1).astype(int)[1:-1].tolist())
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)
    with jax.numpy_rank_promotion("allow"):
        jaxpr = jax.make_jaxpr(ALL[name])(x)
        made = cut(jaxpr, ((points, ()),), Options(partial=True))
        lowered = jax.jit(lambda x: run_in_loops(made, [x])).lower(x)
    said = plan_peak(made, in_loops=True).bytes
    for options in (COUNTED, None):
        compiled = lowered.compile(compiler_options=options)
        # What is not counted are numbers such as the loops' counters.
        assert compiled.memory_analysis().temp_size_in_bytes <= said + 1024


@pytest.mark.parametrize(
    # Of a filter, a piece with its edges, and the result in another layout, too.
    ("fun", "times"),
    [
        (moving_average, 2.2),
        (lambda x: moving_average(x).max(1), 2.3),
        (filtered, 4.3),
    ],
)
def test_what_is_fused_is_not_held(fun, times):
    x = np.ones((ROWS, COLUMNS), np.float32)
    made = sm.plan(fun, x, in_slices={0: 8})
    assert made.peak_bytes <= times * x.nbytes / 8


@pytest.mark.parametrize(
    "axes",
    [
        *("ijk,kjl->il", "jki,jkl->il", "ijk,ljk->il", "jik,jkl->il", "jki,k->ji"),
        *("bihk,blhk->bhil", "hbik,bhlk->bhil", "bhik,hblk->bhil", "hikb,bhkl->bhil"),
    ],
)
def test_operands_of_products_are_transposed_before(axes):
    sizes = dict(zip("ijklbh", (256, 4, 1024, 256, 2, 2), strict=True))
    left, right, _ = axes.replace("->", ",").split(",")
    args = [
        jax.ShapeDtypeStruct([sizes[axis] for axis in each], np.float32)
        for each in (left, right)
    ]

    def fun(x, y):
        return jnp.einsum(axes, x, y)

    counted = jax.jit(fun).lower(*args).compile().memory_analysis()
    said = peak(jax.make_jaxpr(fun)(*args).jaxpr).bytes
    assert 2**20 <= counted.temp_size_in_bytes <= said


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="reads peaks from /proc"
)
@pytest.mark.deep
@pytest.mark.parametrize("name", MEASURED)
def test_a_process_takes_at_most_what_is_allowed(name):
    found = in_a_fresh_process("tests.plan.memory.peaks", name)
    assert found["took"] <= found["allowed"] + found["own"] + LATE


def ramp(x):
    return x * jnp.linspace(-1, 1, 64)[:, None]


def filled(x):
    return lax.dynamic_update_slice(x, jnp.reshape(jnp.float32(1), (1, 1)), (0, 0))


@pytest.mark.parametrize("fun", [ramp, filled])
def test_a_literal_may_be_reshaped(fun):
    x = np.ones((64, 8), np.float32)
    made = sm.plan(fun, x, in_slices={0: 4})
    assert made.peak_bytes >= x.nbytes // 4
    assert "stage 0" in str(made.explain())
    assert sm.plan(fun, x, memory="10 kB").peak_bytes <= 10_000
    got = sm.chunked(fun, memory="10 kB")(x)
    np.testing.assert_allclose(got, fun(x), rtol=1e-6)
