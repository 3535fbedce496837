"""Functions in pieces against the functions themselves, under every transformation."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (15, 4))
W = jax.random.normal(jax.random.key(1), (4, 8)) / 4
CUT = ({0: 4}, None)


def assert_close(result, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
        result,
        expected,
    )


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * 3 * jnp.cos(x),))

PROGRAMS = {
    "rows": lambda x, w: jnp.tanh(x @ w),
    "sum over rows": lambda x, w: jnp.tanh(x @ w).sum(0),
    "neighbours": lambda x, w: x[1:] - x[:-1] * w[0, 0],
    "attention": lambda x, w: jax.nn.softmax(x @ (w @ w.T)) @ w,
    "standardised": lambda x, w: (
        (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True) * w[0, 0]
    ),
    "largest": lambda x, w: (x.max(0) + w[0, :4], x.min()),
    "running sum": lambda x, w: jnp.cumsum(x, 0) @ w,
    "random": lambda x, w: jax.random.normal(KEY, (15, 4)) * x + w[0, 0],
    "relu": lambda x, w: jax.nn.relu(x @ w).sum(),
    "custom derivative": lambda x, w: tripled(x @ w).sum(),
    "loss": lambda x, w: jax.nn.logsumexp(x @ w),
    "constant": lambda x, w: (x * 2, 3.0, w),
    "loop": lambda x, w: lax.fori_loop(0, 3, lambda k, y: jnp.sin(y) + x, x) @ w,
}
# JAX itself has no forward-mode derivative of these.
REVERSE_ONLY = {"custom derivative"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_function(name):
    fun = PROGRAMS[name]
    chunked = sm.chunked(fun, CUT)
    assert_close(chunked(X, W), fun(X, W))
    assert_close(jax.jit(chunked)(X, W), fun(X, W))


def squared(fun):
    """The sum of squares of all results, as something to differentiate."""
    return lambda *args: sum(jnp.sum(y * y) for y in jax.tree.leaves(fun(*args)))


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(squared(f), (0, 1)),
    "jitted grad": lambda f: jax.jit(jax.grad(squared(f), 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x + 1, w)),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f)(jnp.stack([x, -x]), jnp.stack([w, w])),
    "vmap of one": lambda f: (
        lambda x, w: jax.vmap(f, (None, 1), -1)(x, jnp.stack([w, -w], 1))
    ),
    "vmap of grad": lambda f: (
        lambda x, w: jax.vmap(jax.grad(squared(f)), (0, None))(jnp.stack([x, -x]), w)
    ),
    "grad of vmap": lambda f: (
        lambda x, w: jax.grad(
            lambda w: squared(jax.vmap(f, (0, None)))(jnp.stack([x, -x]), w)
        )(w)
    ),
    "scan": lambda f: (
        lambda x, w: lax.scan(
            lambda c, k: (c + 1, f(x * k, w)), 0, jnp.arange(2.0, dtype=np.float32)
        )
    ),
    "cond": lambda f: (
        lambda x, w: lax.cond(
            x[0, 0] > 0, f, lambda x, w: jax.tree.map(jnp.negative, f(x, w)), x, w
        )
    ),
    "checkpoint": lambda f: jax.grad(squared(jax.checkpoint(f))),
    "chunked": lambda f: sm.chunked(f, ({0: 2}, None)),
    "gradient in pieces": lambda f: sm.chunked(jax.grad(squared(f), (0, 1)), CUT),
}


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize(
    "name", ["rows", "sum over rows", "neighbours", "standardised", "custom derivative"]
)
def test_transformations(name, transformation):
    if name in REVERSE_ONLY and transformation in ("jvp", "linearize"):
        pytest.skip("JAX has no forward-mode derivative of a custom_vjp")
    fun, change = PROGRAMS[name], TRANSFORMATIONS[transformation]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* runs as a whole")
        result = change(sm.chunked(fun, CUT))(X, W)
    assert_close(result, change(fun)(X, W))


def test_inside_a_plan():
    chunked = sm.chunked(PROGRAMS["sum over rows"], CUT)
    shard_plan = sm.plan(chunked, X, W, in_slices=({0: 3}, None))
    assert shard_plan.num_shards == 3
    assert_close(shard_plan.run(X, W), chunked(X, W))


def test_integers_and_keys():
    def fun(x, k, key):
        return (x + k[:, None]).sum(0), k * 2, jax.random.split(key, 15)

    k = jnp.arange(15)
    chunked = sm.chunked(fun, ({0: 4}, {0: 4}, None))
    total, doubled, keys = chunked(X.astype(int), k, KEY)
    expected = fun(X.astype(int), k, KEY)
    assert_close((total, doubled), expected[:2])
    assert_close(jax.random.key_data(keys), jax.random.key_data(expected[2]))


CLOSING = {
    "jit": jax.jit,
    "grad": jax.grad,
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w,)),
    "vmap": lambda f: lambda w: jax.vmap(f)(jnp.stack([w, w + 1])),
    "scan": lambda f: (
        lambda w: jax.lax.scan(
            lambda c, _: (c * jnp.sin(f(c)), None), w, None, length=2
        )
    ),
    "spmap": lambda f: lambda w: sm.spmap(f)(jnp.stack([w, w + 1])),
    "chunked": lambda f: sm.chunked(f, {0: 2}),
    "another gradient": lambda f: jax.grad(lambda w: jax.grad(f)(w).sum()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("transformation", "remat"),
    # What keeps residuals has no forward-mode derivative.
    [(name, True) for name in CLOSING] + [("jit", False), ("grad", False)],
)
def test_values_that_are_closed_over_may_be_traced(transformation, remat):
    def loss(change):
        return lambda w: change(lambda x: jnp.sin(x * w[0]) + w[1:].sum())(X).sum()

    in_pieces = loss(lambda f: sm.chunked(f, {0: 3}, remat=remat, strict=True))
    w = jnp.asarray([0.5, 2.0, -1.0], jnp.float32)
    around = CLOSING[transformation]
    assert_close(around(in_pieces)(w), around(loss(lambda f: f))(w))


def test_what_is_closed_over_is_told_and_chosen_as_arguments_are():
    def total(w):
        fun = sm.chunked(lambda x: (x @ w).sum(), memory="100 kB")
        told.append(str(fun.explain(wide)))
        return fun(wide)

    told, wide = [], jnp.ones((4096, 8))
    np.testing.assert_allclose(jax.jit(total)(jnp.ones((8, 64))), 4096 * 8 * 64)
    assert "closed-over value 0" in told[0]


def test_keyword_arguments_are_whole():
    chunked = sm.chunked(lambda x, *, w: x @ w, ({0: 4},))
    assert_close(chunked(X, w=W), X @ W)


def test_as_a_decorator_and_as_a_method():
    class Layer:
        weight = W

        @sm.chunked(in_slices=(None, {0: 4}))
        def apply(self, x):
            return x @ self.weight

    jax.tree_util.register_static(Layer)
    assert_close(Layer().apply(X), X @ W)


def lowered_loops(fun, *args):
    return jax.jit(fun).lower(*args).as_text().count("stablehlo.while")


# Memory


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


ROWS = jax.ShapeDtypeStruct((4096, 16), np.float32)


def temporaries(fun, *args):
    # Without it, the fused operations of CPU keep memory that is not counted.
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    compiled = jax.jit(fun).lower(*args).compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("cuts", [None, ({0: sm.AUTO}, None, None)])
def test_temporaries_are_within_the_memory_that_is_given(cuts):
    allowed = 8 * 2**20
    assert temporaries(attention, ROWS, ROWS, ROWS) > 8 * allowed
    chunked = sm.chunked(attention, cuts, memory="8 MiB")
    used = temporaries(chunked, ROWS, ROWS, ROWS)
    assert allowed / 2 < used <= allowed


def test_the_gradient_has_the_memory_of_one_piece():
    def loss(q, k, v):
        return (attention(q, k, v) ** 2).sum()

    chunked = sm.chunked(loss, ({0: 32}, None, None))
    whole = temporaries(jax.grad(loss, (0, 1, 2)), ROWS, ROWS, ROWS)
    assert temporaries(jax.grad(chunked, (0, 1, 2)), ROWS, ROWS, ROWS) < whole / 10


def kernel(x, y, v):
    squares = (x * x).sum(1)[:, None] + (y * y).sum(1)[None]
    return jnp.exp(2 * x @ y.T - squares) @ v


def local_energy(x, w, _):
    def wave(x):
        return jnp.tanh(x @ w).sum()

    return jax.vmap(lambda x: -jnp.trace(jax.hessian(wave)(x)))(x)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (kernel, ((4096, 8), (4096, 8), (4096, 1))),
        (local_energy, ((2048, 32), (32, 64), ())),
    ],
)
def test_a_little_work_for_each_piece_does_not_end_a_stage(fun, shapes):
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    chunked = sm.chunked(fun, ({0: 16}, None, None))
    assert temporaries(chunked, *args) < temporaries(fun, *args) / 5
    assert "stage 1" not in str(chunked.explain(*args))


def test_one_piece_if_that_fits():
    chunked = sm.chunked(attention, ({0: sm.AUTO}, None, None), memory="1 GB")
    assert lowered_loops(chunked, ROWS, ROWS, ROWS) == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"memory": 0}, ValueError, "memory must be at least one byte, got 0"),
        ({"memory": -1}, ValueError, "memory must be at least one byte, got -1"),
        ({"memory": "lots"}, ValueError, "such as '2 GB', '1.5 GiB' or '900MB', got"),
        ({"remat": "x"}, TypeError, "remat must be True, False or one of jax.checkp"),
        ({"strict": "a"}, TypeError, "strict must be True or False, got 'a'"),
        ({"partial": 2}, TypeError, "partial must be True or False, got 2"),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        sm.chunked(attention, **options)


def test_too_little_memory_names_what_needs_it():
    chunked = sm.chunked(attention, ({0: sm.AUTO}, None, None), memory="4 kB")
    with pytest.raises(
        ValueError,
        match=r"memory=3.9 KiB is too little: in 4,096 pieces the function still holds "
        r".* of it .* in float32\[1,4096\] made at .*test_chunked.py:\d+ "
        r"\(attention\)",
    ):
        jax.jit(chunked).lower(ROWS, ROWS, ROWS)


def test_auto_needs_memory():
    for make in (
        lambda: sm.chunked(attention, ({0: sm.AUTO}, None, None))(X, X, X),
        lambda: sm.plan(attention, X, X, X, in_slices=({0: sm.AUTO}, None, None)),
    ):
        with pytest.raises(ValueError, match="a cut that is AUTO needs memory="):
            make()


# What is refused, and told


def test_a_cut_that_reaches_nothing_is_told_once():
    fun = functools.partial(jnp.fft.fft, axis=0)
    chunked = sm.chunked(fun, {0: 3})
    with pytest.warns(UserWarning, match="runs as a whole: none of the cuts reaches"):
        assert_close(chunked(X), fun(X))
    assert_close(chunked(X[:7]), fun(X[:7]))
    strict = sm.chunked(fun, {0: 3}, strict=True)
    with pytest.raises(ValueError, match="runs as a whole: none of the cuts reaches"):
        strict(X)
    assert "axis 0" in str(chunked.explain(X))


def test_what_is_no_function_or_no_cut():
    with pytest.raises(TypeError, match="chunked takes a function, got 3"):
        sm.chunked(3)
    with pytest.raises(TypeError, match="an axis must be an integer, got '0'"):
        sm.chunked(attention, ({"0": 2}, None, None))(X, X, X)


def test_explain_says_what_becomes_of_the_cuts():
    text = str(sm.chunked(attention, (*CUT, None)).explain(X, X, X))
    assert re.search(r"args.0.: float32.15, 4.\n    axis 0: cut into 4 pieces", text)


def test_the_function_is_traced_once_for_equal_shapes():
    seen = []

    def fun(x):
        seen.append(x.shape)
        return x * 2

    chunked = sm.chunked(fun, {0: 3})
    [chunked(X) for _ in range(3)]
    assert seen == [X.shape]
    assert functools.partial(chunked)(X).shape == X.shape
