"""Functions of xarray's arrays and datasets: labels around, arrays inside.

The function is traced with arrays of xarray that hold JAX's, so that it may use names
of dimensions and labels; coordinates are constants. What it returns gets its labels
back.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.sources.labelled import is_dataset, is_labelled
from shardmap.plan.numpy_functions import numpy_functions

Rebuild = Callable[[list[Any]], Any]


class Labels:
    """The labels of the arguments and results of one function.

    Args:
      fun: the function.
      args: its arguments.
    """

    def __init__(self, fun: Callable[..., PyTree], args: tuple[PyTree, ...]) -> None:
        self._fun, self._args = fun, args
        self._stored = _variables(args)
        self._tree: Any = None
        self._rebuild: list[Rebuild | None] = []
        self._names: list[list[str] | None] = []

    def fun(self, *arrays: PyTree) -> PyTree:
        """The function, of arrays without labels."""
        return numpy_functions(self._traced)(*arrays)

    def _traced(self, *arrays: PyTree) -> PyTree:
        leaves = jax.tree.leaves(self._args, is_leaf=is_labelled)
        tree: Any = jax.tree.structure(self._args, is_leaf=is_labelled)
        given = tree.flatten_up_to(arrays)
        labelled = [
            _labelled(leaf, array) if is_labelled(leaf) else array
            for leaf, array in zip(leaves, given, strict=True)
        ]
        with _values_refused():
            result = self._fun(*jax.tree.unflatten(tree, labelled))
        made, self._tree = jax.tree.flatten(result, is_leaf=is_labelled)
        self._rebuild, self._names, bare = [], [], []
        for leaf in made:
            if is_labelled(leaf):
                rebuild, names, arrays_of_leaf = _taken_apart(leaf, self._stored)
                bare.append(arrays_of_leaf)
                self._names.append(names)
                self._rebuild.append(rebuild)
            else:
                bare.append(leaf)
                self._names.append(None)
                self._rebuild.append(None)
        return jax.tree.unflatten(self._tree, bare)

    def out(self, out: PyTree) -> PyTree:
        """What was given to write to, in the structure of the bare result."""
        if out is None:
            return None
        found = []
        for names, one in zip(self._names, self._tree.flatten_up_to(out), strict=True):
            if names is None:
                found.append(one)
            elif isinstance(one, Mapping):
                found.append([one.get(name) for name in names])
            else:
                found.append([one, *[None] * (len(names) - 1)])
        return jax.tree.unflatten(self._tree, found)

    def result(self, bare: PyTree) -> PyTree:
        """The bare result, with labels."""
        parts = self._tree.flatten_up_to(bare)
        made = [
            part if rebuild is None else rebuild(part)
            for rebuild, part in zip(self._rebuild, parts, strict=True)
        ]
        return jax.tree.unflatten(self._tree, made)


@contextlib.contextmanager
def _values_refused() -> Iterator[None]:
    """Names the method of xarray that asks for what is not known while tracing."""
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.NonConcreteBooleanIndexError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module, name = frame.f_globals.get("__name__"), frame.f_code.co_qualname
            if str(module).startswith("xarray.") and "<locals>" not in name:
                raise TypeError(
                    f"{name} of xarray needs the values of an "
                    "array, which are not known while a plan traces its function: call "
                    "it on the arguments or the results of the plan, or write it with "
                    "jax.numpy and xarray.apply_ufunc"
                ) from error
        raise


def _labelled(leaf: Any, arrays: Any) -> Any:
    """An argument, with arrays of JAX in the place of its own."""
    if is_dataset(leaf):
        dropped = leaf.drop_vars(list(leaf.data_vars))
        return dropped.assign(
            {k: (v.dims, arrays[str(k)], v.attrs) for k, v in leaf.data_vars.items()}
        )
    coords = {k: v.variable for k, v in leaf.coords.items()}
    return type(leaf)(
        arrays, coords=coords, dims=leaf.dims, name=leaf.name, attrs=leaf.attrs
    )


def _variables(args: tuple[PyTree, ...]) -> dict[Any, Any]:
    """The variables of the arguments by name, the first of each name."""
    found: dict[Any, Any] = {}
    for leaf in jax.tree.leaves(args, is_leaf=is_labelled):
        if is_labelled(leaf):
            arrays = leaf.data_vars if is_dataset(leaf) else {leaf.name: leaf}
            found = {k: v.variable for k, v in arrays.items()} | found
    return found


LAYOUT = (
    *("chunks", "preferred_chunks", "shards", "chunksizes"),
    *("compressors", "compressor", "zlib", "complevel", "shuffle"),
)
"""The keys of an encoding for chunks and compression."""

NUMBERS = (
    *("dtype", "_FillValue", "missing_value", "fill_value"),
    *("filters", "serializer"),
)
"""The keys of an encoding for how numbers are written."""

PACKED = {"scale_factor", "add_offset"}
"""The keys that pack numbers into integers, which may be too small for a result."""


def _encoding(stored: Any, made: Any) -> dict[str, Any]:
    """The part of an argument's encoding that a result of its name keeps."""
    if stored is None or (stored.dims, stored.shape) != (made.dims, made.shape):
        return {}
    before = stored.encoding
    dtype = np.dtype(before.get("dtype", stored.dtype)).newbyteorder("=")
    is_plain = dtype == made.dtype and not PACKED & before.keys()
    kept = LAYOUT + NUMBERS if is_plain else LAYOUT
    return {key: before[key] for key in kept if key in before}


ARRAY = "<array>"
"""What an array is called as a dataset, where a coordinate may have its own name."""


def _taken_apart(
    value: Any, stored: Mapping[Any, Any]
) -> tuple[Rebuild, list[str], list[Any]]:
    """What builds a result again, the names of its arrays, and these."""
    whole = value if is_dataset(value) else value.to_dataset(name=ARRAY)
    own = list(whole.data_vars)
    names = [
        *own,
        *(k for k, v in whole.coords.items() if isinstance(v.data, jax.Array)),
    ]
    dims = {k: (whole[k].dims, whole[k].attrs) for k in names}
    encodings = {
        k: _encoding(stored.get(value.name if k == ARRAY else k), whole[k].variable)
        for k in names
    }
    rest = whole.drop_vars(names)
    order = [str(name) for name in names]

    def rebuild(arrays: list[Any]) -> Any:
        made = {
            k: (dims[k][0], array, dims[k][1], encodings[k])
            for k, array in zip(names, arrays, strict=True)
        }
        full = rest.assign({k: made[k] for k in own})
        full = full.assign_coords({k: made[k] for k in names if k not in own})
        if whole is value:
            return full
        return full[own[0]].rename(value.name)

    return rebuild, order, [whole[k].data for k in names]


def named_cuts(in_slices: Any, args: tuple[PyTree, ...]) -> Any:
    """Cuts by names of dimensions as cuts by axes.

    Raises:
      ValueError: a name is no dimension of the argument.
    """
    if in_slices is None:
        return None
    if isinstance(in_slices, tuple) and len(in_slices) == len(args):
        return tuple(map(_named, in_slices, args))
    if not _has_names(in_slices):
        return tuple(_named(in_slices, arg) for arg in args)
    leaves = jax.tree.leaves(args, is_leaf=is_labelled)
    known = {dim for leaf in leaves if is_labelled(leaf) for dim in leaf.dims}
    _refuse_unknown(in_slices, known)
    return jax.tree.map(
        lambda leaf: _cuts(in_slices, leaf) if is_labelled(leaf) else None,
        args,
        is_leaf=is_labelled,
    )


def _has_names(spec: Any) -> bool:
    return isinstance(spec, Mapping) and any(isinstance(k, str) for k in spec)


def _named(spec: Any, arg: Any) -> Any:
    if is_labelled(arg):
        if not _has_names(spec):
            return spec
        _refuse_unknown(spec, set(arg.dims))
        return _cuts(spec, arg)
    if isinstance(spec, tuple | list) and isinstance(arg, tuple | list):
        return type(spec)(map(_named, spec, arg))
    if _has_names(spec) and isinstance(arg, Mapping):
        return {
            k: _named(each, arg[k]) if k in arg else each for k, each in spec.items()
        }
    return spec


def _refuse_unknown(spec: Mapping[Any, Any], known: set[Any]) -> None:
    unknown = [dim for dim in spec if dim not in known]
    if unknown:
        raise ValueError(
            f"in_slices cuts the dimension {unknown[0]!r}, which the argument has not: "
            f"it has {sorted(map(str, known))}"
        )


def _cuts(spec: Mapping[Any, Any], arg: Any) -> Any:
    def axes(dims: Any) -> dict[int, Any]:
        return {k: spec[dim] for k, dim in enumerate(dims) if dim in spec}

    if is_dataset(arg):
        return {str(k): axes(v.dims) or None for k, v in arg.data_vars.items()}
    return axes(arg.dims)


def labels_of(fun: Callable[..., PyTree], args: tuple[PyTree, ...]) -> Labels | None:
    """The labels of a function's arguments, None if they have none."""
    if any(map(is_labelled, jax.tree.leaves(args, is_leaf=is_labelled))):
        return Labels(fun, args)
    return None
