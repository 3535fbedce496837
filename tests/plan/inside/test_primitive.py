"""What a function in pieces meets: kinds of arguments, of programs around it, modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardmap as sm

X = jax.random.normal(jax.random.key(0), (7, 4), np.float32)
W = jax.random.normal(jax.random.key(1), (4, 3), np.float32)
CUT = ({0: 3}, None)
XS = jnp.stack([X, X * 2, X * 3])
EIGHT = jnp.concatenate([X] * 8)


def fun(x, w):
    return jnp.tanh(x @ w).sum(0), x[1:] * x[:-1]


def rows(x, w):
    return jnp.tanh(x @ w)


def squared(fun):
    return lambda *args: sum(jnp.sum(y * y) for y in jax.tree.leaves(fun(*args)))


def assert_same(result, expected):
    """The same structure, dtypes and numbers."""

    def one(a, b):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        is_half = a.dtype in (jnp.bfloat16, jnp.float16)
        tolerance = 2e-2 if is_half else 2e-5
        if is_half:
            a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(one, result, expected)


def check(change, fun, *args, cuts=CUT, **options):
    """What becomes of ``fun`` in pieces is what becomes of it as a whole."""
    expected = jax.jit(change(fun))(*args)  # One program, not one for each operation.
    assert_same(change(sm.chunked(fun, cuts, **options))(*args), expected)


def mostly_deep(programs):
    """Their names; all but the first are for `make test-deep`."""
    first, *others = programs
    return [first, *(pytest.param(name, marks=pytest.mark.deep) for name in others)]


# Around it

MESH = {"a": 4, "b": 2}
AROUND = {
    "while": (
        lambda f: (
            lambda x, w: lax.while_loop(
                lambda c: c[0] < 3,
                lambda c: (c[0] + 1, c[1] + f(c[1], w)[1].sum()),
                (0, x),
            )
        ),
        X,
    ),
    "spmap": (lambda f: sm.spmap(f, in_axes=(0, None)), XS),
    "spmap of grad": (lambda f: sm.spmap(jax.grad(squared(f)), in_axes=(0, None)), XS),
    "grad of spmap": (lambda f: jax.grad(squared(sm.spmap(f, in_axes=(0, None)))), XS),
    "sharded_jit": (lambda f: sm.sharded_jit(f, ((4, 1), None), None), EIGHT),
    "hessian": (lambda f: jax.hessian(squared(f), 1), X),
    "jacfwd": (lambda f: jax.jacfwd(f, 1), X),
    "jacrev": (lambda f: jax.jacrev(f, 1), X),
    "checkpoint": (
        lambda f: jax.grad(
            jax.checkpoint(squared(f), policy=jax.checkpoint_policies.dots_saveable)
        ),
        X,
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", AROUND)
def test_programs_around_it(name):
    change, x = AROUND[name]
    check(change, fun, x, W)


def test_mesh_map():
    def blocks(x, w):
        return x @ w, lax.psum((x @ w).sum(), ("a", "b"))

    mesh = sm.make_mesh(MESH)
    check(
        lambda f: sm.mesh_map(f, mesh, ({"a": 0}, {}), ({"a": 0}, {})), blocks, EIGHT, W
    )


def test_export():
    exported = jax.export.export(jax.jit(sm.chunked(fun, CUT)))(X, W)
    again = jax.export.deserialize(exported.serialize())
    assert_same(again.call(X, W), fun(X, W))


def test_linear_transpose():
    def linear(x):
        return (x @ W).sum(0)

    ct = jnp.ones(3, np.float32)
    check(lambda f: jax.linear_transpose(f, X), linear, ct, cuts={0: 3})


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_collectives_of_a_map_around_it(lowering):
    def talks(x, w):
        y = x @ w
        return (
            lax.pmean(y, "i"),
            lax.all_gather(y, "i"),
            lax.ppermute(y, "i", [(0, 1), (1, 2), (2, 0)]),
            lax.pmax(y.max(0), "i"),
            lax.psum_scatter(jnp.stack([y] * 3), "i"),
            y - lax.psum(y.sum(0, keepdims=True), "i"),
        )

    chunked = sm.chunked(talks, CUT)
    mapped = sm.spmap(chunked, "i", in_axes=(0, None), lowering=lowering)
    expected, vmapped = (
        jax.jit(jax.vmap(f, (0, None), axis_name="i"))(XS, W) for f in (talks, chunked)
    )
    assert_same(mapped(XS, W), expected)
    assert_same(vmapped, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change", [lambda f: f, lambda f: jax.grad(squared(f), (0, 1))]
)
def test_shard_map(change):
    def talks(x, w):
        return x @ w - lax.psum(x @ w, "i")

    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    part, whole = PartitionSpec("i"), PartitionSpec()
    x = jnp.concatenate([X] * 4)

    def mapped(f):
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=(part, whole), out_specs=part)
        )

    check(lambda f: change(mapped(f)), talks, x, W)


def test_pieces_of_one_length_in_a_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")

    def mapped(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))

    def centred(x):
        return x - x.mean(0, keepdims=True)

    x = jnp.arange(64.0 * 6).reshape(64, 6)
    assert_same(mapped(sm.chunked(centred, {0: 4}))(x), mapped(centred)(x))


# Kinds of arguments


def test_random_keys():
    keys = jax.random.split(jax.random.key(0), 7)
    each = jax.vmap(lambda k, x: (jax.random.normal(k, x.shape) + x, k))
    check(jax.jit, each, keys, X, cuts=({0: 3}, {0: 3}))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "float16", "bfloat16"])
def test_dtypes(dtype):
    def reduced(x):
        return x.sum(0), x.max(), x.min(1), x.argmax(0), jnp.cumsum(x, 0), x * x

    check(jax.jit, reduced, (X * 8).astype(dtype), cuts={0: 3})


def test_products_of_booleans():
    x = X > 0.5
    check(jax.jit, lambda x: x.T @ x, x, cuts={0: 3})


@pytest.mark.deep
def test_complex_numbers():
    def reduced(z):
        return z.sum(0), z.conj() * z, jnp.abs(z).max(), jnp.fft.fft(z, axis=1)

    z = lax.complex(X, X[::-1])
    check(jax.jit, reduced, z, cuts={0: 3})
    check(jax.grad, lambda z: (jnp.abs(z) ** 2).sum(), z, cuts={0: 3})


def test_float0():
    def total(k, x):
        return (x * k[:, None].astype(np.float32)).sum()

    chunked = sm.chunked(total, ({0: 3}, {0: 3}))
    found = jax.grad(chunked, allow_int=True)(jnp.arange(7), X)
    assert found.dtype == jax.dtypes.float0
    assert_same(
        jax.grad(chunked, 1)(jnp.arange(7), X), jax.grad(total, 1)(jnp.arange(7), X)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("cuts", [{0: 1}, {0: sm.AUTO}, {1: 2}])
def test_no_elements(cuts):
    def reduced(x):
        return x @ W, x.sum(0), jnp.tanh(x)

    empty = jnp.zeros((0, 4), np.float32)
    assert_same(sm.chunked(reduced, cuts, memory="1 MB")(empty), reduced(empty))


def test_numpy_and_abstract_arguments():
    chunked = sm.chunked(fun, CUT)
    assert_same(chunked(np.asarray(X), np.asarray(W)), fun(X, W))
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    found, expected = (jax.eval_shape(f, *structs) for f in (chunked, fun))
    assert jax.tree.map(str, found) == jax.tree.map(str, expected)
    jax.jit(chunked).lower(*structs).compile()
    assert "3 pieces" in str(chunked.explain(*structs))


@pytest.mark.parametrize("nothing", [lambda x: None, lambda x: (None, 3)])
def test_what_computes_nothing_is_told_nothing(nothing):
    assert sm.chunked(nothing, {0: 3}, strict=True)(X) == nothing(X)


def test_donated_arguments():
    def doubled(x):
        return x * 2

    donated = jax.jit(sm.chunked(doubled, {0: 3}), donate_argnums=0)
    given = X + 0
    assert_same(donated(given), X * 2)
    assert given.is_deleted()


def on_devices(kind, shape, names):
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))
    part = PartitionSpec(names[0])
    return mesh, (
        jax.device_put(EIGHT, NamedSharding(mesh, part)),
        jax.device_put(W, NamedSharding(mesh, PartitionSpec())),
    )


def test_arguments_that_lie_on_devices():
    _, args = on_devices(AxisType.Auto, (8,), ("a",))
    check(jax.jit, fun, *args)


EXPLICIT = {
    "rows": rows,
    "softmax": lambda x, w: jax.nn.softmax(x @ w, axis=-1),
    "sum": lambda x, w: (x.sum(0), jnp.tanh(x)),
    "reshape": lambda x, w: (x.reshape(56, 2, 2) * 2).sum(-1),
    "samples": lambda x, w: jax.vmap(lambda r: jnp.tanh(r @ w).sum())(x),
    "asked": lambda x, w: jnp.einsum(
        "ij,jk->ik", x, w, out_sharding=PartitionSpec("a", None)
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", mostly_deep(EXPLICIT))
def test_under_an_explicit_mesh(name):
    mesh, args = on_devices(AxisType.Explicit, (4, 2), ("a", "b"))
    with jax.set_mesh(mesh):
        chunked = jax.jit(sm.chunked(EXPLICIT[name], CUT, strict=True))
        found, expected = chunked(*args), jax.jit(EXPLICIT[name])(*args)
        assert_same(found, expected)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
        check(lambda f: jax.jit(jax.grad(squared(f))), EXPLICIT[name], *args)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in EXPLICIT if name != "asked"])
def test_arguments_on_an_explicit_mesh(name):
    """Without `jax.set_mesh`."""
    _, args = on_devices(AxisType.Explicit, (4, 2), ("a", "b"))
    fun = EXPLICIT[name]
    expected, chunked = jax.jit(fun)(*args), sm.chunked(fun, CUT, strict=True)
    for found in (chunked(*args), jax.jit(chunked)(*args)):
        assert_same(found, expected)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
    check(lambda f: jax.jit(jax.grad(squared(f))), fun, *args)
    assert_same(sm.plan(fun, *args, in_slices=CUT).run(*args), expected)


def test_vmap_along_an_explicit_axis():
    _, (x, _) = on_devices(AxisType.Explicit, (4, 2), ("a", "b"))

    def fun(row):
        return jnp.tanh(row).sum()

    expected = jax.vmap(fun)(x)
    found = jax.vmap(sm.chunked(fun, {0: 2}))(x)
    assert_same(found, expected)
    assert jax.typeof(found) == jax.typeof(expected)


def test_what_is_closed_over_under_an_explicit_mesh():
    mesh, args = on_devices(AxisType.Explicit, (4, 2), ("a", "b"))

    def closing(x, w):
        return sm.chunked(lambda x: jnp.tanh(x @ w).sum(-1), {0: 3})(x)

    with jax.set_mesh(mesh):
        (traced,) = jax.make_jaxpr(closing)(*args).out_avals
        assert traced == jax.typeof(args[0].sum(-1))
        assert_same(closing(*args), jnp.tanh(args[0] @ args[1]).sum(-1))


# Modes


@pytest.mark.deep
def test_without_jit():
    with jax.disable_jit():
        check(lambda f: f, fun, X, W)
        check(lambda f: jax.grad(squared(f)), fun, X, W)


def test_nans_are_found():
    with jax.debug_nans(True):
        check(lambda f: f, fun, X, W)
        with pytest.raises(FloatingPointError, match="nan"):
            sm.chunked(lambda x: jnp.log(x - x - 1), {0: 3})(X)


def test_checks_of_jax():
    with jax.enable_checks(True), jax.checking_leaks():
        check(lambda f: jax.jit(jax.grad(squared(f))), fun, X, W)
        check(lambda f: jax.jit(jax.vmap(f, (0, None))), fun, XS, W)


WIDE = {
    "rows": rows,
    "both": fun,
    "running": lambda x, w: jnp.cumsum(x, 0) @ w,
    "written": lambda x, w: x.at[:, 1].set(0.25),
    "rolled": lambda x, w: jnp.roll(x, 1, 0) @ w,
    "random": lambda x, w: jax.random.normal(jax.random.key(1), x.shape) + x,
    "windows": lambda x, w: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
}


@pytest.mark.parametrize("name", mostly_deep(WIDE))
def test_64_bits(name):
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(a, np.float64)) for a in (X, W))
        check(jax.jit, WIDE[name], x, w)
        check(
            lambda f: jax.grad(squared(f)), WIDE[name], x, w, cuts=({0: 2, 1: 2}, None)
        )


@pytest.mark.deep
def test_searchsorted_runs_in_pieces():
    """JAX 0.12 writes it as an equation of a high level."""
    edges = np.linspace(-1, 1, 9, dtype=np.float32)
    x = np.linspace(-2, 2, 20, dtype=np.float32)

    def fun(x):
        return jnp.searchsorted(edges, x), jnp.histogram(x, edges)[0]

    for result in (sm.chunked(fun, {0: 3})(x), jax.jit(sm.chunked(fun, {0: 3}))(x)):
        assert_same(result, jax.jit(fun)(x))
