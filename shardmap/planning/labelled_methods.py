"""Methods of xarray that ask for the values of an array, written with `jax.numpy`.

xarray has no hook for them. Each is wrapped while a labelled function is traced: on a
traced array it does what is written here, on others what it did.

Of ``groupby``, xarray takes the rows of one group after the other, in several equations
for each: a year of days would be thousands, which XLA compiles for a minute. Here all
groups of an array are one scatter.
"""

import contextlib
import functools
import importlib
import pkgutil
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardmap.planning.lax.per_piece import per_piece
from shardmap.planning.sources.labelled import is_dataset

ROWS_AT_ONCE = 1024
"""About how many rows of a group are added one after the other, which loses digits."""


def reduced_groups(
    self: Any,
    func: Any,
    dim: Any = None,
    keep_attrs: bool | None = None,
    **options: Any,
) -> Any:
    """Reductions of ``groupby`` and ``resample`` along the grouped dimension.

    Returns:
      The result; NotImplemented for others, such as medians.
    """
    over, obj = self._group_dim, self._obj
    ddof, skipna = options.pop("ddof", 0), options.pop("skipna", None)
    options = {k: v for k, v in options.items() if v is not None and k != "shortcut"}
    arrays = obj.data_vars if is_dataset(obj) else {None: obj}
    is_xarrays = getattr(func, "__module__", "").startswith("xarray.")
    reduced = GROUPED.get(func.__name__) if is_xarrays else None
    if (
        reduced is None
        or dim not in (None, over, [over], (over,))
        or options.keys() - {"numeric_only"}
        or any(
            over not in x.dims or x.dtype.kind not in "biuf" for x in arrays.values()
        )
    ):
        return NotImplemented
    rows = [each for each in self.encoded.group_indices if each]
    labels = np.full(obj.sizes[over], len(rows))
    for number, each in enumerate(rows):
        labels[each] = number
    [group] = self.encoded.unique_coord.dims
    keeps = importlib.import_module("xarray").get_options()["keep_attrs"]
    keeps = keeps is not False if keep_attrs is None else keep_attrs

    def variable(array: Any) -> Any:
        axis = array.get_axis_num(over)
        x = jnp.moveaxis(jnp.asarray(array.data), axis, 0)
        is_float = array.dtype.kind == "f"
        groups = _Groups(labels, len(rows), is_float and skipna is not False, ddof)
        is_short = is_float and x.dtype.itemsize < 4
        data = reduced(groups, x.astype(jnp.float32) if is_short else x)
        if is_short and jnp.issubdtype(data.dtype, jnp.floating):
            data = data.astype(x.dtype)
        dims = [group, *(each for each in array.dims if each != over)]
        result = type(array.variable)(dims, data, array.attrs if keeps else None)
        if is_dataset(obj):
            return result
        return result.transpose(
            *(group if each == over else each for each in array.dims)
        )

    if is_dataset(obj):
        variables = {name: variable(array) for name, array in arrays.items()}
        coords = {k: v for k, v in obj.coords.items() if over not in v.dims}
        result = type(obj)(variables, coords, obj.attrs if keeps else None)
    else:
        result = obj._replace_maybe_drop_dims(variable(obj))
    result = result.assign_coords(self.encoded.coords)
    result = self._maybe_reindex(self._maybe_unstack(result))
    # A ``resample`` groups by another name, and renames the result.
    along = getattr(self, "_dim", None)
    if along is not None:
        result = result.drop_vars(along, errors="ignore").rename({group: along})
    return result


class _Groups(NamedTuple):
    """Groups of the rows of an array.

    Attributes:
      labels: the group of each row; ``number`` if it is in none.
      number: the number of groups.
      skips: whether NaN is left out.
      ddof: what is taken from the number of rows in a variance.
    """

    labels: np.ndarray
    number: int
    skips: bool
    ddof: int

    def combined(self, how: str, x: Any, nothing: Any = None) -> Any:
        """Rows combined with those of their groups."""
        if self.skips and nothing is not None:
            x = jnp.where(jnp.isnan(x), jnp.full_like(x, nothing), x)
        lanes = 1
        if how == "sum":
            lanes = max(len(self.labels) // (self.number * ROWS_AT_ONCE), 1)
        labels = self.labels * lanes + np.arange(len(self.labels)) % lanes
        segments = getattr(jax.ops, f"segment_{how}")
        total = segments(x, jnp.asarray(labels), self.number * lanes)
        if lanes > 1:
            total = total.reshape(self.number, lanes, *x.shape[1:]).sum(1)
        return total

    def present(self, x: Any) -> Any:
        """How many rows of each group count."""
        there = ~jnp.isnan(x) if self.skips else jnp.ones(x.shape, bool)
        return self.combined("sum", there.astype(jnp.int32))

    def extreme(self, how: str, x: Any) -> Any:
        if not self.skips:
            return self.combined(how, x)
        extreme = self.combined(how, x, -np.inf if how == "max" else np.inf)
        return jnp.where(self.present(x) > 0, extreme, jnp.full_like(extreme, jnp.nan))

    def sum(self, x: Any) -> Any:
        return self.combined("sum", x.astype(jnp.int32) if x.dtype == bool else x, 0)

    def mean(self, x: Any) -> Any:
        x = _as_float(x)
        return self.sum(x) / self.present(x).astype(x.dtype)

    def variance(self, x: Any) -> Any:
        x = _as_float(x)
        away = x - jnp.take(self.mean(x), np.minimum(self.labels, self.number - 1), 0)
        # With no more rows than ``ddof``, 0 / 0.
        count = jnp.maximum(self.present(x) - self.ddof, 0)
        return self.sum(away * away) / count.astype(x.dtype)


def _as_float(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x if is_float else x.astype(jnp.result_type(float))


GROUPED: Mapping[str, Callable[[_Groups, Any], Any]] = {
    "count": _Groups.present,
    "max": lambda groups, x: groups.extreme("max", x),
    "mean": _Groups.mean,
    "min": lambda groups, x: groups.extreme("min", x),
    "std": lambda groups, x: jnp.sqrt(groups.variance(x)),
    "sum": _Groups.sum,
    "var": _Groups.variance,
}
"""The reductions of groups that are traced as one, by their names in xarray."""


def filled(backward: bool) -> Callable[..., Any]:
    """``ffill`` or ``bfill`` of `xarray.DataArray` and `xarray.Dataset`."""

    def method(self: Any, dim: Hashable, limit: int | None = None) -> Any:
        if is_dataset(self):
            return self.map(
                lambda array: method(array, dim, limit) if dim in array.dims else array,
                keep_attrs=True,
            )
        x, axis = jnp.asarray(self.data), self.get_axis_num(dim)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self
        x = jnp.flip(x, axis) if backward else x
        # Takes the last element before each one that is not missing.
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        last = jax.lax.cummax(jnp.where(jnp.isnan(x), -1, places), axis)
        away = places - last
        is_near = (last >= 0) & (away <= (x.shape[axis] if limit is None else limit))
        x = jnp.take_along_axis(x, jnp.maximum(last, 0), axis)
        x = jnp.where(is_near, x, jnp.full_like(x, jnp.nan))
        return self.copy(data=jnp.flip(x, axis) if backward else x)

    return method


WINDOWED = {"sum": jax.lax.add, "min": jax.lax.min, "max": jax.lax.max}


def rolled(self: Any, func: Any, keep_attrs: bool | None = None, **kwargs: Any) -> Any:
    """A reduction of `xarray.DataArray.rolling`; `mean` is one of sums and counts.

    xarray makes an array of all windows, which is as many times larger.
    """
    combine, filled = WINDOWED.get(func.__name__), kwargs.get("fillna")
    if combine is None or not isinstance(filled, int | float):
        return NotImplemented
    x = jnp.asarray(self.obj.fillna(filled).data)
    reduced = self.obj.copy(data=_windowed(self, x, filled, combine))
    return reduced.where(self._counts(keep_attrs=False) >= self.min_periods)


def counted(self: Any, keep_attrs: bool | None) -> Any:
    """How many elements of each window of `xarray.DataArray.rolling` are there."""
    there = self.obj.notnull(keep_attrs=keep_attrs)
    count = _windowed(self, there.data.astype(jnp.int32), 0, jax.lax.add)
    return there.copy(data=count)


def _windowed(rolling: Any, x: Any, first: Any, combine: Callable[..., Any]) -> Any:
    sizes, pads = [1] * x.ndim, [(0, 0)] * x.ndim
    windows = zip(rolling.dim, rolling.window, rolling.center, strict=True)
    for dim, size, is_center in windows:
        axis, before = rolling.obj.get_axis_num(dim), size - 1
        if is_center:
            before = size // 2
        sizes[axis], pads[axis] = size, (before, size - 1 - before)
    start = np.asarray(first, x.dtype)[()]
    return jax.lax.reduce_window(x, start, combine, sizes, [1] * x.ndim, pads)


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


OF_ALL = {
    "ffill": filled(backward=False),
    "bfill": filled(backward=True),
    "to_zarr": not_written("to_zarr"),
    "to_netcdf": not_written("to_netcdf"),
}

METHODS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "core.groupby.DataArrayGroupByBase": {"reduce": reduced_groups},
    "core.groupby.DatasetGroupByBase": {"reduce": reduced_groups},
    "computation.rolling.DataArrayRolling": {"reduce": rolled, "_counts": counted},
    "DataArray": OF_ALL,
    "Dataset": OF_ALL,
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
            for kind, methods in METHODS.items():
                for name, method in methods.items():
                    _wrap(pkgutil.resolve_name(f"xarray.{kind}"), name, method)
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
        if _is_traced(getattr(self, "_obj", getattr(self, "obj", self))):
            result = ours(self, *args, **kwargs)
        return original(self, *args, **kwargs) if result is NotImplemented else result

    setattr(kind, name, method)
    _originals.append((kind, name, original))


def _is_traced(value: Any) -> bool:
    if isinstance(value, np.vectorize):
        return True  # Its arguments tell.
    arrays = value.data_vars.values() if is_dataset(value) else [value]
    return any(isinstance(x.variable._data, jax.core.Tracer) for x in arrays)
