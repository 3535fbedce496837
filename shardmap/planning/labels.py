"""Cuts functions of xarray's arrays and datasets.

The function is traced with arrays of xarray that hold JAX's, so it can use the names of
dimensions, and labels. Coordinates are constants. The results get their labels back.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import is_labelled
from shardmap.planning import labelled_methods
from shardmap.planning.numpy_functions import numpy_functions
from shardmap.planning.sources.labelled import is_dataset

Rebuild = Callable[[list[Any]], Any]


class Labels:
    """The labels of the results of one function, noted while it is traced."""

    def __init__(self) -> None:
        self._tree: Any = None
        # Per leaf of the result, the names of its arrays, and what rebuilds the leaf.
        self._leaves: list[tuple[list[str], Rebuild] | None] = []

    def take_off(self, result: PyTree) -> PyTree:
        """Returns the bare result, with a list of arrays for each labelled leaf."""
        leaves, self._tree = jax.tree.flatten(result, is_leaf=is_labelled)
        self._leaves = []
        for k, leaf in enumerate(leaves):
            if is_labelled(leaf):
                names, rebuild, leaves[k] = _taken_apart(leaf)
                self._leaves.append((names, rebuild))
            else:
                self._leaves.append(None)
        return jax.tree.unflatten(self._tree, leaves)

    def out(self, out: PyTree) -> PyTree:
        """Returns ``out`` in the structure of the bare result."""
        if out is None:
            return None
        outs = []
        for leaf, one in zip(self._leaves, self._tree.flatten_up_to(out), strict=True):
            if leaf is None:
                outs.append(one)
            elif isinstance(one, Mapping):
                outs.append([one.get(name) for name in leaf[0]])
            else:
                outs.append([one, *[None] * (len(leaf[0]) - 1)])
        return jax.tree.unflatten(self._tree, outs)

    def result(self, bare: PyTree) -> PyTree:
        """Returns the bare result with its labels."""
        parts = self._tree.flatten_up_to(bare)
        leaves = [
            part if leaf is None else leaf[1](part)
            for leaf, part in zip(self._leaves, parts, strict=True)
        ]
        return jax.tree.unflatten(self._tree, leaves)


def without_labels(
    fun: Callable[..., PyTree], args: tuple[PyTree, ...]
) -> tuple[Callable[..., PyTree], Labels]:
    """Returns ``fun`` as a function of `plain` arguments, and labels of its results."""
    tree: Any
    leaves, tree = jax.tree.flatten(args, is_leaf=is_labelled)
    labels = Labels()

    @numpy_functions
    def traced(*arrays: PyTree) -> PyTree:
        given = tree.flatten_up_to(arrays)
        labelled = [
            _labelled(leaf, array) if is_labelled(leaf) else array
            for leaf, array in zip(leaves, given, strict=True)
        ]
        with labelled_methods.wrapped(), _values_refused():
            result = fun(*jax.tree.unflatten(tree, labelled))
        return labels.take_off(result)

    return traced, labels


@contextlib.contextmanager
def _values_refused() -> Iterator[None]:
    """Makes errors name the method of xarray that needs the values of a tracer."""
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
                    "jax.numpy and xarray.apply_ufunc; functions of NumPy and SciPy by "
                    "shardmap.per_piece"
                ) from error
        raise


def _labelled(leaf: Any, arrays: Any) -> Any:
    """An argument with ``arrays`` in place of its own."""
    if is_dataset(leaf):
        dropped = leaf.drop_vars(list(leaf.data_vars))
        return dropped.assign(
            {k: (v.dims, arrays[str(k)], v.attrs) for k, v in leaf.data_vars.items()}
        )
    coords = {k: v.variable for k, v in leaf.coords.items()}
    return type(leaf)(
        arrays, coords=coords, dims=leaf.dims, name=leaf.name, attrs=leaf.attrs
    )


ARRAY = "<array>"
"""The name of an array in its dataset; its own may be that of a coordinate."""


def _taken_apart(value: Any) -> tuple[list[str], Rebuild, list[Any]]:
    """The names of a result's arrays, the function that rebuilds it, and the arrays."""
    is_array, name = not is_dataset(value), getattr(value, "name", None)
    whole = value.to_dataset(name=ARRAY) if is_array else value
    names = list(whole.data_vars)
    coords = [k for k, v in whole.coords.items() if isinstance(v.data, jax.Array)]
    about = {k: (whole[k].dims, whole[k].attrs) for k in [*names, *coords]}
    rest = whole.drop_vars(about)

    def rebuild(arrays: list[Any]) -> Any:
        variables = {
            k: (dims, array, attrs)
            for (k, (dims, attrs)), array in zip(about.items(), arrays, strict=True)
        }
        full = rest.assign({k: variables[k] for k in names})
        full = full.assign_coords({k: variables[k] for k in coords})
        return full[ARRAY].rename(name) if is_array else full

    return [*map(str, about)], rebuild, [whole[k].data for k in about]
