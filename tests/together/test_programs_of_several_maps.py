"""Maps of different sizes in one program: they share all of its devices."""

import functools
import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import (
    assert_same,
    both_lowerings,
    collectives_of,
    float_index,
    spread,
)

X = spread((16, 3))
SIZES = [1, 3, 4, 12, 16]
CUT_OTHERWISE = sm.make_mesh({"d": 2, "e": 4})


def normalized(x):
    """Needs all elements, empty places none."""
    largest = lax.pmax(lax.stop_gradient(x), "i")
    return x / lax.psum(x * x, "i") + largest + float_index("i")


def of_two_sizes(map_, one, other):
    mapped = map_(normalized, axis_name="i")
    return lambda x: (mapped(x[:one]), mapped(x[:other]))


def mesh_in_a_program(fun, *args):
    (equation,) = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    return dict(equation.params["mesh"].shape)


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("other", SIZES)
@pytest.mark.parametrize("one", [8, 5])
def test_two_sizes_under_jit(spmap, one, other):
    ours, theirs = of_two_sizes(spmap, one, other), of_two_sizes(jax.vmap, one, other)
    assert_same(jax.jit(ours)(X), jax.jit(theirs)(X))


WRAPPED = {
    "scan": lambda fun: (
        lambda x: lax.scan(lambda c, s: (c + s, fun(c * s)), x, np.ones(2, "f4"))
    ),
    "cond": lambda fun: (
        lambda x: lax.cond(x[0, 0] > 2, lambda x: fun(x)[0], lambda x: fun(x)[0], x)
    ),
    "branches of two sizes": lambda fun: (
        lambda x: lax.cond(
            x[0, 0] > 2, lambda x: fun(x)[0][:4], lambda x: fun(x)[1][:4], x
        )
    ),
    "while": lambda fun: (
        lambda x: lax.fori_loop(
            0, 3, lambda _, x: x * 0.5 + fun(x)[0].sum() + fun(x)[1].sum(), x
        )
    ),
    "grad": lambda fun: jax.grad(lambda x: sum(jnp.sin(r).sum() for r in fun(x))),
    "vmap": lambda fun: jax.vmap(lambda s: fun(X * s)),
    "checkpoint": lambda fun: jax.grad(
        lambda x: sum(jnp.sin(r).sum() for r in jax.checkpoint(fun)(x))
    ),
}


@pytest.mark.few(1)
@pytest.mark.one_in(4)
@both_lowerings
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (6, 5)], ids=str)
def test_two_sizes_under_transformations(spmap, wrap, sizes):
    args = (np.ones(2, "f4"),) if wrap is WRAPPED["vmap"] else (X,)
    ours, theirs = (wrap(of_two_sizes(map_, *sizes)) for map_ in (spmap, jax.vmap))
    expected = jax.jit(theirs)(*args)
    assert_same(ours(*args), expected)
    assert_same(jax.jit(ours)(*args), expected)


def test_partitions_of_all_devices_beside_maps():
    def double(x):
        return 2 * x

    cut = sm.sharded_jit(double, (4, 2), (8, 1))
    mapped = sm.spmap(double)

    def together(x):
        return [fun(x[:8, :2]) for fun in (cut, mapped)], mapped(x[:4])

    expected = [2 * X[:8, :2]] * 2, 2 * X[:4]
    assert_same(jax.tree.map(np.asarray, jax.jit(together)(X)), expected)
    gradient = jax.grad(lambda x: sum(r.sum() for r in together(x)[0]))
    assert_same(np.asarray(gradient(X)[:8, :2]), np.full((8, 2), 4, np.float32))


def test_a_map_in_a_sharded_function_runs_where_that_does():
    def shares(x, **options):
        return sm.spmap(lambda v: v / lax.psum(v, "i"), "i", **options)(x)

    cut = sm.sharded_jit(shares, (2, 1), (2, 1))
    match = r"incompatible devices .* sharding_constraint inside jit with device ids"
    for fun in (cut, cut.lower, jax.jit(cut)):
        with pytest.raises(ValueError, match=match):
            fun(X)
    on_two = functools.partial(shares, devices=jax.devices()[:2])
    on_two = sm.sharded_jit(on_two, (2, 1), (2, 1))
    for fun in (on_two, jax.jit(on_two)):
        assert_same(np.asarray(fun(X)), X / X.sum(0))


# Which devices


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (8, {"i": 8}),
        (16, {"i": 8}),
        (4, {"i": 8, "_replicas": 1}),
        (12, {"i": 8, "_replicas": 1}),
    ],
)
def test_a_map_in_a_program_is_laid_over_all_devices(size, expected):
    assert mesh_in_a_program(sm.spmap(jnp.sin, "i"), np.ones(size)) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 2), {"i": 4, "j": 2}),
        ((2, 2), {"i": 2, "j": 2, "_replicas": 2}),
        ((2, 3), {"i": 2, "j": 2, "_replicas": 2}),
        ((3, 2), {"i": 8, "_replicas": 1}),
    ],
)
def test_nested_maps_in_a_program_have_replicas(shape, expected):
    nested = sm.spmap(sm.spmap(jnp.sin, "j"), "i")
    assert mesh_in_a_program(nested, np.ones(shape)) == expected


def test_nests_that_leave_devices_stand_beside_others():
    nested = sm.spmap(sm.spmap(lambda x: x / lax.psum(x, ("i", "j")), "j"), "i")
    small, large = np.ones((2, 2), np.float32), np.ones((2, 4), np.float32)
    program = jax.jit(lambda x, y: (nested(x), nested(y)))
    assert_same(program(small, large), (small / 4, large / 8))
    assert collectives_of(jax.jit(nested), small) == {"all-reduce": 1}


def test_the_devices_that_are_given_are_all():
    four = jax.devices()[2:6]
    mapped = sm.spmap(jnp.sin, devices=four)
    results = jax.jit(lambda x: (mapped(x[:4]), mapped(x[:2])))(X)
    assert all(r.sharding.device_set == set(four) for r in results)


def test_a_call_of_its_own_takes_no_more_devices_than_it_needs():
    assert len(sm.spmap(jnp.sin)(X[:4]).sharding.device_set) == 4


def test_results_of_calls_meet_what_is_made_of_them_in_a_trace():
    few = sm.spmap(jnp.sin)(X[:4])
    gradient = jax.grad(lambda x: (sm.spmap(jnp.cos)(x) * x).sum())(few)
    assert gradient.sharding.device_set == few.sharding.device_set
    cut = sm.sharded_jit(lambda x: x + 1, (2, 1), (2, 1))
    two = cut(X)
    gradient = jax.grad(lambda x: (cut(x) * x).sum())(two)
    assert gradient.sharding.device_set == two.sharding.device_set


def test_what_a_trace_evaluates_meets_what_all_devices_have():
    gradient = jax.grad(lambda x: jnp.sin(sm.spmap(jnp.sin, "i")(x)).sum())(X[:4])
    assert gradient.is_fully_replicated
    assert len(gradient.sharding.device_set) == 8


# Meshes that cannot be one


def test_maps_that_cut_the_devices_otherwise_are_refused():
    nested = sm.spmap(sm.spmap(jnp.sin))
    x, y = np.ones((4, 2), np.float32), np.ones((2, 4), np.float32)
    with pytest.raises(
        NotImplementedError,
        match=r"spmap of sin runs on 2 x 4 devices, spmap of sin of the same program "
        r"on 4 x 2 devices: XLA cannot cut one program both ways.*sizes \(2, 2, 2\)",
    ):
        jax.jit(lambda x, y: (nested(x), nested(y)))(x, y)
    mesh = sm.make_mesh({"a": 2, "b": 2, "c": 2})

    def on_mesh(outer, inner):
        inside = sm.spmap(jnp.sin, mesh=mesh, mesh_axes=inner)
        return sm.spmap(inside, mesh=mesh, mesh_axes=outer)

    first, second = on_mesh(("a", "b"), "c"), on_mesh("a", ("b", "c"))
    got = jax.jit(lambda x, y: (first(x), second(y)))(x, y)
    assert_same(got, (np.sin(x), np.sin(y)))


def test_maps_that_no_mesh_fits_are_advised_to_be_two_programs():
    nested = sm.spmap(sm.spmap(jnp.sin), devices=jax.devices()[:6])
    x, y = np.ones((3, 2), np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(
        NotImplementedError,
        match=r"on 2 x 3 devices, spmap of sin of the same program on 3 x 2 devices: "
        r"XLA cannot cut one program both ways. Put each into a jax.jit of its own, or "
        r"call the map outside",
    ):
        jax.jit(lambda x, y: (nested(x), nested(y)))(x, y)
    got = jax.jit(nested)(x), jax.jit(nested)(y)
    assert_same(got, (np.sin(x), np.sin(y)))


def test_arguments_that_cut_the_devices_otherwise_are_refused():
    mapped, x = sm.spmap(sm.spmap(jnp.sin)), spread((2, 4))

    def on(**sizes):
        mesh = sm.make_mesh(sizes)
        return jax.device_put(x, NamedSharding(mesh, P(None, "a")))

    with pytest.raises(
        NotImplementedError,
        match=r"spmap of sin runs on 2 x 4 devices, an argument of the same program "
        r"on 4 x 2 devices: XLA cannot cut.*sizes \(2, 2, 2\)",
    ):
        jax.jit(mapped)(on(a=4, b=2))
    assert_same(jax.jit(mapped)(on(a=2, b=2, c=2)), np.sin(x))
    assert_same(mapped(on(a=4, b=2)), np.sin(x))


def test_maps_along_all_axes_take_arguments_that_cut_otherwise():
    x = spread((2, 4))
    given = jax.device_put(
        x, NamedSharding(sm.make_mesh({"a": 4, "b": 2}), P(None, "a"))
    )
    by_partitioner = sm.spmap(sm.spmap(jnp.sin), lowering="spmd")
    blocks = sm.mesh_map(jnp.sin, CUT_OTHERWISE, {"d": 0}, {"d": 0})
    for mapped in (sm.spmap(jnp.sin), by_partitioner, blocks):
        total = jax.jit(lambda x, mapped=mapped: mapped(x).sum())
        assert_same(total(given), np.sin(x).sum())


@pytest.mark.usefixtures("young_heap")
def test_no_program_keeps_what_its_host_functions_hold():
    class Recorder:
        def __call__(self, value):
            pass

    def run():
        record = Recorder()
        sm.spmap(lambda x: sm.tap(record, x))(X)
        sm.taps_barrier()
        return weakref.ref(record)

    recorder = run()
    # A thread of JAX's may still be on its way out of the last call.
    for _ in range(100):
        gc.collect()
        if recorder() is None:
            break
        time.sleep(0.1)
    assert recorder() is None
