"""Checks ``in_slices`` as users write it, and brings it to one form."""

import bisect
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import is_labelled
from shardmap.arrays.trees import broadcast_axes
from shardmap.planning.engine.rules import UNCUT, Cut
from shardmap.planning.sources.labelled import array_of, is_dataset
from shardmap.planning.sources.stores import borders, page_shape
from shardmap.units import Auto, Constant, integer_of, is_integer, shown

MOST = 10_000_000
"""The most pieces of an axis, which are listed."""


class _Each(Constant):
    """Cuts an axis into pieces of length 1. Without a dict, cuts every axis this way.

    Example:
      >>> import jax.numpy as jnp
      >>> import shardmap as sm
      >>> sm.plan(jnp.cos, jnp.ones((2, 3)), in_slices=({1: sm.EACH},)).num_shards
      3
      >>> sm.plan(jnp.cos, jnp.ones((2, 3)), in_slices=sm.EACH).num_shards
      6
    """

    name = "EACH"


EACH = _Each()


@dataclass(frozen=True)
class Pieces:
    """Cuts an axis into pieces of one length. The last one may be shorter.

    Attributes:
      length: the length of the pieces, at least 1.

    Example:
      >>> import jax.numpy as jnp, shardmap as sm
      >>> cut = sm.plan(jnp.cos, jnp.ones(10), in_slices={0: sm.Pieces(length=4)})
      >>> cut.out_slices
      {0: [(0, 4), (4, 8), (8, 10)]}
    """

    length: int

    def __post_init__(self) -> None:
        integer_of("the length of pieces", self.length, least=1)


class _AsChunked(Constant):
    """Cuts an axis at the chunks of a zarr array, an h5py dataset or a Dask array.

    Example:
      >>> import dask.array as da, numpy as np
      >>> import jax.numpy as jnp, shardmap as sm
      >>> x = da.zeros(10, chunks=4, dtype=np.float32)
      >>> sm.plan(jnp.cos, x, in_slices={0: sm.AS_CHUNKED}).out_slices
      {0: [(0, 4), (4, 8), (8, 10)]}
    """

    name = "AS_CHUNKED"


AS_CHUNKED = _AsChunked()


CUTS = (
    "a number of pieces, a tuple of lengths, a list of (start, stop) pairs or slices, "
    "Pieces(length), AS_CHUNKED, or EACH for an axis."
)
LISTS = "A list of numbers is a pytree: pass numpy.asarray of it."

AxisCut: TypeAlias = (
    int
    | tuple[int, ...]
    | list[tuple[int, int] | slice]
    | _Each
    | _AsChunked
    | Pieces
    | Auto
    | None
)
"""How one axis is cut: see `plan`."""

LeafCuts: TypeAlias = Mapping[int, AxisCut] | _Each | None
"""How the axes of one array are cut."""

Points: TypeAlias = tuple[int, ...]
"""Where an axis is cut: ascending, without its ends."""

Asked: TypeAlias = tuple[tuple[Points | Auto, ...], ...]
"""For each axis of each leaf: where it is cut; `AUTO` if a plan chooses this."""

InSlices: TypeAlias = LeafCuts | Sequence[Any] | Mapping[Any, Any]
"""What users write: `LeafCuts` in a prefix of the arguments' pytree."""


def asked_points(
    who: str,
    in_slices: InSlices,
    args: PyTree,
    what: str = "args",
    option: str = "in_slices",
) -> Asked:
    """For each axis of each leaf, the points of its cut, or `AUTO`.

    Axes of xarray's arrays have names. Messages call the function ``who``, ``args``
    ``what``, and ``in_slices`` ``option``.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(args, is_leaf=is_labelled)
    dims = [leaf.dims if is_labelled(leaf) else () for _, leaf in leaves]
    names = {name for each in dims for name in each}

    def is_cuts(spec: Any) -> bool:
        return _is_cuts(spec, names)

    if what == "args":
        if isinstance(in_slices, list):
            in_slices = tuple(in_slices)
        if isinstance(in_slices, dict) and not is_cuts(in_slices) and len(args) == 1:
            in_slices = (in_slices,)  # For the one argument, which is a dict.
    described = f"the {what}, with None for what stays whole"
    specs = broadcast_axes(option, in_slices, tree, described, is_cuts, who)
    known: dict[int, set[Hashable]] = {}
    for spec, each in zip(specs, dims, strict=True):
        known.setdefault(id(spec), set()).update(each)
    asked: list[tuple[Points | Auto, ...]] = []
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        where, has = jax.tree_util.keystr(path), known[id(spec)]
        if not (spec is None or isinstance(spec, dict | _Each)):
            hint = f", such as {{0: {spec}}}" if np.ndim(leaf) and _is_cut(spec) else ""
            raise TypeError(
                f"{option}{where} is {shown(spec)}, but stands for one array: give "
                f"None, EACH or a dict {{axis: cut}}{hint}"
            )
        keys = spec if isinstance(spec, dict) and has else ()
        by_name = [key for key in keys if not is_integer(key)]
        if unknown := [name for name in by_name if name not in has]:
            raise ValueError(
                f"{option} cuts the dimension {unknown[0]!r}, which the argument does "
                f"not have: it has {sorted(map(str, has))}"
            )
        if by_name and not is_labelled(leaf) and np.shape(leaf):
            raise ValueError(
                f"{option} cuts the dimension {by_name[0]!r} of several arguments, but "
                f"{what}{where} has no labels: give each its own entry, with None or "
                f"{{axis number: cut}} for {what}{where}"
            )
        for name, array, axes in _arrays(leaf):
            shape = np.shape(array)
            row: list[Points | Auto] = [()] * len(shape)
            every = range(len(shape))
            cuts = dict.fromkeys(every, EACH) if isinstance(spec, _Each) else spec
            for axis, cut in (cuts or {}).items():
                # A name cuts the arrays that have the dimension, and None nothing.
                if cut is None or (axis in has and axis not in axes):
                    continue
                try:
                    number = axes.index(axis) if axis in axes else _axis(axis, shape)
                    if row[number]:
                        raise ValueError("it has two cuts")
                    row[number] = (
                        cut
                        if isinstance(cut, Auto)
                        else cut_points(cut, shape[number], borders(array, number))
                    )
                except (TypeError, ValueError) as error:
                    raise type(error)(
                        f"{who} cannot cut {what}{where}{name} of shape {shape}, axis "
                        f"{axis}: {error}. "
                        + (LISTS if path and not shape else f"{option} takes {CUTS}")
                    ) from None
            asked.append(tuple(row))
    return tuple(asked)


def _is_cuts(spec: Any, names: Collection[Hashable]) -> bool:
    """Whether this is None or a dict of cuts by axes, not a container of such."""
    if not isinstance(spec, dict):
        return spec is None
    return any(map(_is_cut, spec.values())) or all(
        (is_integer(key) or key in names) and not isinstance(cut, dict)
        for key, cut in spec.items()
    )


def _is_cut(spec: object) -> bool:
    """Whether this is the cut of one axis of any array, without the axis."""
    is_count = is_integer(spec) and int(spec) > 0  # type: ignore[call-overload]
    return is_count or isinstance(spec, Pieces | Auto)


def _arrays(leaf: Any) -> Iterator[tuple[str, Any, tuple[Hashable, ...]]]:
    """Yields the name in a dataset of each array of a leaf, and the names of its axes.

    They are in the order of `plain`.
    """
    if not is_labelled(leaf):
        yield "", leaf, ()
    elif is_dataset(leaf):
        for key in sorted(leaf.data_vars, key=str):
            yield f"[{str(key)!r}]", array_of(leaf[key].variable), leaf[key].dims
    else:
        yield "", array_of(leaf.variable), leaf.dims


def _axis(axis: object, shape: tuple[int, ...]) -> int:
    number, rank = integer_of("an axis", axis), len(shape)
    if not -rank <= number < rank:
        has = {0: "a scalar has no axes", 1: "it has one axis"}
        raise ValueError(has.get(rank, f"it has {rank} axes"))
    return number % rank


def cuts_at(who: str, asked: Asked) -> list[list[Cut]]:
    """Cuts at points that are known; `AUTO` is refused in the name of ``who``."""

    def cut(leaf: int, axis: int, points: Points | Auto) -> Cut:
        if isinstance(points, Auto):
            raise ValueError(f"{who}: a cut that is AUTO needs memory=, such as '2 GB'")
        return Cut(points, False, frozenset({(leaf, axis)})) if points else UNCUT

    return [
        [cut(k, axis, points) for axis, points in enumerate(row)]
        for k, row in enumerate(asked)
    ]


def result_cuts(out_slices: InSlices, results: PyTree) -> list[list[Cut]]:
    """The cuts of each axis of each leaf of the results."""
    asked = asked_points("plan", out_slices, results, "results", "out_slices")
    if any(isinstance(points, Auto) for row in asked for points in row):
        raise ValueError(
            "plan: out_slices cannot be AUTO: give a number of pieces. Without "
            "in_slices, memory= finds what to cut, also values inside"
        )
    # They come from no argument.
    return [
        [cut._replace(origins=frozenset()) for cut in row]
        for row in cuts_at("plan", asked)
    ]


def times_read(leaf: Any, row: Sequence[Points | Auto]) -> float:
    """How often pieces read each chunk of an array, on average.

    A chunk that pieces share is read by each of them. The chunks of a memory-mapped
    file are its pages.

    >>> import types
    >>> times_read(types.SimpleNamespace(shape=(4,), chunks=(2,)), [(1, 2, 3)])
    2.0
    """
    page, times = page_shape(leaf), 1.0
    for axis, points in enumerate(row):
        begins: Sequence[int] | None = borders(leaf, axis)
        if begins is None and page is not None:
            begins = range(page[axis], leaf.shape[axis], page[axis])
        if begins is not None and points and not isinstance(points, Auto):
            ends = np.array([*points, leaf.shape[axis]])
            first = np.searchsorted(begins, [0, *points], "right")
            last = np.searchsorted(begins, ends - 1, "right")
            times *= int((last - first + 1).sum()) / (len(begins) + 1)
    return times


def cut_points(
    cut: AxisCut, size: int, chunks: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """The interior points of a cut, as users write it, of an axis of a size.

    A number of pieces begins at ``chunks``, if there are as many.

    >>> cut_points(3, 10), cut_points(EACH, 3), cut_points([(0, 1), (1, 3)], 3)
    ((4, 7), (1, 2), (1,))
    """
    if cut is None:
        return ()
    if isinstance(cut, _AsChunked):
        if chunks is None:
            raise ValueError(
                "AS_CHUNKED cuts an array of zarr, h5py or Dask that lies in chunks, "
                "which this is not: give Pieces(length), or a number of pieces"
            )
        return chunks
    if isinstance(cut, tuple):
        return _from_lengths(cut, size)
    if isinstance(cut, list):
        return _from_pairs(cut, size)
    if isinstance(cut, range | slice):
        raise TypeError(
            f"{shown(cut)} is not a cut: give the lengths of the pieces, such as "
            f"{size // 2, size - size // 2}, or [(0, {size // 2}), ({size // 2}, "
            f"{size})]"
        )
    if isinstance(cut, str) and cut.lower() == "auto":
        raise TypeError(f"{cut!r} is not a cut: write shardmap.AUTO")
    if isinstance(cut, _Each | Pieces):
        length = 1 if isinstance(cut, _Each) else cut.length
        count = -(-size // length)
    else:
        what = "a cut (a number, a tuple, a list, Pieces, EACH or AUTO)"
        count = integer_of("a number of pieces", integer_of(what, cut), least=1)
        length, count = 0, min(count, max(size, 1))
    if count > MOST:
        raise ValueError(
            f"{shown(cut)} makes {count:,} pieces, and an axis may have {MOST:,}: give "
            "fewer of them, as with Pieces(length)"
        )
    if length:
        return tuple(range(length, size, length))
    quotient, larger = divmod(size, count)
    points = tuple(k * quotient + min(k, larger) for k in range(1, count))
    return points if chunks is None else _at_borders(points, chunks)


def _at_borders(points: Points, chunks: Points) -> Points:
    """Moves points to the nearest borders of chunks, if there are enough borders.

    >>> _at_borders((34, 67), (30, 60, 90))
    (30, 60)
    """
    if len(points) > len(chunks):
        return points
    moved: list[int] = []
    for number, point in enumerate(points):
        first = bisect.bisect(chunks, moved[-1]) if moved else 0
        last = len(chunks) - len(points) + number
        after = min(max(bisect.bisect_left(chunks, point), first), last)
        near = max(after - 1, first), after
        moved.append(min((chunks[k] for k in near), key=lambda at: abs(at - point)))
    return tuple(moved)


def _from_lengths(cut: tuple[Any, ...], size: int) -> tuple[int, ...]:
    lengths = [integer_of("a piece length", n) for n in cut]
    if any(n < 0 for n in lengths):
        raise ValueError(f"a piece length is negative in {cut}")
    if sum(lengths) != size:
        raise ValueError(
            f"piece lengths {cut} sum to {sum(lengths)}, but the axis has size {size}"
        )
    return tuple(sorted({*itertools.accumulate(lengths)} - {0, size}))


def _from_pairs(cut: list[Any], size: int) -> tuple[int, ...]:
    pairs: list[tuple[int, ...]] = []
    for pair in cut:
        if isinstance(pair, slice) and pair.step in (None, 1):
            pair = pair.indices(size)[:2]
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                f"a list of cuts holds (start, stop) pairs, got {shown(pair)}"
            )
        pairs.append(tuple(integer_of("a start or stop", n) for n in pair))
    position = 0
    for start, stop in [*sorted(pairs), (size, size)]:
        if start != position or stop < start:
            raise ValueError(
                f"the pieces {sorted(pairs)} leave a gap, overlap or run backwards at "
                f"{position}, on an axis of size {size}"
            )
        position = stop
    return tuple(sorted({stop for _, stop in pairs} - {0, size}))
