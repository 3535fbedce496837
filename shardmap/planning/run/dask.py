"""Shards on a Dask cluster, or as arrays of Dask, which join a graph of Dask's.

On a cluster data goes from storage to worker to storage. Functions and boxes that
several shards need are tasks of their own, so that they travel once and are made again
where a worker is lost. Partial results are combined on the workers.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.planning.engine.keys import is_key
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.slices import Box, Interval, shape_of, slices
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.failures import contained
from shardmap.planning.run.processes import ProcessWorkers
from shardmap.planning.run.shards import Accumulator, Shard
from shardmap.planning.run.tasks import Start, Task, all_tasks, folded, run_fold
from shardmap.planning.sources.handlers import sliceable

SMALL = 2**10
"""The most bytes of an array that is sent with each task that needs it."""

INSIDE = 2**22
"""The most bytes of an array that is part of a task, which can run again."""


def unchanged(thing: Any) -> Any:
    """The function of a task that holds a value."""
    return thing


@contained
def fold_there(
    combiner: Combiner,
    starts: Sequence[Start] | None,
    places: Sequence[tuple[int, ...]],
    results: Sequence[Sequence[np.ndarray]],
) -> list[np.ndarray]:
    """Combines a result of each of several tasks, or a tuple of results."""
    pairs = zip(places, results, strict=True)
    return run_fold(combiner, starts, ([result[k] for k in at] for at, result in pairs))


def keep_only(places: Sequence[int], result: Sequence[Any]) -> list[Any]:
    """A task's results with None in all other places."""
    return [part if k in places else None for k, part in enumerate(result)]


class DaskTasks(ProcessWorkers):
    """Shards and folds as tasks of Dask.

    Attributes:
      results: (name of a task, numbers of results) -> what Dask has of them.
      shared: what Dask has of values that several tasks take.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.shared: dict[Any, Any] = {}

    def function(self, shard: Shard) -> Any:
        blob = super().function(shard)
        if blob not in self.shared:
            self.shared[blob] = self.call(unchanged, blob)
        return self.shared[blob]

    def of_dask(self, value: Value, box: Box) -> Any:
        """A box of an argument that is an array of Dask; None for other values."""
        is_input = value in self.cut_program.graph.inputs
        leaf: Any = self.leaves[value.number] if is_input else None
        return leaf[slices(box)].astype(value.aval.dtype) if is_dask(leaf) else None

    def submit(self, task: Task) -> Any:
        if task.needs:
            results = [self.results[need.name, at] for need, at in task.needs]
            taken = [at for _, at in task.needs]
            future = self.call(fold_there, task.combiner, task.starts, taken, results)
        else:
            future = super().submit(task)
        for places in folded(task):
            self.results[task.name, places] = future
        return future


class DaskWorkers(DaskTasks):
    """Runs shards by a `distributed.Client`, which is the executor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.client: Any = self.executor
        # Four shards for each thread of the cluster, as it is now.
        self.ahead = 4 * max(sum(self.client.nthreads().values()), 1)

    def tasks(self, stage: Stage, numbers: Iterable[int]) -> Iterable[Task]:
        # The last stage has changed the values that it made.
        self.shared.clear()
        self.results.clear()
        if self.saved:
            return super().tasks(stage, numbers)
        return all_tasks(self.cut_program, stage)

    def call(self, function: Any, *args: Any) -> Any:
        return self.client.submit(function, *args, pure=False)

    def arg(self, value: Value, box: Box) -> Any:
        part = self.of_dask(value, box)
        return super().arg(value, box) if part is None else self.client.compute(part)

    def held(self, value: Value, box: Box) -> Any:
        """A box on the cluster; whole values, which several shards need, once."""
        key = value, box
        if key not in self.shared:
            array = super().held(value, box)
            held_array: Any = array
            if array.nbytes > INSIDE:
                held_array = self.client.scatter(array, hash=False)
            elif array.nbytes > SMALL:
                held_array = self.call(unchanged, array)
            if box != tuple((0, size) for size in value.shape):
                return held_array
            self.shared[key] = held_array
        return self.shared[key]

    def coming(self, task: Task) -> list[int]:
        """Which results come here: others are written or combined on the cluster."""
        if self.saved:
            return [*range(len(task.writes))]
        return [
            place
            for place, write in enumerate(task.writes)
            if write[1] == "insert" and (task.needs or not self.access.write(*write))
        ]

    def submit(self, task: Task) -> Any:
        future, coming = super().submit(task), self.coming(task)
        if 0 < len(coming) < len(task.writes):
            return self.call(keep_only, coming, future)
        return future

    def result(self, task: Task, future: Any) -> Any:
        if isinstance(future, Future):  # It could not be submitted.
            return future.result()
        parts = [None for _ in task.writes]
        if self.coming(task):
            parts = future.result()
        elif (error := future.exception()) is not None:
            raise error
        for need, places in task.needs:
            del self.results[need.name, places]
        return parts


def to_dask(cut_program: CutProgram, args: tuple[PyTree, ...]) -> PyTree:
    """See `ShardPlan.to_dask`."""
    try:
        importlib.import_module("dask.array")
    except ImportError as error:
        raise ImportError("to_dask needs dask: pip install 'dask[array]'") from error
    if any(is_key(v.aval) for v in cut_program.graph.outputs):
        raise ValueError(
            "Dask has no random keys, which this function returns: return "
            "jax.random.key_data of them"
        )
    leaves = list(map(sliceable, cut_program.leaves(args)))
    return _Graph(cut_program, leaves).outputs()


class _Graph(DaskTasks):
    """Shards and folds as calls of `dask.delayed`."""

    def __init__(self, cut_program: CutProgram, leaves: Sequence[Any]) -> None:
        super().__init__(None, cut_program, leaves, Accumulator(cut_program))
        self.dask: Any = importlib.import_module("dask")
        self.da: Any = importlib.import_module("dask.array")
        self.made: dict[Value, Any] = {}

    def outputs(self) -> PyTree:
        for stage in self.cut_program.stages:
            parts: dict[Value, dict[Box, Any]] = {r.value: {} for r in stage.results}
            for task in all_tasks(self.cut_program, stage):
                delayed = self.submit(task)
                for place, (box, combiner, value) in enumerate(task.writes):
                    if combiner == "insert":
                        parts[value][box] = delayed[place]
            self.made.update((v, self.array(v, boxes)) for v, boxes in parts.items())
        arrays = [
            self.made[v]
            if isinstance(v, Value)
            else self.da.asarray(np.asarray(v.value, v.aval.dtype))
            for v in self.cut_program.graph.outputs
        ]
        return jax.tree.unflatten(self.cut_program.out_tree, arrays)

    def call(self, function: Any, *args: Any) -> Any:
        return self.dask.delayed(function, pure=False)(*args)

    def arg(self, value: Value, box: Box) -> Any:
        if value.producer is not None:
            return self.made[value][slices(box)]
        part = self.of_dask(value, box)
        return super().arg(value, box) if part is None else part

    def array(self, value: Value, parts: Mapping[Box, Any]) -> Any:
        """An array of the boxes that shards make of a value."""
        dtype = value.aval.dtype
        if not parts:
            return self.da.zeros(value.shape, dtype)
        blocks = {
            box: self.da.from_delayed(one, shape_of(box), dtype)
            for box, one in parts.items()
        }
        return self.joined(blocks, len(value.shape))

    def joined(self, blocks: Mapping[Box, Any], ndim: int, axis: int = 0) -> Any:
        """The array with these blocks."""
        if axis == ndim:
            (block,) = blocks.values()
            return block
        rows: dict[Interval, dict[Box, Any]] = {}
        for box, block in sorted(blocks.items()):
            rows.setdefault(box[axis], {})[box] = block
        parts = [self.joined(row, ndim, axis + 1) for row in rows.values()]
        return self.da.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"


def is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )
