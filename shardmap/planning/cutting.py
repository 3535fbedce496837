"""Cuts a function: from its arguments and ``in_slices`` to a `CutProgram`."""

import contextlib
import functools
import itertools
import operator
import os
import pathlib
import tempfile
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shardmap._jax.context import check_live
from shardmap._jax.errors import explained_errors
from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import device_dtype, is_labelled, refusal
from shardmap.arrays.trees import leaf_paths
from shardmap.planning.arguments import Arguments, of_arguments
from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.loop_classes import joined_classes
from shardmap.planning.engine.nodes import Graph, Node, Operand, Refused, Value
from shardmap.planning.engine.rules import Cut, Rule
from shardmap.planning.in_slices import (
    Asked,
    InSlices,
    Points,
    asked_points,
    cuts_at,
    result_cuts,
    times_read,
)
from shardmap.planning.lax.follow import Cuts
from shardmap.planning.lax.passes import analysed, function_of
from shardmap.planning.memory.compiled import peak_bytes, sample
from shardmap.planning.memory.search import Problem, program_within
from shardmap.planning.run.buffers import refuse_masked, start_dtype
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.out import arrays_of, misfit, shared_chunks
from shardmap.planning.sources.labelled import plain
from shardmap.planning.sources.stores import borders, decoded_bytes
from shardmap.units import shown


def cut_function(
    fun: Callable[..., PyTree],
    arguments: Arguments,
    in_slices: InSlices,
    *,
    out_slices: InSlices = None,
    partial: bool = True,
    memory: int | None = None,
    scratch: Any = None,
    out: PyTree = None,
    statics: Collection[int | str] = (),
) -> CutProgram:
    """Makes the `CutProgram` of a plan. See `plan`."""
    bare = plain(arguments)
    leaves, in_tree = jax.tree.flatten(bare)
    names = [*leaf_paths("args", bare[0]), *leaf_paths("kwargs", bare[1])]
    avals = list(map(_aval_of, leaves, names))
    narrowed = {
        name: (given, aval.dtype)
        for name, leaf, aval in zip(names, leaves, avals, strict=True)
        if isinstance(aval, jax.ShapeDtypeStruct) and isinstance(aval.dtype, np.dtype)
        if (given := np.dtype(leaf.dtype).newbyteorder("=")) != aval.dtype
    }
    given = asked_points("plan", in_slices, arguments[0])
    # Those by name are whole.
    given += tuple(((),) * np.ndim(aval) for aval in avals[len(given) :])
    traced, labels = of_arguments("plan", fun, arguments), None
    if any(map(is_labelled, jax.tree.leaves(arguments, is_leaf=is_labelled))):
        # What traces xarray is imported with its first array.
        from shardmap.planning.labels import without_labels

        traced, labels = without_labels(traced, arguments)
    with explained_errors():
        closed, out_shape = jax.make_jaxpr(traced, return_shape=True)(
            *jax.tree.unflatten(in_tree, avals)
        )
    check_live(closed.consts)
    out_cuts = None if out_slices is None else result_cuts(out_slices, out_shape)
    out_tree: Any = jax.tree.structure(out_shape)
    written = arrays_of(out_tree, out if labels is None else labels.out(out))

    def make(
        asked: Asked, partial: bool, keeps: bool, anew: Sequence[Sequence[Cut]] = ()
    ) -> CutProgram:
        every = cuts_at("plan", asked)
        cuts, inside = every[: len(leaves)], every[len(leaves) :]
        analysis = analysed(
            prepared,
            Cuts(cuts, partial, out_cuts, inside=inside, keeps=keeps, anew=anew),
        )
        # Of the arguments that lie in chunks, how many pieces read each chunk.
        read = {
            name: times_read([leaf], (tuple(cut.at for cut in row),))
            for name, leaf, row in zip(names, leaves, cuts, strict=True)
            if any(borders(leaf, axis) is not None for axis in range(len(row)))
        }
        return CutProgram(
            closed,
            analysis,
            in_tree,
            out_tree,
            cuts,
            names,
            scratch=scratch or (pathlib.Path(tempfile.gettempdir()) if anew else None),
            narrowed=narrowed,
            chunks_read=read,
            decoded=max(map(decoded_bytes, [*leaves, *written]), default=0),
            statics=statics,
            labels=labels,
        )

    try:
        prepared = function_of(closed)
        if memory is None:
            cut_program = make(given, partial, keeps=True)
        else:
            chunks = _Chunks(*prepared, leaves, written)
            problem = Problem(
                make,
                *prepared,
                prepared.values,
                given,
                finds=in_slices is None,
                partial=partial,
                memory=memory,
                in_loops=False,
                took=peak_bytes,
                chunks=chunks,
                best=chunks.of_both,
                times_read=functools.partial(times_read, leaves),
                whole_chunks=bool(chunks.out),
            )
            anew = [] if out_cuts else chunks.anew(memory)
            cut_program = _within(problem, chunks, make, anew)
        if problem_of_out := misfit(cut_program, written):
            raise ValueError(f"plan cannot write to out: {problem_of_out}")
    except Refused as error:
        raise ValueError(f"plan cannot cut this function: {error}") from None
    _refuse_far_starts(cut_program)
    return cut_program


class _Chunks:
    """Where chunks begin: of arguments, and of the array-likes of the results.

    A chunk of a result that shards share is read, decoded and written again by each of
    them, so that axes that reach a result are cut where its chunks begin.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[Node, Rule],
        leaves: Sequence[Any],
        out: Sequence[Any],
    ) -> None:
        self._leaves, self._inputs, self._outputs = leaves, graph.inputs, graph.outputs
        self.out = [
            (value, array)
            for value, array in zip(graph.outputs, out, strict=True)
            if isinstance(value, Value) and hasattr(array, "chunks")
        ]
        self._find = joined_classes(graph, rules).find if self.out else lambda key: key
        self._written = {
            self._class(value, axis): at
            for value, array in self.out
            for axis in range(len(value.shape))
            if (at := borders(array, axis)) is not None
        }

    def _class(self, value: Value, axis: int) -> Hashable:
        return self._find((value.number, axis)), value.shape[axis]

    def __call__(self, leaf: int, axis: int) -> Points | None:
        """Where they begin along an axis of an argument; None: it has none."""
        key = self._class(self._inputs[leaf], axis)
        return self._written.get(key, self.of_argument(leaf, axis))

    def of_argument(self, leaf: int, axis: int) -> Points | None:
        """Where chunks of an argument begin, whatever it is written to."""
        return borders(self._leaves[leaf], axis)

    def of_both(self, leaf: int, axis: int) -> Points:
        """Those of them that begin a chunk of the argument, too."""
        read = self.of_argument(leaf, axis) or ()
        return tuple(sorted({*read}.intersection(self(leaf, axis) or ())))

    def anew(self, memory: int) -> list[Sequence[Cut]]:
        """Cuts of the results into as few pieces of whole chunks as fit."""
        rows: dict[Operand, Sequence[Cut]] = {}
        arrays = [*self._leaves, *(array for _, array in self.out)]
        room = (memory - max(map(decoded_bytes, arrays), default=0)) // 2
        for value, array in self.out:
            slab, row = nbytes(value), []
            for axis, size in enumerate(value.shape):
                ends = (0, *(borders(array, axis) or ()), size)
                longest = max(b - a for a, b in itertools.pairwise(ends))
                slab = max(slab * longest // max(size, 1), 1)
                several = max(room // slab, 1)
                row.append(Cut(ends[several:-1:several], False, frozenset()))
                slab *= min(several, len(ends) - 1)
            rows[value] = row
        return [rows.get(value, ()) for value in self._outputs]


def _within(
    problem: Problem,
    chunks: _Chunks,
    make: Callable[..., CutProgram],
    anew: Sequence[Sequence[Cut]],
) -> CutProgram:
    """The function, cut to fit: in one pass over its chunks, or rechunked on disk.

    Pieces that end at chunks of ``out`` may not fit, or read chunks of the arguments
    often. Then results are cut where those begin, kept in ``scratch``, and cut anew.
    """
    if not any(cut.at for row in anew for cut in row):
        return program_within(problem)
    rechunked = replace(
        problem,
        make=functools.partial(make, anew=anew),
        chunks=chunks.of_argument,
        best=lambda leaf, axis: (),
        whole_chunks=False,
    )
    inputs = problem.graph.inputs

    def moved(cut_program: CutProgram) -> float:
        """The bytes of chunks that are read and written, also again."""
        outputs = dict(
            zip(problem.graph.outputs, cut_program.graph.outputs, strict=True)
        )
        pairs = ((outputs[value], array) for value, array in chunks.out)
        places = [(value, array) for value, array in pairs if isinstance(value, Value)]
        written = {value: float(nbytes(value)) for value, _ in places}
        for value, _, _, again in shared_chunks(cut_program, places):
            written[value] *= again
        times = [cut_program.chunks_read.get(name, 1) for name in cut_program.names]
        read = sum(map(operator.mul, times, map(nbytes, inputs)))
        return read + sum(written.values())

    try:
        one_pass = program_within(problem)
    except ValueError as error:
        try:
            return program_within(rechunked)
        except ValueError:
            raise error from None
    # To keep a byte and read it again takes about as long as to decode one.
    kept = sum(nbytes(value) for value, _ in chunks.out)
    if moved(one_pass) > sum(map(nbytes, inputs)) + 2 * kept:
        with contextlib.suppress(ValueError):
            cut_program = program_within(rechunked)
            if moved(cut_program) + kept < moved(one_pass):
                return cut_program
    return one_pass


def _refuse_far_starts(cut_program: CutProgram) -> None:
    """Refuses a shard that starts beyond 32 bits, if JAX has no 64-bit numbers now."""
    values = [*cut_program.graph.inputs, *cut_program.graph.constants]
    values += [out for node in cut_program.graph.nodes for out in node.outs]
    if max((size for v in values for size in v.shape), default=0) < 2**31:
        return
    for stage in cut_program.stages:
        for number in sample(stage):
            start_dtype(stage.recipe(number)[1].starts)


def _aval_of(leaf: Any, name: str) -> Any:
    """The argument for `jax.make_jaxpr`: an array, a number, or a shape and dtype."""
    if isinstance(leaf, bool | int | float | complex | jax.Array | np.generic):
        return leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        if (why := refusal(leaf)) is not None:
            raise TypeError(f"plan cannot take {name}, which {why}")
        is_path = isinstance(leaf, str) and {".", "/"} & {*leaf}
        instead = (
            "open a store or a file first, as with zarr.open, h5py.File, "
            "numpy.load(mmap_mode='r') or xarray.open_zarr"
            if is_path or isinstance(leaf, os.PathLike)
            else "non-array arguments must be static, so name it in static_argnums or "
            "static_argnames"
        )
        raise TypeError(
            "plan takes arrays or what has a shape and a dtype, got "
            f"{shown(leaf)} of type {type(leaf).__name__} in {name}: {instead}"
        )
    dtype = leaf.dtype
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        native = np.dtype(dtype).newbyteorder("=")
        try:
            jax.typeof(np.empty(0, native))
        except TypeError:
            raise TypeError(
                f"plan takes numbers and booleans, got {dtype} in {name}: give "
                "array.astype('int64') or 'float64', codes of texts, as numpy.unique("
                "array, return_inverse=True)[1], or the fields apart"
            ) from None
        refuse_masked(leaf, name)
        dtype = device_dtype(np.dtype(dtype))
    unknown = [axis for axis, size in enumerate(leaf.shape) if size != size]
    if unknown:  # Such as of a Dask array after boolean indexing.
        raise ValueError(
            f"{name} has the shape {tuple(leaf.shape)}, whose length along axis "
            f"{unknown[0]} is not known: compute it before, as "
            "dask.array's x.compute_chunk_sizes() does"
        )
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)
