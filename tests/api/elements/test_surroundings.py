"""Maps in the function of `jax.shard_map`: whose devices they run on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import assert_same, float_index

MESH = sm.make_mesh({"a": 2, "b": 4})
X = np.arange(8, dtype=np.float32)


def in_shard_map(names=("a",), **options):
    mapped = sm.spmap(lambda v: v + lax.psum(v, "i"), "i", **options)
    specs = P("a")
    return jax.jit(
        jax.shard_map(
            mapped,
            mesh=MESH,
            in_specs=specs,
            out_specs=specs,
            axis_names=set(names),
            check_vma=False,
        )
    )


def expected():
    return np.concatenate([half + half.sum() for half in (X[:4], X[4:])])


def test_each_device_runs_all_elements_of_its_block():
    f = in_shard_map()
    np.testing.assert_array_equal(f(X), expected())
    assert f.lower(X).as_text().count("sdy.manual_computation") == 1


def test_a_map_walks_axes_that_the_shard_map_leaves():
    f = in_shard_map(mesh=MESH, mesh_axes="b")
    np.testing.assert_array_equal(f(X), expected())
    assert f.lower(X).as_text().count("sdy.manual_computation") == 2


@pytest.mark.parametrize("options", [{"devices": jax.devices()}, {"backend": "cpu"}])
def test_devices_of_its_own_are_refused(options):
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a',), whose devices it runs "
        "on, but names [0, 1, 2, 3, 4, 5, 6, 7]. Leave out devices and backend, or walk"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(**options)(X)


def test_another_mesh_is_refused():
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a',) of a mesh {'a': 2, "
        "'b': 4}, but names the mesh {'c': 8}. Leave out mesh and mesh_axes, or name"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(mesh=sm.make_mesh({"c": 8}), mesh_axes="c")(X)


def test_an_axis_that_the_shard_map_walks_is_refused():
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a', 'b'), which walks 'b' "
        "already, and so does the map with mesh_axes=('b',). Leave out mesh and"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(("a", "b"), mesh=MESH, mesh_axes="b")(X)


# One that checks along which axes values differ

RING = [(k, (k + 1) % 4) for k in range(4)]
ELEMENTS = {
    "no collective": lambda v: jnp.sin(v * WEIGHT) + jnp.arange(3.0).sum(),
    "own axis": lambda v: v * lax.psum(v, "i") + lax.ppermute(v, "i", RING),
    "axis around": lambda v: v * lax.psum(v, "a") + lax.all_gather(v, "a")[0],
    "both": lambda v: v / lax.psum(v * v, ("a", "i")),
    "indices": lambda v: v * (float_index("i") + 2 * float_index("a")),
    "groups": lambda v: v * lax.psum(v, "i", axis_index_groups=[[0, 2], [1, 3]]),
    "scan": lambda v: lax.scan(
        lambda c, _: (c * 0.5 + lax.psum(v * c, "i"), c), 1.0, length=2
    )[0],
    "cond": lambda v: lax.cond(v > 0.5, lambda v: v * v, lambda v: -v, v),
    "gradient": lambda v: jax.grad(lambda v: lax.psum(jnp.sin(v), "i") * v)(v),
    "checkpoint": jax.checkpoint(lambda v: jnp.sin(lax.psum(v, "i")) * v),
    "a map": lambda v: sm.spmap(
        lambda u: u * lax.psum(u * v, ("i", "j")), "j", out_axes=0
    )(jnp.stack([v, v * 2])).sum(),
}
WEIGHT = jnp.float32(2)
Y = X / 7 + 0.3


def squared(fun):
    return lambda x: (jnp.sin(fun(x)) ** 2).sum()


CHANGES = {
    "called": lambda fun: fun,
    "jit": jax.jit,
    "grad": lambda fun: jax.jit(jax.grad(squared(fun))),
    "hessian": lambda fun: jax.jit(jax.hessian(squared(fun))),
    "jvp": lambda fun: lambda x: jax.jvp(fun, (x,), (jnp.cos(x),)),
    "vmap": lambda fun: lambda x: jax.vmap(fun)(jnp.stack([x, x + 1])),
}


def same_unchecked(fun, change, **options):
    """Checked, the function gives what it does unchecked."""

    def mapped(check_vma):
        return change(
            jax.shard_map(
                fun,
                mesh=MESH,
                in_specs=P("a"),
                out_specs=P("a"),
                check_vma=check_vma,
                **options,
            )
        )

    assert_same(mapped(True)(Y), mapped(False)(Y))


@pytest.mark.few(1)
@pytest.mark.one_in(6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_where_types_are_checked(name, change):
    same_unchecked(sm.spmap(ELEMENTS[name], "i"), CHANGES[change])


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_map_closes_over_where_types_are_checked(change):
    def fun(x):
        total = jnp.sin(x)

        def step(c, _):
            return sm.spmap(lambda v: v * c.sum() + total.sum() + WEIGHT)(c), None

        return lax.scan(step, x, length=2)[0]

    same_unchecked(fun, CHANGES[change])


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", ["jit", "grad"])
@pytest.mark.parametrize("lowering", ["manual", "spmd"])
@pytest.mark.parametrize("name", ["own axis", "both"])
def test_a_map_walks_other_axes_where_types_are_checked(name, lowering, change):
    mapped = sm.spmap(ELEMENTS[name], "i", mesh=MESH, mesh_axes="b", lowering=lowering)
    same_unchecked(mapped, lambda fun: jax.jit(CHANGES[change](fun)), axis_names={"a"})


def test_blocks_where_types_are_checked():
    cut = {"b": 0}

    def block(x):
        return x * lax.psum(x, "b")

    blocks = sm.mesh_map(block, MESH, (cut,), cut)
    same_unchecked(blocks, jax.jit, axis_names={"a"})
    blocks = sm.mesh_map(block, MESH, (cut,), cut, lowering="spmd")
    text = "mesh_map of block has lowering='spmd' inside a jax.shard_map with check_vma"
    with pytest.raises(ValueError, match=text):
        same_unchecked(blocks, jax.jit, axis_names={"a"})


def test_maps_in_control_flow_where_types_are_checked():
    mapped = sm.spmap(ELEMENTS["own axis"], "i")

    def fun(x):
        x, _ = lax.scan(lambda c, _: (mapped(c), None), x, length=2)
        return lax.cond(x.sum() > 1, mapped, lambda x: x, x)

    same_unchecked(fun, CHANGES["jit"])


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [jax.jit, CHANGES["grad"]])
def test_types_are_checked_beside_explicit_axes(change):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    # Typed as cut along both axes, of which one is left to the function.
    x = jax.device_put(np.concatenate([Y, Y]), NamedSharding(mesh, P(("a", "b"))))

    def mapped(check_vma):
        fun = sm.spmap(lambda v: v * lax.psum(v, "i"), "i")
        options = {"mesh": mesh, "axis_names": {"a"}, "check_vma": check_vma}
        specs = {"in_specs": P("a"), "out_specs": P("a")}
        return change(jax.shard_map(fun, **specs, **options))

    assert_same(np.asarray(mapped(True)(x)), np.asarray(mapped(False)(x)))


def test_gradients_of_what_does_not_differ_add_up():
    def gradients(check_vma):
        def fun(x, w):
            return sm.spmap(lambda v: v * lax.psum(v * w.sum(), "i"), "i")(x)

        mapped = jax.shard_map(
            fun,
            mesh=MESH,
            in_specs=(P("a"), P()),
            out_specs=P("a"),
            check_vma=check_vma,
        )
        return jax.grad(lambda *args: mapped(*args).sum(), (0, 1))(Y, Y[:3])

    assert_same(gradients(True), gradients(False))


def test_results_differ_along_the_axes_that_a_map_names():
    def whole(fun):
        specs = {"in_specs": P(), "out_specs": P()}
        return jax.jit(jax.shard_map(fun, mesh=MESH, **specs))

    summed = sm.spmap(lambda v: v + lax.psum(v, "i"), "i")
    np.testing.assert_allclose(whole(summed)(Y), Y + Y.sum(), rtol=1e-6)
    for fun in (
        lambda x: sm.spmap(lambda v: v * float_index("a"))(x),
        lambda x: sm.spmap(lambda: float_index("a"), axis_size=3)(),
        # These have no effects by which JAX itself says which axes they name.
        lambda x: sm.spmap(lambda v: lax.ppermute(v, "a", [(0, 1)]))(x),
        lambda x: sm.spmap(lambda v: lax.pbroadcast(v, "a", 1))(x),
    ):
        with pytest.raises(ValueError, match=r"out_specs.* replicat"):
            whole(fun)(Y)


IN_PIECES = {
    "plain": lambda x: jnp.sin(sm.spmap(lambda v: 2 * v)(x)) * 3,
    "collectives": sm.spmap(lambda v: v * lax.psum(v, "i") + lax.psum(v, "a"), "i"),
    "closed over": lambda x: sm.chunked(
        lambda y: sm.spmap(lambda v: v * x.sum())(y) + x[0], {0: 2}
    )(jnp.cos(x)),
    "in a loop": lambda x: lax.scan(
        lambda c, _: (sm.spmap(lambda v: jnp.sin(v) + c.sum())(c), None), x, length=2
    )[0],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", IN_PIECES)
def test_pieces_of_a_map_where_types_are_checked(name, change, remat):
    if remat is False and change in ("hessian", "jvp"):
        change = "grad"  # It is for reverse mode.
    pieces = sm.chunked(IN_PIECES[name], {0: 2}, remat=remat)
    same_unchecked(pieces, CHANGES[change])


@pytest.mark.parametrize("check_vma", [False, True])
def test_taps_in_a_map(check_vma):
    seen = []

    def element(v):
        return lax.psum(sm.tap(lambda v: seen.append(float(v)), v), "i")

    mapped = jax.shard_map(
        sm.spmap(element, "i"),
        mesh=MESH,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
        check_vma=check_vma,
    )
    jax.block_until_ready(jax.jit(mapped)(X))
    sm.taps_barrier()
    assert sorted(seen) == X.tolist()
