"""A plan as one graph of Dask: on a cluster, or as arrays that join a graph of Dask's.

Each stage is a layer of shards and one of folds; many small shards are one task. Data
goes from storage to worker to storage, and what a stage keeps for later ones stays on
the workers. All that a task needs is in the graph, so that Dask makes it again where a
worker is lost.
"""

import importlib
import itertools
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.planning.engine.keys import box_bytes, is_key
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.slices import Box, shape_of, slices
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.blocks import Blocks
from shardmap.planning.run.buffers import start_dtype
from shardmap.planning.run.cut_program import CutProgram, spec
from shardmap.planning.run.disk.checkpoint import Checkpoint, TaskFile
from shardmap.planning.run.failures import (
    ShardError,
    ShardFailure,
    WorkerError,
    contained,
)
from shardmap.planning.run.processes import (
    Exported,
    RemoteAccess,
    Write,
    computed,
    written,
)
from shardmap.planning.run.shards import Accumulator, Shard
from shardmap.planning.run.tasks import (
    Start,
    Target,
    Task,
    all_tasks,
    run_fold,
    shard_tasks,
)
from shardmap.planning.sources.handlers import sliceable
from shardmap.planning.sources.registry import RemoteRef
from shardmap.units import error_text

SMALL = 2**10
"""The most bytes of an array that is sent with each task that needs it."""

FEW = 1_000
"""A stage has at least so many tasks before several shards are one."""

AT_ONCE = 2**20
"""The most bytes of the shards, or of the results, that one task takes together."""

TOGETHER = 64
"""The most tasks whose results come to the client in one."""

Key: TypeAlias = tuple[Any, ...]


class Place(NamedTuple):
    """Where a block of a value is: a shard of a task, and its result; or all of it."""

    key: Key
    at: tuple[int, int] | None


class Piece(NamedTuple):
    """A part of a block that another task has made, and its place in an argument."""

    need: int
    at: tuple[int, int] | None
    there: Box
    here: Box


class Gathered(NamedTuple):
    """An argument that is put together of blocks that other tasks have made.

    Attributes:
      box: of the value that it is a part of.
      shape, dtype: of the argument.
      pieces: of the blocks.
      written: the array that tasks write blocks to which they do not return.
    """

    box: Box
    shape: tuple[int, ...]
    dtype: Any
    pieces: Sequence[Piece]
    written: RemoteRef | None

    def array(self, needs: Sequence[Any]) -> np.ndarray:
        array = np.zeros(self.shape, self.dtype)
        for need, at, there, here in self.pieces:
            block = needs[need] if at is None else needs[need][at[0]][at[1]]
            if block is None and self.written is not None:
                starts = [start for start, _ in self.box]
                whole = [
                    (start + first, start + stop)
                    for start, (first, stop) in zip(starts, here, strict=True)
                ]
                part = self.written.open()[slices(tuple(whole))]
            else:
                part = block[slices(there)]
            if np.shape(part) == self.shape:
                return np.asarray(part, self.dtype)
            array[slices(here)] = part
        return array


class Job(NamedTuple):
    """A shard for a worker.

    Attributes:
      stage, number: of the shard.
      function: which of the task's functions it runs.
      args: a `Read`, a `Gathered`, or an array for each.
      writes: where results go that it does not return.
      file: of a checkpoint.
    """

    stage: int
    number: int
    function: int
    args: Sequence[Any]
    writes: Sequence[Write | None]
    file: TaskFile | None


def run_shards(
    functions: Sequence[bytes], jobs: Sequence[Job], needs: Sequence[Any]
) -> list[list[np.ndarray | None]]:
    """Runs shards one after the other, and returns the results of each."""
    results = []
    for job in jobs:
        try:
            results.append(_run_shard(functions[job.function], job, needs))
        except Exception as error:
            # The frames of a cause do not travel.
            error.add_note("".join(traceback.format_exception(error)))
            raise ShardFailure(job.stage, job.number, error) from None
    return results


@contained
def _run_shard(
    function: bytes, job: Job, needs: Sequence[Any]
) -> list[np.ndarray | None]:
    results = job.file.load() if job.file else None
    if results is None:
        args = [a.array(needs) if isinstance(a, Gathered) else a for a in job.args]
        results = computed(function, args)
        if job.file:
            job.file.save(results)
    return written(results, job.writes)


@contained
def run_fold_there(
    combiner: Combiner,
    starts: Sequence[Start] | None,
    taken: Sequence[tuple[int, tuple[int, ...]]],
    needs: Sequence[Any],
) -> list[list[np.ndarray]]:
    """Combines a result, or a tuple of results, of each of several tasks."""
    pairs = zip(taken, needs, strict=True)
    parts = ([need[shard][k] for k in places] for (shard, places), need in pairs)
    return [run_fold(combiner, starts, parts)]


def unchanged(thing: Any) -> Any:
    """The function of a task that holds a value."""
    return thing


def collected(taken: Sequence[Sequence[tuple[int, int]]], needs: Sequence[Any]) -> Any:
    """The results of several tasks that come to the client."""
    pairs = zip(taken, needs, strict=True)
    return [need[shard][place] for at, need in pairs for shard, place in at]


class Graph:
    """The tasks of a plan.

    Args:
      cut_program: the plan.
      leaves: its arguments.
      acc: the accumulator, with the arrays that results are written to.
      saved: the checkpoint that workers keep results in.

    Attributes:
      layers, dependencies: those of a `HighLevelGraph`.
      blocks: where the blocks of each value are.
      shards: for each layer of shards, its stage, and how many of them are one task.
      made: for each task of the plan, its task in the graph, and its place there.
      nbytes: for each task, the bytes of the results that it returns.
    """

    def __init__(
        self,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        acc: Accumulator,
        saved: Checkpoint | None = None,
    ) -> None:
        self.dask: Any = importlib.import_module("dask.task_spec")
        self.cut_program, self.leaves, self.acc = cut_program, leaves, acc
        self.saved = saved
        inputs = cut_program.graph.inputs
        self.access = RemoteAccess(inputs, leaves, acc.given)
        self.exported = Exported()
        self.layers: dict[str, dict[Key, Any]] = {}
        self.dependencies: dict[str, set[str]] = {}
        self.blocks: dict[Value, Blocks[Place]] = {}
        self.shards: dict[str, tuple[Stage, int]] = {}
        self.made: dict[str, tuple[Key, int]] = {}
        self.nbytes: dict[Key, int] = {}
        self._shared: dict[Any, Any] = {}
        self._token = uuid.uuid4().hex
        for value in inputs:
            if is_dask(leaf := leaves[value.number]):
                self._add_leaf(value, leaf)
        for stage in cut_program.stages:
            self._add_stage(stage)

    def joined(self) -> Any:
        """As a graph of layers."""
        graph: Any = importlib.import_module("dask.highlevelgraph").HighLevelGraph
        return graph(self.layers, self.dependencies)

    def add(self, layer: str, function: Any, *args: Any) -> Key:
        """Adds a task to a layer; returns its key."""
        name = f"{layer}-{self._token}"
        tasks = self.layers.setdefault(name, {})
        key = name, len(tasks)
        tasks[key] = task = self.dask.Task(key, function, *args)
        others = {needed[0] for needed in task.dependencies if type(needed) is tuple}
        self.dependencies.setdefault(name, set()).update(others - {name})
        return key

    def refs(self, keys: Iterable[Any]) -> Any:
        """An argument of a task: the results of others. One is a key, or a future."""
        ref: Any = self.dask.TaskRef
        return self.dask.List(*(ref(k) if isinstance(k, tuple) else k for k in keys))

    def _add_leaf(self, value: Value, leaf: Any) -> None:
        (leaf,) = importlib.import_module("dask").optimize(leaf)
        self.layers.update(leaf.dask.layers)
        self.dependencies.update(leaf.dask.dependencies)
        ends = [list(itertools.accumulate(each, initial=0)) for each in leaf.chunks]
        cuts = [list(itertools.pairwise(each)) for each in ends]
        places = {
            tuple(cuts[axis][k] for axis, k in enumerate(index)): Place(
                (leaf.name, *index), None
            )
            for index in np.ndindex(*map(len, cuts))
        }
        self.blocks[value] = Blocks(places, len(cuts))

    def _add_stage(self, stage: Stage) -> None:
        shards: list[Task] = []
        folds: list[Task] = []
        for task in all_tasks(self.cut_program, stage):
            (folds if task.needs else shards).append(task)
        nbytes = Shard(self.cut_program, stage, 0).nbytes
        at_once = max(1, min(len(shards) // FEW, AT_ONCE // max(nbytes, 1)))
        self.shards[f"shards-{stage.number}-{self._token}"] = stage, at_once
        for first in range(0, len(shards), at_once):
            self._add_shards(shards[first : first + at_once])
        for task in folds:
            self._add_fold(task)
        places: dict[Value, dict[Box, Place]] = {r.value: {} for r in stage.results}
        for task in itertools.chain(shards, folds):
            key, shard = self.made[task.name]
            for k, (box, combiner, value) in enumerate(task.writes):
                if combiner == "insert":
                    places[value][box] = Place(key, (shard, k))
        for value, blocks in places.items():
            self.blocks[value] = Blocks(blocks, len(value.shape))

    def _add_shards(self, tasks: Sequence[Task]) -> None:
        """Adds one task for several shards."""
        functions: dict[Any, int] = {}
        needs: dict[Any, int] = {}
        jobs = []
        for task in tasks:
            shard = Shard(self.cut_program, task.stage, task.number)
            starts = shard.recipe.starts
            args = [self._arg(value, box, needs) for value, box in shard.recipe.reads]
            args.append(np.asarray(starts, start_dtype(starts)))
            function = self._function(shard)
            which = functions.setdefault(function, len(functions))
            writes = [self.access.write(*write) for write in task.writes]
            file = self.saved.file(task) if self.saved else None
            jobs.append(Job(task.stage.number, task.number, which, args, writes, file))
        refs = self.refs(functions), jobs, self.refs(needs)
        key = self.add(f"shards-{tasks[0].stage.number}", run_shards, *refs)
        self.made.update((task.name, (key, k)) for k, task in enumerate(tasks))
        results = [
            (box, value)
            for task, job in zip(tasks, jobs, strict=True)
            for (box, _, value), write in zip(task.writes, job.writes, strict=True)
            if write is None
        ]
        self.nbytes[key] = sum(box_bytes(value, box) for box, value in results)

    def _add_fold(self, task: Task) -> None:
        keys = [self.made[need.name] for need, _ in task.needs]
        taken = [
            (shard, at) for (_, shard), (_, at) in zip(keys, task.needs, strict=True)
        ]
        key = self.add(
            f"folds-{task.stage.number}",
            run_fold_there,
            task.combiner,
            task.starts,
            taken,
            self.refs(key for key, _ in keys),
        )
        self.made[task.name] = key, 0
        self.nbytes[key] = sum(box_bytes(value, box) for box, _, value in task.writes)

    def _arg(self, value: Value, box: Box, needs: dict[Any, int]) -> Any:
        """An argument of a shard; adds the tasks that have it to ``needs``."""
        if value in self.blocks:
            pieces = [
                Piece(needs.setdefault(place.key, len(needs)), place.at, there, here)
                for place, there, here in self.blocks[value].overlapping(box)
            ]
            written = self.access.source(value)
            return Gathered(box, *spec(value, box), pieces, written)
        if (read := self.access.read(value, box)) is not None:
            return read
        held = self._shared.get((value, box))
        if held is None:
            array = np.asarray(self.cut_program.read_one(value, box, self.leaves, {}))
            if array.nbytes <= SMALL:
                return array
            held = self.add("argument", unchanged, array)
            # Several shards need a whole argument.
            if box == tuple((0, size) for size in value.shape):
                self._shared[value, box] = held
        need = needs.setdefault(held, len(needs))
        whole = tuple((0, size) for size in shape_of(box))
        piece = Piece(need, None, whole, whole)
        return Gathered(box, *spec(value, box), [piece], None)

    def _function(self, shard: Shard) -> Key:
        blob = self.exported(shard)
        if blob not in self._shared:
            self._shared[blob] = self.add("function", unchanged, blob)
        key: Key = self._shared[blob]
        return key

    def add_array(self, value: Value) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """Adds the chunks of a value as an array of Dask; its name, and its chunks."""
        name = f"result-{len(self.layers)}-{self._token}"
        blocks = self.blocks[value].places
        cuts = []
        for axis, size in enumerate(value.shape):
            ends = {end for box in blocks for end in box[axis]}
            cuts.append([*itertools.pairwise(sorted({0, size, *ends}))] or [(0, 0)])
        tasks = self.layers.setdefault(name, {})
        for index in np.ndindex(*map(len, cuts)):
            box = tuple(cuts[axis][k] for axis, k in enumerate(index))
            needs: dict[Any, int] = {}
            array = self._arg(value, box, needs)
            key = name, *index
            tasks[key] = self.dask.Task(key, gathered, array, self.refs(needs))
        others = {key[0] for task in tasks.values() for key in task.dependencies}
        self.dependencies[name] = others
        return name, tuple(tuple(stop - start for start, stop in each) for each in cuts)


def run_on_cluster(
    client: Any,
    cut_program: CutProgram,
    leaves: Sequence[Any],
    acc: Accumulator,
    saved: Checkpoint | None,
    retries: int,
    step: Callable[[Task], None] | None,
) -> None:
    """Runs a plan on the workers of a `distributed.Client`.

    Args:
      client: the client.
      cut_program: the plan.
      leaves: its arguments.
      acc: the accumulator, which gets the results that workers do not write.
      saved: the checkpoint that workers write.
      retries: how often a task that fails is tried again.
      step: is called with each shard that is done.

    Raises:
      ShardError: a task failed for good.
    """
    distributed: Any = importlib.import_module("distributed")

    graph = Graph(cut_program, leaves, acc, saved)
    coming = _coming(graph)
    futures = client.get(graph.joined(), [*coming], sync=False, retries=retries)
    progress = _Progress(client, graph, step)
    try:
        waiting = {*futures}
        while waiting:
            try:
                ended = distributed.wait(waiting, 1, "FIRST_COMPLETED")
            except TimeoutError:
                progress.look()
                continue
            waiting = ended.not_done
            for future in ended.done:
                parts = future.result()
                for target, part in zip(coming[future.key], parts, strict=True):
                    acc.put([target], [part])
            progress.look()
        progress.end()
    except ShardFailure as error:
        stage, number, cause = error.args
        shard = Shard(cut_program, cut_program.stages[stage], number)
        often = f" {retries + 1} times" if retries else ""
        text = str(cause) if isinstance(cause, WorkerError) else error_text(cause)
        raise ShardError(
            f"shard {number} of stage {stage} failed{often}; it reads "
            f"{shard.in_slices}: {text}"
        ) from cause
    except distributed.KilledWorker as error:
        raise ShardError(
            f"workers end while they run a shard: {error}; run again with more "
            "memory for each, or more pieces; checkpoint= keeps what is done"
        ) from error
    finally:
        client.cancel([*futures])


def _coming(graph: Graph) -> dict[Key, list[Target]]:
    """Adds tasks that collect what comes to the client; returns what each collects.

    What a worker has written comes as None, which says that it is done.
    """
    wanted: dict[Key, list[tuple[tuple[int, int], Target]]] = {}
    for value in graph.cut_program.graph.outputs:
        if isinstance(value, Value):
            for box, (key, at) in graph.blocks[value].places.items():
                if at is not None:
                    wanted.setdefault(key, []).append((at, (box, "insert", value)))
    coming: dict[Key, list[Target]] = {}
    group: list[Key] = []
    nbytes = 0
    ends: list[Key | None] = [*wanted, None]
    for task in ends:
        more = graph.nbytes[task] if task else 0
        if group and (
            task is None or len(group) == TOGETHER or nbytes + more > AT_ONCE
        ):
            taken = [[at for at, _ in wanted[each]] for each in group]
            results = graph.add("results", collected, taken, graph.refs(group))
            coming[results] = [target for each in group for _, target in wanted[each]]
            group, nbytes = [], 0
        if task:
            group.append(task)
            nbytes += more
    return coming


class _Progress:
    """Tells which shards are done, as the scheduler knows."""

    def __init__(self, client: Any, graph: Graph, step: Any) -> None:
        self._client, self._step = client, step
        self._shards = graph.shards
        self._told = dict.fromkeys(graph.shards, 0)

    def look(self) -> None:
        if self._step:
            names = [*self._shards]
            counts = self._client.run_on_scheduler(_count_finished, names=names)
            for name, count in counts.items():
                self._tell(name, count * self._shards[name][1])

    def end(self) -> None:
        for name, (stage, _) in self._shards.items():
            self._tell(name, stage.num_shards)

    def _tell(self, name: str, count: int) -> None:
        stage, _ = self._shards[name]
        numbers = range(self._told[name], min(count, stage.num_shards))
        for task in shard_tasks(stage, numbers if self._step else ()):
            self._step(task)
        self._told[name] = max(self._told[name], numbers.stop)


def _count_finished(names: Sequence[str], dask_scheduler: Any) -> dict[str, int]:
    """How many tasks of each layer are done; runs on the scheduler."""
    groups = {
        n: dask_scheduler.task_groups[n]
        for n in names
        if n in dask_scheduler.task_groups
    }
    return {
        name: sum(group.states[state] for state in ("memory", "released", "forgotten"))
        for name, group in groups.items()
    }


def to_dask(cut_program: CutProgram, args: tuple[PyTree, ...]) -> PyTree:
    """See `ShardPlan.to_dask`."""
    try:
        da: Any = importlib.import_module("dask.array")
    except ImportError as error:
        raise ImportError("to_dask needs dask: pip install 'dask[array]'") from error
    if any(is_key(v.aval) for v in cut_program.graph.outputs):
        raise ValueError(
            "Dask has no random keys, which this function returns: return "
            "jax.random.key_data of them"
        )
    leaves = list(map(sliceable, cut_program.leaves(args)))
    graph = Graph(cut_program, leaves, Accumulator(cut_program))
    outputs = cut_program.graph.outputs
    made = {v: graph.add_array(v) for v in outputs if isinstance(v, Value)}
    joined = graph.joined()
    arrays = [
        da.Array(joined, *made[v], v.aval.dtype)
        if isinstance(v, Value)
        else da.asarray(np.asarray(v.value, v.aval.dtype))
        for v in outputs
    ]
    return jax.tree.unflatten(cut_program.out_tree, arrays)


def gathered(array: Gathered, needs: Sequence[Any]) -> np.ndarray:
    """A chunk of an array of Dask."""
    return array.array(needs)


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"


def is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )
