"""Collectives over several names, in any order, and what is refused when traced.

The oracle puts all elements in one row, in the order of the names, and loops over it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map.map_checks import array
from tests.map_programs import both_lowerings, collectives_of

ORDERS = [("x", "y"), ("y", "x")]
SHAPES = [(2, 4), (3, 5), (16, 2), (7, 1)]


def in_a_row(fun, values, names):
    """``fun`` of the elements of axes x and y, in a row in the order of ``names``."""
    order = [*map("xy".index, names), *range(2, values.ndim)]
    turned = values.transpose(order)
    row = fun(turned.reshape(-1, *values.shape[2:]))
    shape = turned.shape[:2] + row.shape[1:]
    return row.reshape(shape).transpose(
        [*np.argsort(order[:2]), *range(2, row.ndim + 1)]
    )


def nested(body, **options):
    return sm.spmap(sm.spmap(body, "y", **options), "x", **options)


def cut(total, sizes):
    """Groups of these sizes, in an order of their own."""
    order = np.random.default_rng(total).permutation(total)
    return [group.tolist() for group in np.split(order, np.cumsum(sizes)[:-1])]


def by_groups(combine, groups):
    """For each element, ``combine`` of its group's elements and its place in it."""

    def fun(row):
        results = [None] * len(row)
        for group in groups:
            for place, index in enumerate(group):
                results[index] = combine([row[k] for k in group], place)
        return np.stack(results)

    return fun


REDUCED = {
    "psum": (lax.psum, lambda group, _: sum(group)),
    "pmax": (lax.pmax, lambda group, _: np.max(group, 0)),
    "pmin": (lax.pmin, lambda group, _: np.min(group, 0)),
}

REARRANGED = {
    "all_gather": (
        lambda v, names, groups: lax.all_gather(v, names, axis_index_groups=groups),
        lambda group, _: np.stack(group),
    ),
    "psum_scatter": (
        lambda v, names, groups: lax.psum_scatter(
            v, names, axis_index_groups=groups, tiled=True
        ),
        lambda group, k: np.split(sum(group), len(group))[k],
    ),
    "all_to_all": (
        lambda v, names, groups: lax.all_to_all(
            v, names, 0, 0, axis_index_groups=groups, tiled=True
        ),
        lambda group, k: np.concatenate([np.split(v, len(group))[k] for v in group]),
    ),
}


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", ORDERS, ids=["xy", "yx"])
@pytest.mark.parametrize("shape", SHAPES)
@both_lowerings
def test_groups_over_several_names(spmap, shape, names):
    total = int(np.prod(shape))
    uneven = cut(total, [1, 2, total - 3])
    even = cut(total, [total // 2] * 2 if total % 2 == 0 else [1] * total)
    values = array(*shape, 2 * len(even[0]))

    def body(v):
        results = [op(v, names, axis_index_groups=uneven) for op, _ in REDUCED.values()]
        return results + [op(v, names, even) for op, _ in REARRANGED.values()]

    got = spmap(spmap(body, "y"), "x")(values)
    combine = [
        *(by_groups(c, uneven) for _, c in REDUCED.values()),
        *(by_groups(c, even) for _, c in REARRANGED.values()),
    ]
    for result, fun in zip(got, combine, strict=True):
        np.testing.assert_allclose(result, in_a_row(fun, values, names), rtol=1e-6)


def test_groups_and_results_that_are_alike():
    # Whether results differ is asked of the same rules.
    def body(v):
        return lax.pmax(v, "i"), lax.psum(v, "i", axis_index_groups=[[0, 3], [1, 2]])

    alike, grouped = sm.spmap(body, "i", out_axes=(None, 0))(
        np.arange(4, dtype=np.float32)
    )
    assert alike == 3
    np.testing.assert_array_equal(grouped, [3] * 4)


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("length", [2, 11])
def test_groups_of_one_map_in_blocks_of_another(spmap, length):
    def exchange(v):
        both = jnp.stack([v, v + 100])
        groups = [[0, 3], [1, 2]]
        return lax.all_to_all(both, "x", 0, 0, axis_index_groups=groups)

    values = array(4, length)
    got = spmap(spmap(exchange, "y"), "x", devices=jax.devices()[:4])(values)
    a, b, c, d = values
    expected = np.stack([[a, d], [b, c], [b + 100, c + 100], [a + 100, d + 100]])
    np.testing.assert_array_equal(got, expected.transpose(0, 2, 1))


# The order of names


def shifted(row):
    return np.roll(row, 1, 0)


def shift(v, names, count):
    return lax.ppermute(v, names, [(k, (k + 1) % count) for k in range(count)])


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", ORDERS, ids=["xy", "yx"])
@pytest.mark.parametrize("shape", SHAPES)
@both_lowerings
def test_permutations_count_in_the_order_of_the_names(spmap, shape, names):
    count, values = int(np.prod(shape)), array(*shape, 2)
    order = np.random.default_rng(1).permutation(count).tolist()

    def body(v):
        return shift(v, names, count), lax.pshuffle(v, names, order)

    got = spmap(spmap(body, "y"), "x")(values)
    np.testing.assert_array_equal(got[0], in_a_row(shifted, values, names))
    shuffled = in_a_row(lambda row: row[order], values, names)
    np.testing.assert_array_equal(got[1], shuffled)
    gradient = jax.grad(lambda v: (spmap(spmap(body, "y"), "x")(v)[0] * v).sum())
    expected = in_a_row(shifted, values, names) + in_a_row(
        lambda row: np.roll(row, -1, 0), values, names
    )
    np.testing.assert_allclose(gradient(values), expected)


def test_a_permutation_over_several_names_is_one_collective():
    mapped = nested(lambda v: shift(v, ("y", "x"), 8))
    assert collectives_of(mapped, array(2, 4)) == {"collective-permute": 1}


def over_one_axis(size):
    """One of each collective, and NumPy's answer for all elements in a row."""
    tiled = {"tiled": True}
    pieces = size * 2

    def body(v):
        return (
            lax.axis_index("i") + 0 * v[0].astype(np.int32),
            shift(v, "i", size),
            lax.all_gather(v, "i"),
            lax.psum_scatter(v, "i", **tiled),
            lax.all_to_all(v, "i", 0, 0, **tiled),
            lax.pbroadcast(v, "i", 1),
            lax.psum(v, "i", axis_index_groups=[[0], [*range(1, size)]]),
        )

    def expected(row):
        return (
            np.arange(size),
            shifted(row),
            np.broadcast_to(row, (size, size, pieces)),
            row.sum(0).reshape(size, 2),
            row.reshape(size, size, 2).transpose(1, 0, 2).reshape(size, pieces),
            np.broadcast_to(row[1], row.shape),
            np.stack([row[0], *[row[1:].sum(0)] * (size - 1)]),
        )

    return body, expected


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [8, 11, 16])
@pytest.mark.parametrize("axes", [("model", "data"), ("data", "model"), ("model",)])
@both_lowerings
def test_mesh_axes_in_another_order(spmap, axes, size):
    mesh = sm.make_mesh({"data": 4, "model": 2})
    body, expected = over_one_axis(size)
    values = array(size, size * 2)
    got = spmap(body, "i", mesh=mesh, mesh_axes=axes)(values)
    for result, answer in zip(got, expected(values), strict=True):
        np.testing.assert_allclose(result, answer, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [8, 11])
@both_lowerings
def test_an_inner_map_over_mesh_axes_in_another_order(spmap, size):
    mesh = sm.make_mesh({"a": 2, "b": 2, "c": 2})
    body, expected = over_one_axis(size)

    def outer(v):
        # A tap makes the program of the outer map know each device.
        sm.tap(lambda _: None, v[0, 0])
        return spmap(body, "i", mesh=mesh, mesh_axes=("c", "a"))(v)

    values = array(2, size, size * 2)
    got = spmap(outer, "o", mesh=mesh, mesh_axes="b")(values)
    sm.taps_barrier()
    for k in range(2):
        for result, answer in zip(got, expected(values[k]), strict=True):
            np.testing.assert_allclose(result[k], answer, rtol=1e-6)


@pytest.mark.few(1)
@both_lowerings
def test_a_map_called_as_the_mesh_calls_another_axis(spmap):
    mesh, values = sm.make_mesh({"data": 4, "model": 2}), array(4, 2)

    def body(v):
        return lax.psum(v, "i"), lax.psum(v, "data"), shift(v, ("data", "i"), 8)

    def mapped(**inner):
        inside = spmap(body, "data", **inner)
        return spmap(inside, "i", mesh=mesh, mesh_axes="data")(values)

    for outer, inner, both in (mapped(mesh=mesh, mesh_axes="model"), mapped()):
        np.testing.assert_array_equal(outer, np.broadcast_to(values.sum(0), (4, 2)))
        in_row = np.broadcast_to(values.sum(1)[:, None], (4, 2))
        np.testing.assert_array_equal(inner, in_row)
        np.testing.assert_array_equal(both, in_a_row(shifted, values, ("y", "x")))


# jax.vmap around


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("names", ORDERS, ids=["xy", "yx"])
@both_lowerings
def test_vmap_around(spmap, names):
    groups = [[0, 3, 5], [1, 2, 4]]
    values = array(2, 3, 6)

    def body(v):
        return (
            lax.all_gather(v, names),
            lax.psum_scatter(v, names, tiled=True),
            shift(v, names, 6),
            lax.psum(v, names, axis_index_groups=groups),
            lax.all_to_all(v, names, 0, 0, tiled=True),
            lax.pbroadcast(v, names, 4),
        )

    mapped = jax.vmap(spmap(body, "y"), axis_name="x")
    answers = [
        lambda row: np.broadcast_to(row, (6, *row.shape)),
        lambda row: row.sum(0).reshape(6, 1),
        shifted,
        by_groups(lambda group, _: sum(group), groups),
        lambda row: row.T,
        lambda row: np.broadcast_to(row[4], row.shape),
    ]
    for got in (mapped(values), jax.jit(mapped)(values)):
        for result, answer in zip(got, answers, strict=True):
            expected = in_a_row(answer, values, names)
            np.testing.assert_allclose(result, expected, rtol=1e-6)


@both_lowerings
def test_positions_along_outer_and_inner_axes(spmap):
    # JAX's type checker knows what an axis_index is called.
    mesh = sm.make_mesh({"a": 2, "b": 2, "c": 2})

    def body(v):
        return v + lax.axis_index(("o", "i"))

    inner = spmap(body, "i", mesh=mesh, mesh_axes=("c", "a"))
    got = spmap(inner, "o", mesh=mesh, mesh_axes="b")(np.zeros((2, 4), np.int32))
    np.testing.assert_array_equal(got, np.arange(8).reshape(2, 4))
