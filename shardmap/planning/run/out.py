"""The arrays that users give for the results."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import Aval, PyTree, TreeDef
from shardmap.arrays.trees import result_names
from shardmap.planning.engine.nodes import Value, data_aval
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.sources.registry import remote_ref
from shardmap.units import shown

OutputPlace = tuple[Value | None, Any]
"""A value to write while shards run, and the array-like to put an output in.

There is no value if nothing was given, or if the output is a constant or in an array of
an earlier output already.
"""

MOST_WORK = 10_000
"""The limit of work for `numpy.shares_memory`."""


def outputs(
    cut_program: CutProgram, out: PyTree, leaves: Sequence[Any]
) -> list[OutputPlace]:
    """The place of each output."""
    labels = cut_program.labels
    given = arrays_of(cut_program.out_tree, out if labels is None else labels.out(out))
    places: list[OutputPlace] = []
    taken: set[Value | None] = set()
    for operand, array in zip(cut_program.graph.outputs, given, strict=True):
        value = operand if isinstance(operand, Value) else None
        if array is None or value in taken:
            value = None
        taken.add(value)
        places.append((value, array))
    problem = misfit(cut_program, given) or next(
        _overlaps(cut_program, places, leaves), None
    )
    if problem:
        raise ValueError(f"plan.run cannot write to out: {problem}")
    return places


def arrays_of(tree: TreeDef, out: PyTree) -> list[Any]:
    """The array-like for each leaf of the result, None for those without one."""
    count = tree.num_leaves
    if out is None:
        return [None] * count
    given, structure = jax.tree.flatten(out, is_leaf=lambda leaf: leaf is None)
    arrays = dict(zip(result_names(structure), given, strict=True))
    names = result_names(tree)
    others = (array for name, array in arrays.items() if name not in names)
    if arrays.keys() >= {*names} and all(array is None for array in others):
        return [arrays[name] for name in names]
    if len(given) == count and not _is_plain(tree):
        return given  # For an object of xarray: an array, or a dict by name.
    raise ValueError(
        f"out has arrays for {shown(list(arrays))}, but the function returns "
        f"{shown(names)}: give one array-like, or None, for each"
    )


def _is_plain(tree: TreeDef) -> bool:
    """Whether a structure is made of tuples, lists and dicts."""
    node = tree.node_data()
    return node is None or (
        node[0] in (tuple, list, dict) and all(map(_is_plain, tree.children()))
    )


def misfit(cut_program: CutProgram, arrays: Sequence[Any]) -> str | None:
    """Why an output, the first, cannot be put in its array-like; None is skipped."""
    names, operands = cut_program.result_names, cut_program.graph.outputs
    for name, operand, array in zip(names, operands, arrays, strict=True):
        problem = None if array is None else _misfit(data_aval(operand.aval), array)
        if problem:
            return f"{name} {problem}"
    return None


def _misfit(aval: Aval, array: Any) -> str | None:
    """Why an output cannot be put in an array-like."""
    if isinstance(array, jax.Array):
        return (
            "has a jax.Array as out, which cannot be written to: give a NumPy array, "
            "or no out and jax.device_put the result"
        )
    if not all(hasattr(array, name) for name in ("shape", "dtype", "__setitem__")):
        if isinstance(array, str | os.PathLike):
            return (
                f"has the path {shown(array)} as out: open it, with zarr.open or "
                "numpy.lib.format.open_memmap, and give the array"
            )
        return (
            f"has a {type(array).__name__} as out, which has no shape, dtype or "
            "__setitem__"
        )
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if shape != aval.shape or native != aval.dtype:
        return f"is {aval.dtype}{list(aval.shape)}, out has {dtype}{list(shape)}"
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return "is read-only in out"
    return None


def shared_chunks(
    cut_program: CutProgram, places: Sequence[OutputPlace]
) -> Iterator[tuple[Value, int, int, float]]:
    """Yields the axes of outputs along which shards share chunks.

    With the value come the axis, the length of a chunk, and how often each is written.
    """
    given = {value: array for value, array in places if value}
    for stage in cut_program.stages:
        for result in stage.results:
            place = remote_ref(given.get(result.value))
            cells = (place and place.grain) or ()
            for axis, (k, cell) in enumerate(zip(result.axes, cells, strict=False)):
                pieces = () if k is None else stage.loops[k].pieces
                if any(start % cell for start, _ in pieces):
                    ends = [(-(-stop // cell), start // cell) for start, stop in pieces]
                    times = sum(a - b for a, b in ends) / max(a for a, _ in ends)
                    yield result.value, axis, cell, times


def _overlaps(
    cut_program: CutProgram, places: Sequence[OutputPlace], leaves: Sequence[Any]
) -> Iterator[str]:
    """Yields messages about outputs that share memory with arguments or each other."""
    names = cut_program.result_names
    for k, (value, array) in enumerate(places):
        if array is None:
            continue
        for name, (_, other) in zip(names[:k], places[:k], strict=True):
            if other is not None and _share(array, other):
                yield f"{name} and {names[k]} share memory: give them arrays apart"
        for name, leaf in zip(cut_program.names, leaves, strict=True):
            # An output without a value is written after everything is read.
            if value is not None and _share(array, leaf):
                yield (
                    f"{names[k]} shares memory with {name}: shards would read what "
                    f"others have written; give another array, or a copy of {name}"
                )


def _share(a: Any, b: Any) -> bool:
    """Whether a write to one may change the other."""
    if a is b:
        return True
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is type(b) and _is_one_place(a, b)
    files: list[Any] = [getattr(each, "filename", None) for each in (a, b)]
    if all(files) and os.path.realpath(files[0]) == os.path.realpath(files[1]):
        return True
    try:
        share: Any = np.shares_memory  # NumPy types its work as bytes of text.
        return bool(share(a, b, max_work=MOST_WORK))
    except np.exceptions.TooHardError:
        return True


def _is_one_place(a: Any, b: Any) -> bool:
    """Whether two datasets, or arrays of a store, are one that was opened twice."""
    refs = remote_ref(a), remote_ref(b)
    if refs[0] is not None and refs[1] is not None:
        return refs[0].place == refs[1].place
    stores = (getattr(each, "store", None) for each in (a, b))
    dicts = [getattr(store, "_store_dict", None) for store in stores]
    if None not in dicts:
        return dicts[0] is dicts[1] and a.path == b.path  # Equal ones may be two.
    equal = a == b
    return isinstance(equal, bool) and equal
