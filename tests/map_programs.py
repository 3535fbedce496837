"""Pieces of programs that tests of the map put together, and how results compare.

A body is written once for any kind of map: ``make(map_)`` gives the function of one
element, with ``map_`` for the maps inside it. So the same program runs on `spmap` and
on its oracle, `jax.vmap`.
"""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap._jax.walk import equations

TOLERANCE = {
    "float16": 1e-2,
    "bfloat16": 5e-2,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float64": 1e-12,
}
"""Relative to the largest entry of an array, or to 1."""


# Both lowerings

LOWERINGS = ["manual", "spmd"]

MAPS = [functools.partial(sm.spmap, lowering=lowering) for lowering in LOWERINGS]

both_lowerings = pytest.mark.parametrize("spmap", MAPS, ids=LOWERINGS)
"""Gives a test `spmap` by the one lowering, then by the other."""


def same_under_vmap(
    build: Callable[[Any], Callable[..., Any]],
    *args: Any,
    tolerance: float | None = None,
    compiled: bool = True,
) -> None:
    """``build(map)`` gives the same function for `jax.vmap` and by both lowerings.

    Also under `jax.jit`, if ``compiled``.
    """
    expected = jax.jit(build(jax.vmap))(*args)
    for map_ in MAPS:
        assert_same(build(map_)(*args), expected, tolerance, weak_types=True)
    if compiled:
        together = jax.jit(lambda *args: [build(map_)(*args) for map_ in MAPS])
        for got in together(*args):
            assert_same(got, expected, tolerance)


def float_index(name: Any) -> jax.Array:
    """The index along an axis, to count with: nothing is promoted in tests."""
    return lax.axis_index(name).astype(np.float32)


# How results compare


def assert_same(
    actual: Any,
    expected: Any,
    tolerance: float | None = None,
    weak_types: bool = False,
) -> None:
    """Equal structures, shapes and dtypes; floats close, everything else equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for got, (path, want) in zip(jax.tree.leaves(actual), paths, strict=True):
        where = f"result{jax.tree_util.keystr(path)}"
        got_aval, want_aval = jax.typeof(got), jax.typeof(want)
        assert got_aval.shape == want_aval.shape, where
        assert got_aval.dtype == want_aval.dtype, where
        if weak_types:
            assert got_aval.weak_type == want_aval.weak_type, where
        if got_aval.dtype == jax.dtypes.float0:
            continue
        if jnp.issubdtype(got_aval.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        got, want = np.asarray(got), np.asarray(want)
        if got_aval.dtype == jnp.bfloat16:
            got, want = got.astype(np.float32), want.astype(np.float32)
        close = TOLERANCE.get(got_aval.dtype.name)
        if close is None:
            np.testing.assert_array_equal(got, want, err_msg=where)
        else:
            close = tolerance or close
            largest = max(1.0, float(np.max(np.abs(want), initial=0.0)))
            np.testing.assert_allclose(
                got, want, rtol=close, atol=close * largest, err_msg=where
            )


def assert_laid_out(results: Any, out_axes: Any, size: int) -> None:
    """Results of an outermost map lie one element to a device, in device order.

    With maps inside, an element is on several devices in a row.
    """
    axes = jax.tree.broadcast(
        jax.tree.map(
            lambda axis: "whole" if axis is None else axis,
            out_axes,
            is_leaf=lambda axis: axis is None,
        ),
        results,
    )
    devices = jax.local_devices()
    for array, axis in zip(
        jax.tree.leaves(results), jax.tree.leaves(axes), strict=True
    ):
        assert isinstance(array, jax.Array)
        assert isinstance(array.sharding, jax.sharding.NamedSharding)
        if axis == "whole":
            assert array.is_fully_replicated
            continue
        copies = len(array.sharding.device_set) // size
        for shard in array.addressable_shards:
            k = devices.index(shard.device) // copies
            assert shard.index[axis] == slice(k, k + 1, None)
            assert shard.data.shape[axis] == 1


# Bodies


class Body(NamedTuple):
    """A function ``(x, w)`` of one element, and how it is mapped.

    Attributes:
      make: gives the function, from a map for use inside it.
      oracle: the same for `jax.vmap`, where that lacks a collective.
      size: the number of elements. One element of ``x`` is ``f32[size, 2]``, ``w`` is
        ``f32[2]``.
      in_axes: of ``x`` and ``w``.
      out_axes: a prefix of the result.
      smooth: whether JAX can differentiate it.
    """

    make: Callable[[Any], Callable[..., Any]]
    oracle: Callable[[Any], Callable[..., Any]] | None = None
    size: int = 4
    in_axes: Any = (0, None)
    out_axes: Any = 0
    smooth: bool = True

    def mapped(self, spmap: Any, wrap: Any = lambda fun: fun) -> Callable[..., Any]:
        """The body under ``spmap``, one of `MAPS`."""
        fun = wrap(self.make(spmap))
        return spmap(fun, "i", in_axes=self.in_axes, out_axes=self.out_axes)

    def expected(self, wrap: Any = lambda fun: fun) -> Callable[..., Any]:
        """The body under `jax.vmap`."""
        fun = wrap((self.oracle or self.make)(jax.vmap))
        return jax.vmap(
            fun, in_axes=self.in_axes, out_axes=self.out_axes, axis_name="i"
        )

    def args(self) -> tuple[Any, Any]:
        """Operands for `mapped`."""
        x_axis, w_axis = self.in_axes
        x = spread((self.size, self.size, 2))
        w = spread((2,), 1.0) if w_axis is None else spread((self.size, 2), 1.0)
        return (
            np.moveaxis(x, 0, x_axis),
            w if w_axis is None else np.moveaxis(w, 0, w_axis),
        )


def spread(shape: tuple[int, ...], start: float = 0.0) -> np.ndarray:
    """Floats between -1 and 1, all different."""
    count = int(np.prod(shape))
    values = np.sin(start + 1.7 * np.arange(1, count + 1))
    return values.reshape(shape).astype(np.float32)


def each(fun: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """A body with no map inside."""
    return lambda map_: fun


def mixed(x: Any, w: Any) -> Any:
    """Smooth, not linear, and different along every axis."""
    x, w = jnp.broadcast_arrays(x, w)
    return jnp.sin(x) * w + x * x


def collective(combine: Callable[[Any], Any], **options: Any) -> Body:
    """A body that combines the elements: nonlinear work before and after."""

    def fun(x: Any, w: Any) -> Any:
        combined = combine(mixed(x, w))
        return jnp.tanh(combined), x * jnp.cos(combined).mean()

    return Body(each(fun), **options)


PAIRS = [[0, 2], [3, 1]]
MEMBERS = np.array([PAIRS[0], PAIRS[1], PAIRS[0], PAIRS[1]])
PLACE = np.array([0, 1, 1, 0])


def group(x: Any) -> Any:
    """What the members of the own group in `PAIRS` hold, stacked."""
    return lax.all_gather(x, "i")[jnp.asarray(MEMBERS)[lax.axis_index("i")]]


def grouped(combine: Callable[[Any], Any], oracle: Callable[[Any], Any]) -> Body:
    """A body with ``axis_index_groups``, which `jax.vmap` lacks."""
    return collective(combine)._replace(oracle=collective(oracle).make)


def own_place() -> Any:
    """The place in the own group."""
    return jnp.asarray(PLACE)[lax.axis_index("i")]


def nested(inner: Callable[..., Any], **options: Any) -> Body:
    """A map over the rows of ``x`` inside, with work before and after it.

    ``inner(row, w, total)`` is the function of one row; ``total`` belongs to the
    element outside.
    """

    def make(map_: Any) -> Callable[..., Any]:
        def fun(x: Any, w: Any) -> Any:
            total = jnp.tanh(mixed(x, w)).mean() * (1 + float_index("i"))
            rows = map_(lambda row: inner(row, w, total), axis_name="j")(x)
            return jnp.tanh(rows) * x, rows.mean()

        return fun

    return Body(make, **({"size": 2} | options))


def _tree_body(x: Any, w: Any) -> Any:
    total = lax.psum({"x": mixed(x, w), "w": jnp.sin(w)}, "i")
    return {"mapped": total["x"] * x, "whole": jnp.tanh(total["x"]), "w": total["w"]}


BODIES: dict[str, Body] = {
    "identity": Body(each(lambda x, w: (x, w)), in_axes=(0, 0)),
    "pointwise": Body(each(mixed), in_axes=(1, None), out_axes=-1),
    "constant": Body(
        each(lambda x, w: (jnp.arange(3.0), jnp.cos(w), x * 2)), out_axes=(0, None, 2)
    ),
    "psum": collective(lambda y: lax.psum(y, "i")),
    "psum_tree": Body(
        each(_tree_body),
        in_axes=(-1, None),
        out_axes={"mapped": 1, "whole": None, "w": None},
    ),
    "pmean": collective(
        lambda y: lax.pmean(y, "i"), in_axes=(1, 1), out_axes=(None, 1)
    ),
    "pmax": collective(lambda y: lax.pmax(y, "i") + lax.pmin(y, "i"), smooth=False),
    "all_gather": collective(
        lambda y: lax.all_gather(y, "i", axis=1)[:, ::-1].sum(-1), out_axes=(None, 2)
    ),
    "all_gather_tiled": collective(
        lambda y: lax.all_gather(y, "i", axis=1, tiled=True)[:, 1::3], in_axes=(2, None)
    ),
    "ppermute": collective(
        lambda y: lax.ppermute(y, "i", [(k, (k + 1) % 8) for k in range(8)]), size=8
    ),
    "ppermute_partial": collective(
        lambda y: lax.ppermute(y, "i", [(0, 2), (3, 1)]), in_axes=(0, -1)
    )._replace(
        oracle=collective(
            lambda y: (
                lax.ppermute(y, "i", [(0, 2), (3, 1), (1, 3), (2, 0)])
                * jnp.array([0.0, 1.0, 1.0, 0.0])[lax.axis_index("i")]
            )
        ).make
    ),
    "pshuffle": collective(lambda y: lax.pshuffle(y, "i", [1, 3, 0, 2])),
    "all_to_all": collective(
        lambda y: lax.all_to_all(y, "i", 0, 0) * jnp.arange(1.0, 5.0)[:, None]
    ),
    "all_to_all_moved": collective(
        lambda y: lax.all_to_all(y, "i", split_axis=0, concat_axis=1)
    ),
    "all_to_all_tiled": collective(
        lambda y: lax.all_to_all(y, "i", split_axis=0, concat_axis=1, tiled=True)
    ),
    "psum_scatter": collective(lambda y: lax.psum_scatter(y, "i"), size=2),
    "psum_scatter_tiled": collective(
        lambda y: lax.psum_scatter(y.T, "i", scatter_dimension=1, tiled=True)
    ),
    "axis_index": Body(
        each(lambda x, w: (mixed(x, w)[lax.axis_index("i")], lax.axis_index("i"))),
        out_axes=(1, 0),
    ),
    "psum_groups": grouped(
        lambda y: lax.psum(y, "i", axis_index_groups=PAIRS), lambda y: group(y).sum(0)
    ),
    "all_gather_groups": grouped(
        lambda y: lax.all_gather(y, "i", axis_index_groups=PAIRS), group
    ),
    "psum_scatter_groups": grouped(
        lambda y: lax.psum_scatter(
            y, "i", scatter_dimension=0, axis_index_groups=PAIRS, tiled=True
        ),
        lambda y: group(y).sum(0).reshape(2, 2, 2)[own_place()],
    ),
    "all_to_all_groups": grouped(
        lambda y: lax.all_to_all(y, "i", 0, 0, axis_index_groups=PAIRS, tiled=True),
        lambda y: group(y).reshape(2, 2, 2, 2)[:, own_place()].reshape(4, 2),
    ),
    "long": collective(
        lambda y: lax.psum(y, "i") / 12 + lax.all_gather(y, "i").mean(0), size=12
    ),
    "nested": nested(lambda row, w, total: mixed(row, w) * total),
    "nested_inner": nested(lambda row, w, total: lax.psum(row * total, "j") * w + row),
    "nested_outer": nested(lambda row, w, total: lax.psum(row * total, "i") * w + row),
    "nested_both": nested(
        lambda row, w, total: (
            lax.psum(mixed(row, w), ("i", "j")) * row
            + lax.pmean(row, "j") * float_index("i")
        ),
        in_axes=(1, None),
        out_axes=(1, 0),
    ),
    "nested_swapped": nested(
        lambda row, w, total: (
            lax.psum(mixed(row, w), ("j", "i")) * row
            + lax.ppermute(row, "i", [(0, 1), (1, 0)]) * total
        ),
    ),
    "nested_blocks": nested(
        lambda row, w, total: (
            lax.pmean(mixed(row, w), ("j", "i")) * row
            + lax.all_gather(row * total, "j").sum(0)
        ),
        size=4,
    ),
    "nested_uneven": nested(
        lambda row, w, total: (
            lax.pmean(mixed(row, w), ("j", "i")) * row
            + lax.psum_scatter(jnp.outer(row, jnp.ones(3)).T, "j") * total
        ),
        size=3,
    ),
    "nested_vectorized": nested(
        lambda row, w, total: (
            lax.pmean(mixed(row, w), ("j", "i")) * row + lax.pmean(row * total, "j")
        ),
        size=8,
    ),
}


def maps_in(fun, *args):
    """The map equations of a function's jaxpr, those in other equations included."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    outermost = equations(jaxpr, into=lambda e: e.primitive is not sm.spmap_p)
    return [equation for equation in outermost if equation.primitive is sm.spmap_p]


KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def collectives_of(fun, *args):
    """The number of collectives of each kind in the compiled program of a function."""
    lower = getattr(fun, "lower", None) or jax.jit(fun).lower
    text = lower(*args).compile().as_text()
    return dict(collections.Counter(re.findall(rf" ({KINDS})(?:-start)?\(", text)))
