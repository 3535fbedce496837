"""Cuts a function: from its arguments and ``in_slices`` to a `CutProgram`."""

import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from shardmap._jax.context import check_live
from shardmap._jax.errors import explained_errors
from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import device_dtype, is_labelled, refusal
from shardmap.arrays.trees import leaf_paths
from shardmap.planning.arguments import Arguments, of_arguments
from shardmap.planning.engine.nodes import Refused, Value
from shardmap.planning.engine.rules import Cut
from shardmap.planning.in_slices import (
    Asked,
    InSlices,
    asked_points,
    cuts_at,
    result_cuts,
    times_read,
)
from shardmap.planning.lax.follow import Cuts
from shardmap.planning.lax.passes import analysed, function_of
from shardmap.planning.memory.chunks import Chunks
from shardmap.planning.memory.compiled import peak_bytes, sample
from shardmap.planning.memory.rechunk import program_in_chunks
from shardmap.planning.memory.search import Problem, program_within
from shardmap.planning.run.buffers import refuse_masked, start_dtype
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.out import arrays_of, misfit
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
            name: times_read(leaf, [cut.at for cut in row])
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
            results = zip(prepared.graph.outputs, written, strict=True)
            stores = [
                (value, array)
                for value, array in results
                if isinstance(value, Value) and hasattr(array, "chunks")
            ]
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
                chunks=Chunks(*prepared, leaves, stores),
            )
            if out_cuts:
                cut_program = program_within(problem)
            else:
                cut_program = program_in_chunks(problem, make)
        if problem_of_out := misfit(cut_program, written):
            raise ValueError(f"plan cannot write to out: {problem_of_out}")
    except Refused as error:
        raise ValueError(f"plan cannot cut this function: {error}") from None
    _refuse_far_starts(cut_program)
    return cut_program


def _refuse_far_starts(cut_program: CutProgram) -> None:
    """Refuses a shard that starts beyond 32 bits, if JAX has no 64-bit numbers now."""
    values = [*cut_program.graph.inputs, *cut_program.graph.constants]
    values += [out for node in cut_program.graph.nodes for out in node.outs]
    if max((size for v in values for size in v.shape), default=0) < 2**31:
        return
    for stage in cut_program.stages:
        for number in itertools.chain.from_iterable(sample(stage)):
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
