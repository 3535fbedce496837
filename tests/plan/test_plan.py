"""The plan as users see it: cuts in, shards out, reasons told."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.api.spmap import spmap
from shardmap.arrays import array_likes
from shardmap.planning.in_slices import EACH
from shardmap.planning.plan import ShardPlan, plan
from tests.plan.checks import check, check_cut, iota, slices
from tests.plan.plan_programs import X, Y


def test_constants_are_cut_too():
    constant = jnp.asarray(Y)
    shard_plan = check(lambda x: x * constant, X, in_slices=({0: 4},), shards=4)
    assert shard_plan.shards[1].nbytes == 3 * X.nbytes / 4


def test_a_cheap_value_is_computed_again():
    shard_plan = check(
        lambda x: jnp.exp(x - x.max(0)[None]), X, in_slices=({0: 4},), stages=2
    )
    assert shard_plan.stage_shards(1)[0].in_slices == (slices((0, 2), (0, 6)),)


def test_results_with_different_loops_do_not_multiply():
    check(
        lambda x, y: (jnp.sin(x), jnp.sin(y)),
        X[:6],
        Y[:4, 0],
        in_slices=({0: 6}, {0: 4}),
        shards=10,
    )


def test_results_of_other_lengths_have_shards_of_their_own():
    for count in (4, 5):
        shard_plan = check_cut(lambda x: (x[1:] * 2, x[::-1]), X, in_slices={0: count})
        assert shard_plan.num_shards == 2 * count


def test_two_plans_of_one_function_are_the_same():
    def boxes():
        shard_plan = plan(lambda x: jnp.cumsum(jnp.sin(x), 0), X, in_slices=({0: 3},))
        return [(shard.stage, shard.in_slices) for shard in shard_plan.shards]

    assert boxes() == boxes()


def test_trees_scalars_and_repeated_outputs():
    def fun(tree, scale):
        x, y = tree["x"], tree["y"]
        return {"sum": x + y * scale, "x": x, "again": x, "three": 3, "row": y.sum(0)}

    args = ({"x": X, "y": Y}, 2.0)
    check(fun, *args, in_slices=({"x": {0: 2}, "y": {-1: 3}}, None))
    check(fun, *args, in_slices=({0: 4}, None))


def test_keys_come_out_as_keys():
    def fun(key):
        return jax.vmap(lambda k: jax.random.fold_in(k, 1))(key)

    keys = jax.random.split(jax.random.key(0), 6)
    shard_plan = plan(fun, keys, in_slices=({0: 3},))
    got = shard_plan.run(keys)
    assert got.dtype == keys.dtype
    assert (jax.random.key_data(got) == jax.random.key_data(fun(keys))).all()


def test_empty_arrays_and_axes_of_one():
    empty = np.zeros((0, 3), np.float32)
    check(lambda x: (x.sum(0), x * 2), empty, in_slices=({0: 4, 1: 3},))
    check(lambda x: x.sum() + 1, iota(1, 1), in_slices=EACH, shards=1)


def test_a_map_in_a_plan_and_a_shard_in_a_map():
    mapped = spmap(lambda x: x * 2 + jnp.arange(6.0))
    check(mapped, X, in_slices=({0: 2, 1: 2},), shards=4)
    summed = spmap(lambda x: x - jax.lax.psum(x, "i"), axis_name="i")
    check(summed, X, in_slices=({0: 2, 1: 2},), shards=8, stages=2)

    [shard] = plan(jnp.tanh, X[0], in_slices={}).shards
    starts = shard.args(X[0])[-1]
    [out] = spmap(lambda x: shard.function(x, starts))(X)
    np.testing.assert_allclose(out, np.tanh(X), rtol=1e-6)


def test_what_has_a_shape_is_enough_to_plan():
    x = jax.ShapeDtypeStruct((10**6, 1000), np.float32)
    shard_plan = plan(lambda x: jnp.tanh(x).sum(0), x, in_slices=({0: 100_000},))
    assert shard_plan.num_shards == 100_000
    assert shard_plan.shards[-1].in_slices == (slices((999_990, 10**6), (0, 1000)),)
    # What is read, the sum of its tanh, and four levels of sums of 16 sums; perhaps its
    # tanh.
    moved, computed = (10 + 1 + 4) * 1000 * 4, 10 * 1000 * 4
    assert moved <= shard_plan.peak_bytes <= moved + 1.1 * computed


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (np.float64, "float64, computed in float32"),
        (np.int64, "int64, computed in int32"),
        (">f8", "float64, computed in float32"),
    ],
)
def test_64_bits_that_jax_makes_32_are_told_once(dtype, text, tmp_path):
    file = np.memmap(tmp_path / "x", dtype, "w+", shape=X.shape)
    file[:] = X
    text = rf"args\[1\]\['a'\]: {text}, as jax_enable_x64 is off"
    with pytest.warns(UserWarning, match=f"^plan: {text}") as warned:
        shard_plan = plan(
            lambda s, x: s * x["a"], 2, {"a": file}, in_slices=(None, {0: 2})
        )
    assert [each.filename for each in warned] == [__file__]
    np.testing.assert_allclose(shard_plan.run(2, {"a": file}), 2 * file)
    for told in (str(shard_plan), str(shard_plan.explain())):
        assert re.search(text, told)
    with jax.enable_x64(True):
        wide = plan(lambda x: x * 2, file, in_slices={0: 2})
    assert "jax_enable_x64" not in str(wide)


def test_a_plan_of_which_no_cut_has_an_effect_warns():
    def whole(x):
        return jnp.linalg.inv(x[:6])

    text = "^plan: the function runs as a whole: none of the cuts reaches its end"
    with pytest.warns(UserWarning, match=text) as warned:
        shard_plan = plan(whole, X, in_slices={0: 2})
    assert [each.filename for each in warned] == [__file__]
    assert shard_plan.num_shards == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(lambda x: (whole(x), x * 2), X, in_slices={0: 2})
    with pytest.warns(UserWarning, match="no shard has anything to do") as warned:
        plan(lambda x: 1.0, X, in_slices={0: 2})
    assert len(warned) == 1


class Packed:
    """As a netCDF4.Variable with a scale factor."""

    shape, dtype = (8,), np.dtype(np.int16)
    values = np.arange(8) * 0.25

    def __getitem__(self, index):
        return self.values[index]


@pytest.mark.parametrize(
    "run", [lambda x: plan(jnp.sin, x, in_slices={}).run(x), spmap(jnp.sin)]
)
def test_slices_that_the_dtype_cannot_hold_are_refused(run):
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"its dtype is int16, but its __getitem__ gave float64: .*"
        r"set_auto_maskandscale\(False\)",
    ):
        run(Packed())


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"a shape and a dtype, got 'x' .* name it"):
        plan(lambda x: x, "x")
    shard_plan = plan(jnp.sin, X, in_slices=({0: 2},))
    with pytest.raises(ValueError, match=r"shape of \(8, 6\) in args\[0\]"):
        shard_plan.run(X[:4])
    with pytest.raises(
        TypeError, match=r"args\[0\] is a jax.ShapeDtypeStruct, which has"
    ):
        shard_plan.run(jax.ShapeDtypeStruct(X.shape, X.dtype))


def test_masked_elements_are_refused():
    masked = np.ma.MaskedArray(X, X > 1)
    with pytest.raises(ValueError, match=r"args\[0\]: .* elements are masked"):
        plan(jnp.sin, masked)
    shard_plan = plan(jnp.sin, X, in_slices=({0: 2},))
    with pytest.raises(ValueError, match=r"args\[0\]: .* elements are masked"):
        shard_plan.run(masked)
    whole = np.ma.MaskedArray(X, False)
    got = plan(jnp.sin, whole, in_slices=({0: 2},)).run(whole)
    np.testing.assert_array_equal(got, shard_plan.run(X))


@pytest.mark.parametrize("dtype", [">f4", ">i4", ">i2"])
def test_the_other_byte_order_is_converted(dtype, tmp_path):
    x = np.arange(12).reshape(4, 3)
    file = np.memmap(tmp_path / "x", dtype, "w+", shape=x.shape)
    file[...] = x
    for array in (x.astype(dtype), file):
        shard_plan = plan(lambda x: x * 2, array, in_slices=({0: 2},))
        np.testing.assert_array_equal(shard_plan.run(array), x * 2)


def test_a_closed_over_array_is_taken_as_it_was_when_planned():
    constant, number = Y.copy(), np.array(2, np.float32)

    @jax.jit
    def inner(x):
        return x * constant

    def fun(x):
        looped = jax.lax.scan(lambda s, _: (inner(s), None), x, None, length=2)[0]
        return x + constant * number, looped

    shard_plan = plan(fun, X, in_slices=({0: 2},))
    want = jax.jit(fun)(X)
    constant[...], number[...] = 7, 7
    for got, expected in zip(shard_plan.run(X), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_start_that_32_bits_do_not_reach_is_told_when_planned():
    x = jax.ShapeDtypeStruct((2**32,), np.int8)
    with pytest.raises(ValueError, match=r"behind 2\*\*31 elements: enable x64"):
        plan(lambda x: x + jax.lax.iota(np.int8, 2**32), x, in_slices=({0: 64},))
    assert plan(lambda x: x + 1, x, in_slices=({0: 64},)).num_shards == 64


# Rules of users.


def test_a_plan_shows_what_is_documented_and_no_more():
    shard_plan = plan(jnp.sin, X, in_slices=({0: 2},))
    shown = {name for name in dir(shard_plan) if not name.startswith("_")}
    assert shown == {
        "explain",
        "num_shards",
        "out_slices",
        "peak_bytes",
        "run",
        "shards",
        "stage_costs",
        "stage_shards",
        "stages",
        "to_dask",
    }
    assert all(getattr(ShardPlan, name).__doc__ for name in shown)


class Squares:
    """Has a shape and a dtype, and nothing that could be indexed."""

    shape, dtype = (8,), np.dtype(np.float32)


class Everything(Squares):
    """Can be sliced besides."""

    def __getitem__(self, index):
        return np.arange(8, dtype=np.float32)[index] ** 2


@pytest.fixture
def asked(monkeypatch):
    """What handlers for `Squares` were asked for."""
    monkeypatch.setattr(array_likes, "HANDLERS", dict(array_likes.HANDLERS))
    found = []

    def put(value, sharding):
        found.append(sharding)
        return jax.device_put(np.arange(8, dtype=np.float32) ** 2, sharding)

    sm.register_shard_handler(Squares, put)
    return found


def test_a_type_with_a_handler_is_taken_as_maps_take_it(asked):
    def fun(x):
        return jnp.sqrt(x) + 1

    mapped = spmap(fun)(Squares())
    shard_plan = plan(fun, Squares(), in_slices=({0: 4},))
    assert shard_plan.num_shards == 4
    assert len(asked) == 1  # By the map: a plan reads nothing before it runs.
    np.testing.assert_allclose(shard_plan.run(Squares()), mapped, rtol=1e-6)
    assert len(asked) == 2
    [part, _] = shard_plan.shards[1].args(Squares())
    np.testing.assert_array_equal(part, [4, 9])


def test_what_can_be_sliced_is_read_in_slices(asked):
    shard_plan = plan(jnp.sqrt, Everything(), in_slices=({0: 4},))
    np.testing.assert_allclose(shard_plan.run(Everything()), np.arange(8.0), rtol=1e-6)
    assert asked == []


def test_a_length_that_nobody_knows_is_refused():
    """As dask.array has it of elements that were picked."""

    class Picked:
        shape, dtype = (float("nan"), 3), np.dtype(np.float32)

    with pytest.raises(
        ValueError,
        match=r"args\[1\] has the shape \(nan, 3\), whose length along axis 0 is not "
        r"known: compute it before, as dask.array's x.compute_chunk_sizes\(\) does",
    ):
        plan(lambda x, y: x + y.sum(), 1.0, Picked())
