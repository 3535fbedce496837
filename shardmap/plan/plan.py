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

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardmap.plan import report
from shardmap.plan.engine.keys import is_key, itemsize, key_impl
from shardmap.plan.engine.nodes import Refused, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.recipe import Recipe, Static, emit
from shardmap.plan.engine.slices import shape_of
from shardmap.plan.engine.stages import Stage, sample, stages_of
from shardmap.plan.in_slices import input_cuts
from shardmap.plan.lax.table import analysed
from shardmap.plan.run.buffers import holds, read_box, start_dtype
from shardmap.plan.run.run import run
from shardmap.plan.run.shards import Accumulator, Shard, Shards


def plan(
    fun: Callable[..., Any],
    *args: Any,
    in_slices: Any = None,
    partial: bool = True,
) -> "ShardPlan":
    """Cuts a function into independent shards.

    Args:
      fun: a function of arrays that JAX can trace.
      *args: its arguments, or what has their shapes and dtypes: arrays,
        `jax.ShapeDtypeStruct`, `numpy.memmap`, datasets of h5py, arrays of zarr, and
        pytrees of them. They are not read.
      in_slices: how the arguments are cut, a pytree prefix of ``args``. Each leaf is
        None (whole), a dict {axis: cut}, or `EACH`. A cut is a number of near-equal
        pieces, a tuple of lengths, a list of (start, stop) pairs, or `EACH`.
      partial: whether to cut axes that the function sums over, or reduces otherwise.
        Shards then give partial results.

    Returns:
      The plan, which runs nothing yet.

    Raises:
      TypeError, ValueError: ``in_slices`` does not fit, or the function has an effect
        or a collective, which no shard can run alone.

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
    leaves, in_tree = jax.tree.flatten(args)
    avals = [_aval(leaf) for leaf in leaves]
    cuts = input_cuts(in_slices, args, avals)
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(
        *jax.tree.unflatten(in_tree, avals)
    )
    out_tree = jax.tree.structure(out_shape)
    try:
        analysis = analysed(closed, cuts, partial)
    except Refused as error:
        raise ValueError(f"plan cannot cut this function: {error}") from None
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    names = [f"args{jax.tree_util.keystr(path)}" for path in paths]
    return ShardPlan(analysis, in_tree, out_tree, cuts, names)


"""How often a program is written anew, as each cut that goes on may meet a next end."""


def _aval(leaf: Any) -> Any:
    """What tracing needs to know of an argument."""
    if isinstance(leaf, bool | int | float | complex | jax.Array | np.generic):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ):
        dtype = leaf.dtype
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)
    raise TypeError(
        f"plan takes arrays or what has a shape and a dtype, got {leaf!r} of type "
        f"{type(leaf).__name__}"
    )


class ShardPlan:
    """A function, cut into shards. Made by `plan`.

    Attributes:
      stages: what runs one after the other; the shards of one stage run in any order.
      shards: those of all stages, a lazy sequence.
      num_shards: how many there are.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
      >>> made = sm.plan(lambda x: (x * 2).sum(1), x, in_slices={0: 3})
      >>> type(made) is sm.ShardPlan, made.num_shards
      (True, 3)
      >>> made.run(x)
      array([ 2., 10., 18., 26., 34., 42.], dtype=float32)
    """

    def __init__(
        self,
        analysis: Analysis,
        in_tree: Any,
        out_tree: Any,
        cuts: Sequence[Sequence[Any]],
        names: Sequence[str],
    ) -> None:
        self.analysis = analysis
        self.program = analysis.program
        self.in_tree, self.out_tree = in_tree, out_tree
        self.cuts, self.names = cuts, names
        self.stages = stages_of(analysis)
        self._nodes = {node.number: node for node in self.program.nodes}
        self._compiled: dict[Any, Callable[..., Any]] = {}

    @property
    def shards(self) -> Shards:
        return Shards(self, self.stages)

    def stage_shards(self, number: int) -> Shards:
        """The shards of one stage."""
        return Shards(self, [self.stages[number]])

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @property
    def out_slices(self) -> Any:
        """How the outputs are cut: per output {axis: list of (start, stop)}."""
        found: dict[Any, Any] = {}
        for stage in self.stages:
            for result in stage.results:
                found[result.value] = {
                    axis: list(stage.loops[k].pieces)
                    for axis, k in enumerate(result.axes)
                    if k is not None
                }
        return jax.tree.unflatten(
            self.out_tree, [found.get(v, {}) for v in self.program.outputs]
        )

    def leaves(self, arrays: tuple[Any, ...]) -> list[Any]:
        """The arguments, flat, checked against what was planned."""
        leaves, tree = jax.tree.flatten(arrays)
        if tree != self.in_tree:
            raise ValueError(
                f"the plan was made for arguments of the structure {self.in_tree}, got "
                f"{tree}"
            )
        for k, (leaf, value) in enumerate(
            zip(leaves, self.program.inputs, strict=True)
        ):
            if np.shape(leaf) != value.shape:
                raise ValueError(
                    f"the plan was made for a shape of {value.shape} in {self.names[k]}"
                    f", got {np.shape(leaf)}"
                )
            if not holds(leaf, value.aval.dtype):
                raise ValueError(
                    f"the plan was made for {value.aval.dtype} in {self.names[k]}, got "
                    f"{getattr(leaf, 'dtype', leaf)}"
                )
        return leaves

    def read(
        self, recipe: Recipe, leaves: Sequence[Any], kept: dict[Value, Any]
    ) -> tuple[Any, ...]:
        """The boxes that a recipe reads, and its starts."""
        found = []
        for value, box in recipe.reads:
            if value in kept and value.producer is not None:
                array = kept[value]
            elif value in self.program.constants:
                array = self.program.constants[value]
            elif value.producer is None:
                array = leaves[value.number]
            else:
                raise ValueError(
                    "a shard of a later stage needs the values of the stages before: "
                    "give args(..., values=acc) what reduce returned"
                )
            found.append(read_box(array, box, value.aval))
        return (*found, np.asarray(recipe.starts, start_dtype(recipe.starts)))

    def compiled(self, stage: Stage, static: Static) -> Callable[..., Any]:
        """The compiled function of all shards with this static part."""
        key = stage.number, static
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self.function(stage, static))
        return self._compiled[key]

    def function(self, stage: Stage, static: Static) -> Callable[..., Any]:
        """The function of `compiled`, not compiled: of boxes as stored, and starts."""
        values = [
            result.value if ref is not None else None
            for result, ref in zip(stage.results, static.outs, strict=True)
        ]
        inner = emit(static, self._nodes, self.analysis.rules, values)
        impls = [key_impl(value.aval) for value in static.read_values]

        def shard_function(*args: Any) -> tuple[Any, ...]:
            *reads, starts = args
            reads = [
                x if impl is None else jax.random.wrap_key_data(x, impl=impl)
                for x, impl in zip(reads, impls, strict=True)
            ]
            results = inner(reads, starts)
            return tuple(
                jax.random.key_data(result) if is_key(value.aval) else result
                for result, value in zip(results, values, strict=True)
                if value is not None
            )

        return shard_function

    def largest(self) -> tuple[int, int]:
        """The bytes that the largest shard reads and writes, and those of all."""
        largest = 0
        everything: dict[Value, int] = {}
        for stage in self.stages:
            for number in sample(stage):
                shard = Shard(self, stage, number)
                moved = [*shard.recipe.reads]
                moved += [(value, box) for box, _, value in shard.writes()]
                largest = max(
                    largest,
                    sum(math.prod(shape_of(b)) * itemsize(v.aval) for v, b in moved),
                )
                everything.update((v, v.size * itemsize(v.aval)) for v, _ in moved)
        return largest, sum(everything.values())

    @property
    def peak_bytes(self) -> int:
        """The bytes that the largest shard reads and writes."""
        return self.largest()[0]

    @property
    def cut_fraction(self) -> float:
        """`peak_bytes` over the bytes of everything that is read and written."""
        largest, everything = self.largest()
        return largest / everything if everything else 1.0

    def explain(self) -> str:
        """For each axis: cut, into what, reaching what; or whole, and why."""
        return report.explain(self)

    def __str__(self) -> str:
        return report.summary(self)

    def run(
        self,
        *args: Any,
        out: Any = None,
        executor: Any = None,
        max_in_flight: int | None = None,
        progress: bool = False,
        retries: int = 0,
        checkpoint: Any = None,
    ) -> Any:
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
            self,
            args,
            out,
            executor=executor,
            max_in_flight=max_in_flight,
            progress=progress,
            retries=retries,
            checkpoint=checkpoint,
        )

    def finished(self, acc: Accumulator, places: Sequence[tuple[Any, Any]]) -> Any:
        """The result, in ``out`` where that was given."""
        outputs = []
        for made, (value, array) in zip(acc.outputs(), places, strict=True):
            if array is not None and value is None:
                array[...] = made
            outputs.append(made if array is None else array)
        return jax.tree.unflatten(self.out_tree, outputs)
