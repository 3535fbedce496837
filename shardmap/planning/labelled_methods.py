"""Methods of xarray that ask for the values of an array, written with `jax.numpy`.

xarray has no hook for them. Each is wrapped while a labelled function is traced: on a
traced array it does what is written here, on others what it did.
"""

import contextlib
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardmap.planning.labelled_groups import reduced_groups
from shardmap.planning.lax.per_piece import per_piece
from shardmap.planning.sources.labelled import is_dataset


def forward_filled(self: Any, dim: Hashable, limit: int | None = None) -> Any:
    """`xarray.DataArray.ffill`."""
    return self.copy(data=_filled(self.data, self.get_axis_num(dim), limit))


def backward_filled(self: Any, dim: Hashable, limit: int | None = None) -> Any:
    """`xarray.DataArray.bfill`."""
    axis = self.get_axis_num(dim)
    filled = _filled(jnp.flip(self.data, axis), axis, limit)
    return self.copy(data=jnp.flip(filled, axis))


def _filled(x: Any, axis: int, limit: int | None) -> Any:
    """Takes the last element before each one that is not missing."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    last = jax.lax.cummax(jnp.where(jnp.isnan(x), -1, places), axis)
    is_near = (last >= 0) & (
        places - last <= (x.shape[axis] if limit is None else limit)
    )
    filled = jnp.take_along_axis(x, jnp.maximum(last, 0), axis)
    return jnp.where(is_near, filled, jnp.full_like(x, jnp.nan))


def place_of_extreme(name: str) -> Callable[..., Any]:
    """`xarray.DataArray.idxmax` or ``idxmin``."""

    def method(
        self: Any,
        dim: Hashable = None,
        *,
        skipna: bool | None = None,
        fill_value: Any = np.nan,
        keep_attrs: bool | None = None,
    ) -> Any:
        if dim is None and self.ndim == 1:
            [dim] = self.dims
        if dim is None:
            raise ValueError(f"{name} of several dimensions needs `dim`")
        labels = self[dim].values
        if labels.dtype.kind not in "biufc":
            raise TypeError(
                f"{name} gives elements of the coordinate {dim!r}, of the type "
                f"{labels.dtype}, which JAX does not have: plan "
                f"{name.replace('idx', 'arg')}, and look up its results there"
            )
        skips = skipna or (skipna is None and self.dtype.kind in "fc")
        missing = self.isnull().all(dim) if skips else None
        array = self if missing is None else self.where(~missing, 0)
        find = getattr(array, name.replace("idx", "arg"))
        places = find(dim, skipna=skipna, keep_attrs=keep_attrs)
        taken = jnp.asarray(labels)[jnp.asarray(places.data)]
        extreme = places.copy(data=taken).rename(dim)
        return extreme if missing is None else extreme.where(~missing, fill_value)

    return method


def interpolated(
    self: Any,
    coords: Mapping[Any, Any] | None = None,
    method: str = "linear",
    assume_sorted: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """`xarray.DataArray.interp`, linearly, at known points of single dimensions."""
    if method != "linear" or kwargs:
        raise TypeError(
            f"interp with method={method!r}, kwargs={kwargs!r} is not traced: plans "
            "interpolate linearly. Call it on the arguments or the results of the plan"
        )
    for dim, points in {**(coords or {}), **more}.items():
        self = _interpolated(self, dim, points)
    return self


def _interpolated(array: Any, dim: Hashable, points: Any) -> Any:
    # xarray itself finds the labels, and each point's place between sorted labels.
    row, count = array[dim].sortby(dim), array.sizes[dim]
    labels = row.copy(data=np.arange(count, dtype=np.float64)).interp({dim: points})
    if labels.dims not in ((), (dim,)):
        raise TypeError(
            f"interp of {dim!r} at points with the dimensions {labels.dims} is not "
            f"traced: give points along {dim!r}"
        )
    places, order = labels.values, np.argsort(array[dim].values, kind="stable")
    after = np.clip(np.ceil(np.nan_to_num(places)), 1, count - 1).astype(int)
    weight = places - (after - 1)
    axis, dtype = array.get_axis_num(dim), jnp.result_type(array.dtype, np.float32)
    x = jnp.asarray(array.data).astype(dtype)
    low, high = (jnp.take(x, order[k], axis) for k in (after - 1, after))
    shape = [-1 if n == axis else 1 for n in range(x.ndim)] if labels.ndim else ()
    weights = jnp.asarray(weight, dtype).reshape(shape)
    plain = array.isel({dim: 0}, drop=True)
    kept = {name: each for name, each in array.coords.items() if name in plain.coords}
    dims = [each for each in array.dims if each != dim or labels.ndim]
    result = type(array)(
        (high - low) * weights + low, dims=dims, coords=kept, name=array.name
    )
    return result.assign_coords(labels.coords).assign_attrs(array.attrs)


def each_filled(name: str) -> Callable[..., Any]:
    """`xarray.Dataset.ffill` or ``bfill``."""

    def method(self: Any, dim: Hashable, limit: int | None = None) -> Any:
        def filled(array: Any) -> Any:
            return getattr(array, name)(dim, limit) if dim in array.dims else array

        return self.map(filled, keep_attrs=True)

    return method


def each_interpolated(
    self: Any, coords: Mapping[Any, Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """`xarray.Dataset.interp`."""
    names = [name for name in kwargs if name in self.dims]
    points = {**(coords or {}), **{name: kwargs.pop(name) for name in names}}

    def one(array: Any) -> Any:
        known = {dim: each for dim, each in points.items() if dim in array.dims}
        return array.interp(known, *args, **kwargs)

    return self.map(one, keep_attrs=True)


def not_written(name: str) -> Callable[..., Any]:
    """`xarray.Dataset.to_zarr` or ``to_netcdf`` of values that are not known yet."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{name} writes values, which are not known while a plan traces its "
            "function: return the arrays, and write them while shards run, with "
            f"plan(...).run(..., out=arrays of zarr), or call {name} of what run "
            "returns"
        )

    return method


WRITES = {name: not_written(name) for name in ("to_zarr", "to_netcdf")}


def vectorized(self: Any, *arrays: Any, **kwargs: Any) -> Any:
    """`numpy.vectorize`, by which ``apply_ufunc`` has ``vectorize=True``, per piece."""
    if kwargs or not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return NotImplemented
    ins, outs = self._in_and_out_core_dims or ([()] * len(arrays), [()])
    rank = max(np.ndim(x) - len(dims) for x, dims in zip(arrays, ins, strict=True))
    spread, sizes = [], dict[str, int]()
    for x, dims in zip(arrays, ins, strict=True):
        x = jnp.expand_dims(x, tuple(range(rank + len(dims) - np.ndim(x))))
        spread.append(x)
        sizes.update(zip(dims, x.shape[rank:], strict=True))
    unknown = [dim for dims in outs for dim in dims if dim not in sizes]
    if unknown or not self.otypes:
        what = f"the length of {unknown[0]!r}" if unknown else "output_dtypes="
        raise TypeError(
            f"vectorize=True in a plan needs {what}: call "
            f"{getattr(self.pyfunc, '__name__', 'the function')} by "
            "shardmap.per_piece, whose result= has shapes and dtypes"
        )
    loops = np.broadcast_shapes(*(x.shape[:rank] for x in spread))
    results = [
        jax.ShapeDtypeStruct(
            (*loops, *map(sizes.get, dims)), jax.dtypes.canonicalize_dtype(dtype)
        )
        for dims, dtype in zip(outs, self.otypes, strict=True)
    ]
    axes = " -> ".join(
        ", ".join(" ".join(["...", *"*" * len(dims)]) for dims in side)
        for side in (ins, outs)
    )
    result = results[0] if len(results) == 1 else tuple(results)
    return per_piece(self, result, *spread, axes=axes)


METHODS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "core.groupby.DataArrayGroupByBase": {"reduce": reduced_groups},
    "core.groupby.DatasetGroupByBase": {"reduce": reduced_groups},
    "DataArray": {
        "ffill": forward_filled,
        "bfill": backward_filled,
        "idxmax": place_of_extreme("idxmax"),
        "idxmin": place_of_extreme("idxmin"),
        "interp": interpolated,
        **WRITES,
    },
    "Dataset": {
        "ffill": each_filled("ffill"),
        "bfill": each_filled("bfill"),
        "interp": each_interpolated,
        **WRITES,
    },
}


_lock = threading.Lock()
_originals: list[tuple[type, str, Any]] = []
_contexts = 0


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """A context in which the methods take traced arrays. xarray is itself after it."""
    global _contexts
    with _lock:
        _contexts += 1
        if _contexts == 1:
            xarray = importlib.import_module("xarray")
            for kind, methods in METHODS.items():
                for name, method in methods.items():
                    _wrap(operator.attrgetter(kind)(xarray), name, method)
            _wrap(np.vectorize, "__call__", vectorized)
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            while not _contexts and _originals:
                setattr(*_originals.pop())


def _wrap(kind: type, name: str, ours: Callable[..., Any]) -> None:
    original = vars(kind)[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = NotImplemented
        if _is_traced(getattr(self, "_obj", self)):
            result = ours(self, *args, **kwargs)
        return original(self, *args, **kwargs) if result is NotImplemented else result

    setattr(kind, name, method)
    _originals.append((kind, name, original))


def _is_traced(value: Any) -> bool:
    if isinstance(value, np.vectorize):
        return True  # Its arguments tell.
    arrays = value.data_vars.values() if is_dataset(value) else [value]
    return any(isinstance(x.variable._data, jax.core.Tracer) for x in arrays)
