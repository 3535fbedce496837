"""`plan` and what it gives: a `ShardPlan` of `Shard`s.

>>> import jax.numpy as jnp, numpy as np
>>> x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
>>> made = plan(lambda x: jnp.cos(x).sum(0), x, in_slices=({0: 2},))
>>> made.num_shards
2
>>> made.shards[1].in_slices
((slice(2, 4, None), slice(0, 3, None)),)
>>> made.run(x)
array([ 0.0590..., -0.1985..., -0.2735...], dtype=float32)
"""

import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import abstract_value, device_dtype, is_array_like
from shardmap.plan import report
from shardmap.plan.engine.nodes import Refused
from shardmap.plan.engine.stages import Stage, sample
from shardmap.plan.in_slices import InSlices, input_cuts, result_cuts
from shardmap.plan.lax.table import analysed
from shardmap.plan.run.buffers import refuse_masked, start_dtype
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.run import run
from shardmap.plan.run.shards import Shards


def plan(
    fun: Callable[..., PyTree],
    *args: PyTree,
    in_slices: InSlices = None,
    out_slices: InSlices = None,
    partial: bool = True,
) -> "ShardPlan":
    """Cuts a function into independent shards.

    Args:
      fun: a function of arrays that JAX can trace.
      *args: its arguments, or what has their shapes and dtypes: arrays,
        `jax.ShapeDtypeStruct`, `numpy.memmap`, datasets of h5py, arrays of zarr, values
        of types with a handler (`register_shard_handler`), and pytrees of them. They
        are not read.
      in_slices: how the arguments are cut, a pytree prefix of ``args``. Each leaf is
        None (whole), a dict {axis: cut}, or `EACH`. A cut is a number of near-equal
        pieces, a tuple of lengths, a list of (start, stop) pairs, or `EACH`.
      out_slices: how the results are cut besides, in the same form, a pytree prefix of
        the results: for what is made of no argument that is cut, such as random numbers
        of a key.
      partial: whether to cut axes that the function sums over, or reduces otherwise.
        Shards then give partial results.

    Returns:
      The plan, which runs nothing yet.

    Raises:
      TypeError, ValueError: ``in_slices`` or ``out_slices`` does not fit, or the
        function has an effect or a collective, which no shard can run alone.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((6, 4), jnp.float32)
      >>> w = jax.ShapeDtypeStruct((4, 8), jnp.float32)
      >>> made = plan(jnp.dot, x, w, in_slices=({0: 3}, {1: (6, 2)}))
      >>> made.num_shards
      6
      >>> made.shards[-1].out_slices
      (slice(4, 6, None), slice(6, 8, None))
    """
    return ShardPlan(cut_program(fun, args, in_slices, partial, out_slices))


def cut_program(
    fun: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    in_slices: InSlices,
    partial: bool = True,
    out_slices: InSlices = None,
) -> CutProgram:
    """What is behind a plan. See `plan`."""
    leaves, in_tree = jax.tree.flatten(args)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    names = [f"args{jax.tree_util.keystr(path)}" for path in paths]
    avals = list(map(_aval, leaves, names))
    cuts = input_cuts(in_slices, args, avals)
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(
        *jax.tree.unflatten(in_tree, avals)
    )
    out_cuts = None if out_slices is None else result_cuts(out_slices, out_shape)
    try:
        analysis = analysed(closed, cuts, partial, out_cuts)
    except Refused as error:
        raise ValueError(f"plan cannot cut this function: {error}") from None
    made = CutProgram(analysis, in_tree, jax.tree.structure(out_shape), cuts, names)
    _refuse_far_starts(made)
    return made


def _aval(leaf: Any, name: str) -> Any:
    """What tracing needs to know of an argument."""
    if isinstance(leaf, bool | int | float | complex | jax.Array | np.generic):
        return leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"plan takes arrays or what has a shape and a dtype, got {leaf!r} of type "
            f"{type(leaf).__name__} in {name}"
        )
    dtype = leaf.dtype
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        if not any(jax.dtypes.issubdtype(dtype, k) for k in (np.number, np.bool_)):
            raise TypeError(
                f"plan takes numbers and booleans, got {dtype} in {name}: give what "
                "it stands for as numbers, such as array.astype('int64')"
            )
        try:
            refuse_masked(leaf)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if is_array_like(leaf):
            dtype = abstract_value(leaf).dtype
        dtype = device_dtype(np.dtype(dtype))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _refuse_far_starts(cut_program: CutProgram) -> None:
    """Says so if a shard starts where 32 bits do not reach.

    Raises:
      ValueError: one does, and JAX has no 64-bit numbers now.
    """
    values = [*cut_program.program.inputs, *cut_program.program.constants]
    values += [out for node in cut_program.program.nodes for out in node.outs]
    if max((size for v in values for size in v.shape), default=0) < 2**31:
        return
    for stage in cut_program.stages:
        for number in sample(stage):
            start_dtype(stage.recipe(number)[1].starts)


class ShardPlan:
    """A function, cut into shards. Made by `plan`.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
      >>> made = sm.plan(lambda x: (x * 2).sum(1), x, in_slices={0: 3})
      >>> type(made) is sm.ShardPlan, made.num_shards
      (True, 3)
      >>> made.run(x)
      array([ 2., 10., 18., 26., 34., 42.], dtype=float32)
    """

    def __init__(self, cut_program: CutProgram) -> None:
        self._cut_program = cut_program

    @property
    def stages(self) -> list[Stage]:
        """What runs one after the other; the shards of one stage run in any order."""
        return self._cut_program.stages

    @property
    def shards(self) -> Shards:
        """Those of all stages, a lazy sequence."""
        return Shards(self._cut_program, self._cut_program.stages)

    def stage_shards(self, number: int) -> Shards:
        """The shards of one stage."""
        return Shards(self._cut_program, [self._cut_program.stages[number]])

    @property
    def num_shards(self) -> int:
        """How many shards there are in all stages."""
        return self._cut_program.num_shards

    @property
    def out_slices(self) -> PyTree:
        """How the outputs are cut: per output {axis: list of (start, stop)}."""
        return report.out_slices(self._cut_program)

    @property
    def peak_bytes(self) -> int:
        """The bytes that the largest shard reads and writes, and what is kept then.

        Kept is what later stages need; arguments and results are not counted.
        """
        return report.peak_bytes(self._cut_program)

    @property
    def cut_fraction(self) -> float:
        """What the largest shard reads and writes, over the bytes of everything."""
        return report.cut_fraction(self._cut_program)

    def explain(self) -> str:
        """For each axis: cut, into what, reaching what; or whole, and why."""
        return report.explain(self._cut_program)

    def __repr__(self) -> str:
        stages = len(self.stages)
        return f"<ShardPlan: {self.num_shards:,} shards in {stages} stages>"

    def __str__(self) -> str:
        return report.summary(self._cut_program)

    def run(
        self,
        *args: PyTree,
        out: PyTree = None,
        executor: Executor | None = None,
        max_in_flight: int | None = None,
        progress: bool = False,
        retries: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> PyTree:
        """Runs all shards and returns the function's result.

        Args:
          *args: the function's arguments: arrays, or what has ``shape``, ``dtype`` and
            ``__getitem__``, of which each shard reads its own slices only.
          out: where to put the result: array-likes with ``__getitem__`` and
            ``__setitem__`` in the structure of the result, None for new NumPy arrays.
          executor: None for this process, which reads, computes and writes at the same
            time; or a `concurrent.futures.Executor`: threads, processes started with
            "spawn", ``client.get_executor()`` of a Dask cluster.
          max_in_flight: how many shards may be read or computed at once. By default in
            this process two, and one where a shard reads more than 32 MiB.
          progress: whether to show a bar, which needs tqdm.
          retries: how often a shard that fails is tried again.
          checkpoint: a folder for the results of shards. A run that was stopped goes
            on with those that are missing. The arguments must hold the same values,
            which is checked of arrays in memory up to 1 MiB.

        Returns:
          NumPy arrays, or what was given as ``out``, in the function's structure.

        Raises:
          ShardError: a shard failed, or the executor broke down.
          ValueError: ``out`` or the arguments do not fit, or the checkpoint is another
            plan's or was made with other arguments.
        """
        return run(
            self._cut_program,
            args,
            out,
            executor=executor,
            max_in_flight=max_in_flight,
            progress=progress,
            retries=retries,
            checkpoint=checkpoint,
        )
