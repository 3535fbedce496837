"""Functions of xarray's arrays and datasets: cut by name, labels in and out."""

import gc
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.plan import plan

xr = pytest.importorskip("xarray", reason="the arguments under test")


@pytest.fixture
def ds():
    rng = np.random.default_rng(0)
    return xr.Dataset(
        {
            "t": (("time", "x"), rng.normal(size=(24, 3)).astype("f4"), {"units": "K"}),
            "mask": ("x", np.ones(3, "f4")),
        },
        coords={
            "time": np.arange("2020-01", "2022-01", dtype="datetime64[M]").astype(
                "datetime64[ns]"
            ),
            "x": [10, 20, 30],
            "name": ("x", ["a", "b", "c"]),
        },
        attrs={"title": "made up"},
    )


def anomaly(ds):
    return ds.assign(t=ds.t - ds.t.mean("time", skipna=False, keep_attrs=True))


def test_a_dataset_in_and_out(ds):
    shard_plan = plan(anomaly, ds, in_slices={"time": 12})
    assert shard_plan.num_shards == 24
    got = shard_plan.run(ds)
    xr.testing.assert_allclose(got, anomaly(ds))
    assert got.attrs == ds.attrs
    assert got.t.attrs == anomaly(ds).t.attrs
    assert list(got.coords) == list(ds.coords)


WEIGHTS = xr.DataArray(np.array([1, 2, 3], "f4"), dims="x")
SOME = xr.DataArray([2, 0, 1], dims="p")


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "fun",
    [
        lambda a: a.groupby("time.month").mean(skipna=False),
        lambda a: a.isel(time=slice(3, 9)).rename("other"),
        lambda a: a.sel(x=20),
        lambda a: a.T,
        lambda a: a.sum(),
        lambda a: a.diff("time"),
        lambda a: a.assign_coords(twice=a * 2),
        lambda a: np.sqrt(abs(a)),
        lambda a: np.maximum(np.float64(2) * a, a.mean("time")),
        lambda a: a.copy(data=np.add(np.ones(3, "f4"), np.cumsum(a.data, 0))),
        lambda a: xr.apply_ufunc(np.exp, a),
        lambda a: xr.apply_ufunc(np.gradient, a, kwargs={"axis": 0}),
        lambda a: a.reduce(np.nanmax, "time"),
        lambda a: a.rolling(time=3).mean(),
        lambda a: a.rolling(time=4, center=True, min_periods=1).std(),
        lambda a: a.rolling(time=3, x=2).construct(time="t", x="u"),
        lambda a: a.cumulative("time").sum(),
        lambda a: xr.Dataset({"a": a, "b": a * 2}).rolling(time=2).max(),
        lambda a: a.weighted(WEIGHTS).std("x"),
        lambda a: a.differentiate("x"),
        lambda a: a.differentiate("time"),
        lambda a: a.cumulative_integrate("x"),
        lambda a: a.polyfit("x", 1, skipna=False),
        lambda a: a.polyfit("time", 2, skipna=False, full=True),
        lambda a: a.pad(x=(1, 2), mode="mean"),
        lambda a: a.fillna(0).astype("i4").isin([0, 1]),
        lambda a: a.sel(x=SOME * 10 + 10, time=SOME.copy(data=a.time[3:6])),
        lambda a: a.isel(x=SOME, time=SOME),
        lambda a: a.drop_vars(["x", "name"]).isel(x=a.argmax("x")),
        lambda a: a.rename("x"),
        lambda a: (a * 2).rename("name"),
        lambda a: a.rename(None).assign_coords(result=a.x * 2),
    ],
)
def test_methods_of_xarray(fun, ds):
    shard_plan = plan(fun, ds.t, in_slices={"time": 2})
    got, want = shard_plan.run(ds.t), fun(ds.t)
    xr.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert list(got.coords) == list(want.coords)
    assert list(got.sizes.items()) == list(want.sizes.items())
    assert got.attrs == want.attrs
    if isinstance(want, xr.DataArray):
        assert (got.name, got.dims) == (want.name, want.dims)


@pytest.mark.parametrize(("limit", "cut"), [(None, "time"), (1, "x")])
def test_missing_values_are_filled_from_before_and_behind(limit, cut):
    """Beside pandas: xarray asks for the package bottleneck."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("f4")
    x[x < 0.4] = np.nan
    a = xr.DataArray(x, {"time": np.arange(24)}, ("time", "x"), "a", {"units": "K"})

    def filled(a):
        both = a.ffill("time", limit), a.bfill("time", limit)
        return *both, a.to_dataset().ffill("time", limit).a

    shard_plan = plan(filled, a, in_slices={cut: 3})
    pandas = a.to_pandas()
    ahead, behind = pandas.ffill(limit=limit), pandas.bfill(limit=limit)
    for got, want in zip(shard_plan.run(a), (ahead, behind, ahead), strict=True):
        xr.testing.assert_identical(got, a.copy(data=want.values))


def test_methods_of_xarray_are_wrapped_only_while_a_function_is_traced(ds):
    before = dict(vars(xr.DataArray))
    inside = []

    def fun(a):
        inside.append(dict(vars(xr.DataArray)))
        return a.ffill("x")

    plan(fun, ds.t, in_slices={"time": 2})
    assert inside[0]["ffill"] is not before["ffill"]
    assert dict(vars(xr.DataArray)) == before


def test_functions_of_jax_on_the_data(ds):
    def clipped(x):
        return jax.nn.relu(jax.lax.cumsum(x))

    slope = jax.grad(lambda x: clipped(x).sum())

    def fun(a):
        return a.copy(data=clipped(a.data)).rolling(x=2).sum(), slope(a.data)

    got = plan(fun, ds.t, in_slices={"x": 1}).run(ds.t)
    want = ds.t.cumsum("time").clip(0).rolling(x=2).sum()
    xr.testing.assert_allclose(got[0], want, rtol=1e-4)
    np.testing.assert_array_equal(got[1], slope(ds.t.data))


@pytest.mark.parametrize(
    ("name", "fun"),
    [
        ("DataArray.idxmax", lambda a: a.idxmax("x")),
        ("DataArray.interp", lambda a: a.interp(x=[12.0])),
        ("DataArray.dropna", lambda a: a.dropna("x")),
        ("DataArray.polyfit", lambda a: a.polyfit("x", 1)),
        ("DataArray.sortby", lambda a: a.sortby(a[0])),
        ("DataArray.groupby", lambda a: a.groupby(a > 0).sum()),
        ("apply_ufunc", lambda a: xr.apply_ufunc(np.asarray, a)),
        ("AbstractArray.__bool__", lambda a: a if a.mean() > 0 else -a),
    ],
)
def test_what_needs_values_is_named(name, fun, ds):
    with pytest.raises(TypeError, match=rf"^{name} of xarray needs the values .*apply"):
        plan(fun, ds.t)


def spread_and_sorted(row, weights):
    return row.max() - row.min(), np.sort(row * weights)


def vectorized(a, dims=("time",), **options):
    outs = {"input_core_dims": [["time"], ["time"]], "output_core_dims": [[], dims]}
    return xr.apply_ufunc(
        *(spread_and_sorted, a, a.mean("x")),
        **(outs | {"vectorize": True, "output_dtypes": [float, "f4"]} | options),
    )


def test_functions_of_numpy_are_vectorized_per_piece(ds):
    shard_plan = plan(vectorized, ds.t, in_slices={"x": 3})
    assert len(shard_plan.stage_shards(1)) == 3
    for got, want in zip(shard_plan.run(ds.t), vectorized(ds.t), strict=True):
        xr.testing.assert_allclose(got, want.astype("f4"))
    one = plan(
        lambda a: xr.apply_ufunc(np.square, a, vectorize=True, output_dtypes=["f4"]),
        *(ds.t,),
        in_slices={"x": 3, "time": 2},
    )
    xr.testing.assert_allclose(one.run(ds.t), ds.t**2)
    missing = ds.t.where(ds.t > 0).assign_coords(time=np.arange(24))
    filled = plan(lambda a: a.interpolate_na("time"), missing, in_slices={"x": 3})
    xr.testing.assert_allclose(filled.run(missing), missing.interpolate_na("time"))
    with pytest.raises(TypeError, match="needs output_dtypes=: call spread_and_sorted"):
        plan(lambda a: vectorized(a, output_dtypes=None), ds.t)
    with pytest.raises(
        TypeError, match=r"needs the length of 'dim.': call .* by shard"
    ):
        plan(lambda a: vectorized(a, ("other",)), ds.t)


@pytest.mark.parametrize("name", ["to_zarr", "to_netcdf"])
def test_what_is_written_is_returned(name, ds, tmp_path):
    def fun(each):
        getattr(each * 2, name)(tmp_path / "out")
        return each

    for each in (ds, ds.t):
        with pytest.raises(
            TypeError, match=rf"^{name} writes values, .*run\(..., out="
        ):
            plan(fun, each)
    assert not (tmp_path / "out").exists()


def test_a_function_that_jax_numpy_lacks_is_named(ds):
    with pytest.raises(TypeError, match=r"jax\.numpy has no lib\.scimath\.sqrt"):
        plan(lambda a: xr.apply_ufunc(np.lib.scimath.sqrt, a), ds.t)
    with pytest.raises(TypeError, match=r"numpy\.add cannot write a traced array"):
        plan(lambda a: np.add(a.data, 1, out=np.ones((24, 3), "f4")), ds.t)


def test_several_arguments_and_plain_ones(ds):
    w = np.ones((3, 2), np.float32)

    def fun(a, w, more):
        return {"y": jnp.dot(a.data, w), "a": a + more["m"].sum(skipna=False)}

    args = ds.t, w, {"m": ds.mask}
    with pytest.raises(
        ValueError, match=r"'time' of several arguments, but args\[1\] has no labels"
    ):
        plan(fun, *args, in_slices={"time": 4})
    shard_plan = plan(fun, *args, in_slices=({"time": 4}, None, None))
    assert shard_plan.num_shards == 4
    got = shard_plan.run(*args)
    np.testing.assert_allclose(got["y"], ds.t.values @ w, rtol=1e-6)
    xr.testing.assert_allclose(got["a"], ds.t + 3)
    cut = plan(fun, *args, in_slices=({"time": 2}, {1: 2}, None))
    np.testing.assert_allclose(cut.run(*args)["y"], got["y"], rtol=1e-6)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fun",
    [
        lambda ds: (ds.t * ds.mask).drop_vars(["area", "name"]),
        lambda ds: ds * 2,
        lambda ds: ds.assign(t=ds.t * 2).drop_vars("area"),
        lambda ds: ds.t.sum(),
    ],
)
def test_a_plan_holds_labels_but_no_data(fun, ds):
    """Of coordinates those that its result has, of the arguments nothing else."""
    ds = ds.assign_coords(area=(("time", "x"), np.ones((24, 3), "f4")))
    want, given = fun(ds), ds.copy(deep=True)
    names = {*given.variables} - {"time", "x", *want.coords}
    refs = [weakref.ref(given), *(weakref.ref(given[k].data) for k in names)]
    shard_plan = plan(fun, given, in_slices={"time": 4})
    del given
    gc.collect()
    assert all(ref() is None for ref in refs)
    xr.testing.assert_allclose(shard_plan.run(ds), want)


DAYS = xr.DataArray(
    np.random.default_rng(1).normal(size=(800, 3)).astype("f4"),
    {
        "time": np.arange("2020-01-01", "2022-03-11", dtype="datetime64[D]"),
        "k": [1, 2, 3],
    },
    attrs={"units": "K"},
).astype("f4")
DAYS = DAYS.where((DAYS < 1.5) & (DAYS.time.dt.month != DAYS.k))
GROUPED = {
    "mean": lambda a: a.groupby("time.month").mean(),
    "of parts": lambda a: a.isel(time=slice(40)).resample(time="6h").max(),
    "with a variance": lambda a: a.groupby("time.season").std(ddof=1, skipna=False),
    "count": lambda a: a.groupby("time.year").count(keep_attrs=False),
    "bins": lambda a: a.groupby_bins("k", [1, 2, 3]).min(),
    "of two labels": lambda a: a.groupby(["time.year", "k"]).sum(),
    "of booleans": lambda a: (a > 0).groupby("time.month").sum(),
    "of whole numbers": lambda a: a.notnull().astype(int).groupby("time.month").var(),
    "of a dataset": lambda a: xr.Dataset({"a": a, "b": a.T}).resample(time="1W").mean(),
    "by another function": lambda a: a.groupby("time.month").reduce(np.mean),
    "median": lambda a: a.groupby("time.year").median(),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_those_of_xarray(name):
    fun = GROUPED[name]
    want = fun(DAYS)
    for cut in {"time": 7}, {"k": 3}:
        got = plan(fun, DAYS, in_slices=cut).run(DAYS)
        xr.testing.assert_allclose(got, want, rtol=1e-4)
        assert got.attrs == want.attrs


def test_many_groups_are_few_equations():
    def anomaly(a):
        days = a.groupby("time.dayofyear")
        return (days - days.mean()).std("time")

    shard = plan(anomaly, DAYS, in_slices={"k": 3}).shards[0]
    jaxpr = jax.make_jaxpr(shard.function)(*shard.args(DAYS))
    assert len(str(jaxpr).splitlines()) < 200


def test_a_report_names_the_line_of_the_function(ds):
    def fun(ds):
        return ds.t.groupby("time.month").mean()

    report = str(plan(fun, ds, in_slices={"time": 6}))
    line = fun.__code__.co_firstlineno + 1
    assert f"plan/test_labels.py:{line} (" in report.partition("of shape (12, 3) (")[2]
    assert "nputils" not in report


def test_memory_chooses_axes_as_of_the_arrays(ds):
    bare = plan(lambda t: t - t.mean(0)[None], ds.t.values, memory=200)
    shard_plan = plan(lambda t: t - t.mean("time", skipna=False), ds.t, memory=200)
    assert shard_plan.num_shards == bare.num_shards > 1
    assert shard_plan.peak_bytes <= 200


def test_a_name_cuts_the_arguments_that_have_it(ds):
    args = ds.t, ds.t[0].drop_vars("time"), 2.0
    shard_plan = plan(lambda t, row, by: (t - row) * by, *args, in_slices={"time": 4})
    assert shard_plan.num_shards == 4
    assert "args[1]: float32[3]\n    axis 0: whole" in str(shard_plan)
    xr.testing.assert_allclose(shard_plan.run(*args), (args[0] - args[1]) * 2)


def test_a_name_that_is_no_dimension_is_told(ds):
    for in_slices in ({"tme": 2}, ({"tme": 2},)):
        with pytest.raises(ValueError, match=r"'tme', .* it has \['time', 'x'\]"):
            plan(anomaly, ds, in_slices=in_slices)


@pytest.mark.deep
def test_a_store_stays_where_it_is(ds, tmp_path):
    pytest.importorskip("zarr", reason="writes the store")
    ds.drop_vars("name").to_zarr(tmp_path / "z", consolidated=False)
    stored = xr.open_zarr(tmp_path / "z", chunks=None, consolidated=False)
    part = stored.isel(time=slice(2, 20))
    shard_plan = plan(
        lambda ds: (ds.t * 2).mean("x", skipna=False), part, in_slices={"time": 3}
    )
    got = shard_plan.run(part, executor=1)
    want = (ds.t[2:20] * 2).mean("x")
    xr.testing.assert_allclose(got, want.drop_attrs())
    out = np.zeros(18, np.float32)
    assert shard_plan.run(part, out=out).data is out
    np.testing.assert_array_equal(out, got)
    tasks = [
        shard_plan.run(part, checkpoint=tmp_path / "job", task=(k, 2)) for k in (0, 1)
    ]
    assert tasks[0] is None
    xr.testing.assert_identical(tasks[1], got)


def test_pieces_begin_at_the_chunks_of_a_store(ds, tmp_path):
    pytest.importorskip("zarr", reason="writes the store")
    ds[["t"]].drop_vars("name").chunk({"time": 10}).to_zarr(
        tmp_path / "z", consolidated=False
    )
    stored = xr.open_zarr(tmp_path / "z", chunks=None, consolidated=False)
    for part, pieces, want in (
        (stored.t, sm.AS_CHUNKED, [(0, 10), (10, 20), (20, 24)]),
        (stored.t[4:23], sm.AS_CHUNKED, [(0, 6), (6, 16), (16, 19)]),
    ):
        shard_plan = plan(lambda t: t * 2, part, in_slices={"time": pieces})
        assert shard_plan.out_slices[0] == {0: want}
        xr.testing.assert_allclose(shard_plan.run(part), part * 2)


def test_chunks_of_dask_and_mapped_files(ds, tmp_path):
    pytest.importorskip("dask", reason="what lies under the labels")
    fun, chunked = anomaly, ds.chunk({"time": 5})
    got = plan(fun, chunked, in_slices={"time": 4}).run(chunked)
    xr.testing.assert_allclose(got, fun(ds))
    mapped = np.memmap(tmp_path / "x", "f4", "w+", shape=(6, 2))
    array = xr.DataArray(mapped, dims=("a", "b"))

    def add(a, by):
        return a + by[0]

    shard_plan = plan(add, array, (1, 2), in_slices={"a": 2}, static_argnums=1)
    assert shard_plan.num_shards == 2


def test_to_dask_gives_labels(ds):
    pytest.importorskip("dask.array", reason="what is made")

    def fun(ds):
        return {"t": ds.t * 2, "all": anomaly(ds), "plain": ds.t.data.sum()}

    shard_plan = plan(fun, ds, in_slices={"time": 4})
    got = shard_plan.to_dask(ds)
    assert got["t"].chunks is not None
    assert got["all"].t.chunks is not None
    want = shard_plan.run(ds)
    xr.testing.assert_identical(got["t"].compute(), want["t"])
    xr.testing.assert_identical(got["all"].compute(), want["all"])
    np.testing.assert_array_equal(got["plain"].compute(), want["plain"])


@pytest.mark.filterwarnings("ignore:.*Zarr format 3:UserWarning")
def test_many_files_are_one_store(tmp_path):
    """The recipe of docs/xarray.md."""
    h5py = pytest.importorskip("h5py", reason="writes the files")
    pytest.importorskip("virtualizarr", reason="makes the store")
    values = np.random.default_rng(0).normal(size=(24, 3)).astype("f4")
    for k in range(2):
        rows = slice(12 * k, 12 * k + 12)
        with h5py.File(tmp_path / f"{k}.nc", "w") as file:
            t = file.create_dataset("t", data=values[rows], chunks=(4, 3))
            time = file.create_dataset("time", data=np.arange(24)[rows])
            time.make_scale("time")
            t.dims[0].attach_scale(time)
            t.dims[1].label = "x"
            t.dims[1].attach_scale(file.create_dataset("x", data=np.arange(3)))
    page = (pathlib.Path(__file__).parents[2] / "docs" / "xarray.md").read_text()
    [block] = [b for b in page.split("```py\n") if "open_virtual_mfdataset" in b]
    names = {"folder": tmp_path}
    exec(block.partition("```")[0], names)
    mean, ds = names["mean"], names["ds"]
    np.testing.assert_allclose(mean.t.values, values.mean(0), rtol=1e-5)
    cut = plan(lambda t: t * 2, ds.t, in_slices={"time": sm.AS_CHUNKED})
    assert cut.num_shards == 6
    np.testing.assert_allclose(cut.run(ds.t).values, values * 2)
