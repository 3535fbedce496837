"""Reductions of xarray's groups: all groups of an array in one scatter.

xarray takes the rows of one group after the other, in several equations for each. A
year of days would be thousands of equations, which XLA compiles for a minute.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
