"""A plan as one graph of Dask: on a cluster, or as arrays that join a graph of Dask's.

Each stage is a layer of shards and one of folds; many small shards are one task. Data
goes from storage to worker to storage, and what a stage keeps for later ones stays on
the workers. All that a task needs is in the graph, so that Dask makes it again where a
worker is lost.
"""

import functools
import importlib
import itertools
import pickle
import traceback
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmap._jax.types import PyTree
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Value, box_bytes, is_key
from shardmap.planning.engine.slices import Box, shape_of, slices
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.blocks import Blocks, put_together, sliceable
from shardmap.planning.run.cut_program import CutProgram, Spec, spec
from shardmap.planning.run.disk.checkpoint import Checkpoint
from shardmap.planning.run.failures import ShardError, ShardFailure, contained
from shardmap.planning.run.processes import Exported, RemoteAccess, run_job
from shardmap.planning.run.shards import Accumulator, Shard
from shardmap.planning.run.tasks import Start, Target, Task, all_tasks, run_fold

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
    nbytes: int


class Gathered(NamedTuple):
    """An argument that is put together of blocks that other tasks have made.

    Of each: which of the task's needs it is, its place there, its part, and where that
    part goes.
    """

    spec: Spec
    pieces: Sequence[tuple[int, tuple[int, int] | None, Box, Box]]

    def array(self, needs: Sequence[Any]) -> np.ndarray:
        parts = []
        for need, at, there, here in self.pieces:
            block = needs[need] if at is None else needs[need][at[0]][at[1]]
            parts.append((block[slices(there)], here))
        return put_together(*self.spec, parts)


def run_shards(
    functions: Sequence[bytes], jobs: bytes, needs: Sequence[Any]
) -> list[list[np.ndarray | None]]:
    """Runs shards one after the other, and returns the results of each."""
    results = []
    for stage, number, function, job in pickle.loads(zlib.decompress(jobs)):
        try:
            results.append(run_job(functions[function], job, needs))
        except Exception as error:
            # The frames of a cause do not travel.
            error.add_note("".join(traceback.format_exception(error)))
            raise ShardFailure(stage, number, error) from None
    return results


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


def part_of(at: tuple[int, int] | None, box: Box, needs: Sequence[Any]) -> np.ndarray:
    """A part of a large block: workers that need it do not get all of the block."""
    [need] = needs
    block = need if at is None else need[at[0]][at[1]]
    return np.array(block[slices(box)])


def unchanged(thing: Any) -> Any:
    """The function of a task that holds a value."""
    return thing


def collected(taken: Sequence[Sequence[tuple[int, int]]], needs: Sequence[Any]) -> Any:
    """The results of several tasks that come to the client."""
    pairs = zip(taken, needs, strict=True)
    return [need[shard][place] for at, need in pairs for shard, place in at]


class Graph:
    """The tasks of a plan, as layers and dependencies of a `HighLevelGraph`.

    Attributes:
      ends: for each task that makes a part of the function's result, which of its
        results are still to be put where.
    """

    def __init__(
        self,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        given: Mapping[Value, Any],
        kept: Iterable[Any] = (),
        saved: Checkpoint | None = None,
    ) -> None:
        self.dask: Any = importlib.import_module("dask.task_spec")
        self.pickle: Any = importlib.import_module("cloudpickle")
        self.cut_program, self.leaves, self.saved = cut_program, leaves, saved
        inputs = cut_program.graph.inputs
        self.access = RemoteAccess(inputs, leaves, given)
        self.exported = Exported()
        self.layers: dict[str, dict[Key, Any]] = {}
        self.dependencies: dict[str, set[str]] = {}
        self.blocks: dict[Value, Blocks[Place]] = {}
        self.ends: dict[Key, list[tuple[tuple[int, int], Target]]] = {}
        self._kept = {*kept, *(v for each in cut_program.stages for v in each.reads)}
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

    def add(self, key: Key, function: Any, *args: Any) -> Key:
        """Adds a task to the layer that its key names; returns the key."""
        name = key[0]
        task = self.dask.Task(key, function, *args)
        self.layers.setdefault(name, {})[key] = task
        others = {needed[0] for needed in task.dependencies}
        self.dependencies.setdefault(name, set()).update(others - {name})
        return key

    def refs(self, keys: Iterable[Key]) -> Any:
        """An argument of a task: the results of others."""
        return self.dask.List(*map(self.dask.TaskRef, keys))

    def _add_leaf(self, value: Value, leaf: Any) -> None:
        (leaf,) = importlib.import_module("dask").optimize(leaf)
        self.layers.update(leaf.dask.layers)
        self.dependencies.update(leaf.dask.dependencies)
        ends = [list(itertools.accumulate(each, initial=0)) for each in leaf.chunks]
        cuts = [list(itertools.pairwise(each)) for each in ends]
        places = {
            tuple(cuts[axis][k] for axis, k in enumerate(index)): Place(
                (leaf.name, *index), None, 0
            )
            for index in np.ndindex(*map(len, cuts))
        }
        self.blocks[value] = Blocks(places, len(cuts))

    def _add_stage(self, stage: Stage) -> None:
        shards, folds = (
            f"{kind}-{stage.number}-{self._token}" for kind in ("shards", "folds")
        )
        nbytes = Shard(self.cut_program, stage, 0).nbytes
        at_once = max(1, min(stage.num_shards // FEW, AT_ONCE // max(nbytes, 1)))
        places: dict[Value, dict[Box, Place]] = {}
        together: list[Task] = []

        def place(task: Task) -> tuple[Key, int]:
            if task.needs:
                return (folds, task.name), 0
            number, shard = divmod(task.number, at_once)
            return (shards, number), shard

        for task in all_tasks(stage):
            key, shard = place(task)
            if task.needs:
                needs = [(*place(need), at) for need, at in task.needs]
                taken = [(which, at) for _, which, at in needs]
                refs = self.refs(need for need, *_ in needs)
                args = task.combiner, task.starts, taken, refs
                self.add(key, run_fold_there, *args)
            else:
                together.append(task)
                if shard == at_once - 1 or task.number == stage.num_shards - 1:
                    self._add_shards(key, together)
                    together.clear()
            for k, (box, combiner, value) in enumerate(task.writes):
                if combiner == "insert" and value in self._kept:
                    place_of = Place(key, (shard, k), box_bytes(value, box))
                    places.setdefault(value, {})[box] = place_of
                if combiner == "insert" and value in self.cut_program.output_names:
                    ends = self.ends.setdefault(key, [])
                    if self.access.write(box, combiner, value) is None or task.needs:
                        ends.append(((shard, k), (box, combiner, value)))
        for value, blocks in places.items():
            self.blocks[value] = Blocks(blocks, len(value.shape))

    def _add_shards(self, key: Key, tasks: Sequence[Task]) -> None:
        """Adds one task for several shards."""
        functions: dict[Key, int] = {}
        needs: dict[Key, int] = {}
        jobs = []
        for task in tasks:
            shard = Shard(self.cut_program, task.stage, task.number)
            blob = self.exported(shard)
            function = self._held("function", blob, blob)
            which = functions.setdefault(function, len(functions))
            file = self.saved.file(task) if self.saved else None
            array = functools.partial(self._arg, needs)
            job = self.access.job(task, shard, array, self._kept, file)
            jobs.append((task.stage.number, task.number, which, job))
        # Otherwise they take 40 times the memory of the client and the scheduler.
        content = zlib.compress(self.pickle.dumps(jobs), 1)
        self.add(key, run_shards, self.refs(functions), content, self.refs(needs))

    def _arg(self, needs: dict[Key, int], value: Value, box: Box) -> Any:
        """An argument of a shard; adds the tasks that have it to ``needs``."""
        if value in self.blocks:
            pieces = []
            for place, there, here in self.blocks[value].overlapping(box):
                task, at = place.key, place.at
                if place.nbytes > max(AT_ONCE, 2 * box_bytes(value, there)):
                    part = (f"parts-{value.number}-{self._token}", *task, *there)
                    if part not in self.layers.get(part[0], ()):
                        self.add(part, part_of, at, there, self.refs([task]))
                    task, at = part, None
                    there = tuple((0, size) for size in shape_of(there))
                need = needs.setdefault(task, len(needs))
                pieces.append((need, at, there, here))
            return Gathered(spec(value, box), pieces)
        if (read := self.access.read(value, box)) is not None:
            return read
        key = self._shared.get((value, box))
        if key is None:
            array = np.asarray(self.cut_program.read_one(value, box, self.leaves, {}))
            if array.nbytes <= SMALL:
                return array
            key = self._held("argument", (value, box), array)
        whole = tuple((0, size) for size in shape_of(box))
        need = needs.setdefault(key, len(needs))
        return Gathered(spec(value, box), [(need, None, whole, whole)])

    def _held(self, layer: str, what: Any, thing: Any) -> Key:
        """The task that holds an argument or a function, which is added once."""
        if what not in self._shared:
            new = f"{layer}-{self._token}", len(self._shared)
            self._shared[what] = self.add(new, unchanged, thing)
        key: Key = self._shared[what]
        return key

    def add_array(self, value: Value) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """Adds the chunks of a value as an array of Dask; its name, and its chunks."""
        name = f"result-{len(self.layers)}-{self._token}"
        cuts = []
        for axis, size in enumerate(value.shape):
            ends = {end for box in self.blocks[value].places for end in box[axis]}
            cuts.append([*itertools.pairwise(sorted({0, size, *ends}))] or [(0, 0)])
        for index in np.ndindex(*map(len, cuts)):
            box = tuple(cuts[axis][k] for axis, k in enumerate(index))
            needs: dict[Key, int] = {}
            array = self._arg(needs, value, box)
            self.add((name, *index), Gathered.array, array, self.refs(needs))
        return name, tuple(tuple(stop - start for start, stop in each) for each in cuts)

    def collect(self) -> dict[Key, list[Target]]:
        """Adds tasks that collect what comes to the client; what each of them has.

        Of what a worker has written nothing comes, but that it is done.
        """
        ends = [*self.ends.items()]
        most = max(
            (sum(box_bytes(v, box) for _, (box, _, v) in each) for _, each in ends),
            default=0,
        )
        count = max(1, min(TOGETHER, AT_ONCE // max(most, 1)))
        coming = {}
        for first in range(0, len(ends), count):
            group = ends[first : first + count]
            taken = [[at for at, _ in each] for _, each in group]
            key = f"results-{self._token}", first
            self.add(key, collected, taken, self.refs(key for key, _ in group))
            coming[key] = [target for _, each in group for _, target in each]
        return coming


def run_on_cluster(
    client: Any,
    cut_program: CutProgram,
    leaves: Sequence[Any],
    acc: Accumulator,
    saved: Checkpoint | None,
    retries: int,
    progress: bool,
) -> None:
    """Runs a plan on a `distributed.Client`; ``acc`` gets what workers do not write."""
    distributed: Any = importlib.import_module("distributed")

    graph = Graph(cut_program, leaves, acc.given, saved=saved)
    coming = graph.collect()
    futures = client.get(graph.joined(), [*coming], sync=False, retries=retries)
    del graph
    if progress:
        distributed.progress(futures, notebook=False)
    try:
        for future in distributed.as_completed(futures):
            for target, part in zip(coming[future.key], future.result(), strict=True):
                acc.put([target], [part])
            future.release()
    except ShardFailure as error:
        stage, number, cause = error.args
        shard = Shard(cut_program, cut_program.stages[stage], number)
        raise shard.error(cause, retries + 1) from cause
    except distributed.KilledWorker as error:
        raise ShardError(
            f"workers end while they run a shard: {error}; run again with more "
            "memory for each, or more pieces; checkpoint= keeps what is done"
        ) from error
    finally:
        client.cancel([*futures])


def to_dask(cut_program: CutProgram, leaves: Sequence[Any]) -> PyTree:
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
    outputs = cut_program.graph.outputs
    graph = Graph(cut_program, list(map(sliceable, leaves)), {}, kept=outputs)
    added = {v: graph.add_array(v) for v in outputs if isinstance(v, Value)}
    joined = graph.joined()
    arrays = [
        da.Array(joined, *added[v], v.aval.dtype)
        if isinstance(v, Value)
        else da.asarray(np.asarray(v.value, v.aval.dtype))
        for v in outputs
    ]
    return cut_program.result(arrays)


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"
