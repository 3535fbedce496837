"""Shards in other processes, by any executor of `concurrent.futures`.

A process gets an exported function and, for each box that a shard reads or writes,
either where the array is or the bytes themselves. Results that it cannot write come
back. No object of JAX is pickled.
"""

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Value, is_key
from shardmap.planning.engine.slices import Box, slices
from shardmap.planning.run.buffers import read_box, start_dtype
from shardmap.planning.run.disk.checkpoint import TaskFile
from shardmap.planning.run.failures import contained
from shardmap.planning.run.shards import Shard
from shardmap.planning.run.tasks import Task
from shardmap.planning.run.workers import Workers

# These register themselves.
from shardmap.planning.sources import labelled, stores  # noqa: F401
from shardmap.planning.sources.registry import RemoteRef, remote_ref


class Read(NamedTuple):
    """A box that is read where the shard runs."""

    source: RemoteRef
    box: Box
    shape: tuple[int, ...]
    dtype: Any

    def array(self, needs: Sequence[Any]) -> Any:
        aval: Any = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return np.asarray(read_box(self.source.open(), self.box, aval))


class Write(NamedTuple):
    """A box that is written where the shard runs."""

    sink: RemoteRef
    box: Box

    def put(self, part: Any) -> None:
        index: Any = slices(self.box)
        array = self.sink.open(writable=True)
        array[index] = part
        if hasattr(array, "flush"):
            array.flush()


@functools.lru_cache(maxsize=256)
def _imported(blob: bytes) -> Callable[..., Any]:
    return jax.jit(export.deserialize(bytearray(blob)).call)


class Job(NamedTuple):
    """A shard for a worker.

    Attributes:
      args: an array for each, or what has one.
      writes: for each result, where it goes, and whether it is returned.
      file: of a checkpoint.
    """

    args: Sequence[Any]
    writes: Sequence[tuple[Write | None, bool]]
    file: TaskFile | None = None


@contained
def run_job(blob: bytes, job: Job, needs: Sequence[Any] = ()) -> list[Any]:
    """Runs one shard; returns its results, None for those that are not returned."""
    results = job.file.load() if job.file else None
    if results is None:
        arrays = [a if isinstance(a, np.ndarray) else a.array(needs) for a in job.args]
        # The types are those of the function, whatever is set.
        with jax.enable_x64(True):
            results = [*map(np.asarray, _imported(blob)(*arrays))]
        if job.file:
            job.file.save(results)
    for part, (write, _) in zip(results, job.writes, strict=True):
        if write is not None:
            write.put(part)
    pairs = zip(results, job.writes, strict=True)
    return [part if is_returned else None for part, (_, is_returned) in pairs]


class RemoteAccess:
    """Which arguments and results other processes open themselves."""

    def __init__(
        self, inputs: Sequence[Value], leaves: Sequence[Any], out: Mapping[Value, Any]
    ) -> None:
        refs = zip(inputs, map(remote_ref, leaves), strict=True)
        self.sources = {value: source for value, source in refs if source}
        self.sinks = {
            value: sink for value, each in out.items() if (sink := remote_ref(each))
        }

    def read(self, value: Value, box: Box) -> Read | None:
        """How the worker reads a box; None if it is sent."""
        source = self.sources.get(value)
        if value.producer is not None:  # An argument may not be written there yet.
            source = self.sinks.get(value)
        if source is None or is_key(value.aval):
            return None
        return Read(source, box, value.shape, value.aval.dtype)

    def write(self, box: Box, combiner: Combiner, value: Value) -> Write | None:
        """How the worker writes a result; None if it comes back, as in shared cells."""
        sink = self.sinks.get(value)
        if sink is None or sink.grain is None or combiner != "insert":
            return None
        if is_key(value.aval) or not is_whole(box, sink.grain, value.shape):
            return None
        return Write(sink, box)

    def job(
        self,
        task: Task,
        shard: Shard,
        array: Callable[[Value, Box], Any],
        kept: Container[Value] = (),
        file: TaskFile | None = None,
    ) -> Job:
        """A shard, whose arguments are read there or are what ``array`` gives."""
        starts = shard.recipe.starts
        args = [array(value, box) for value, box in shard.recipe.reads]
        args.append(np.asarray(starts, start_dtype(starts)))
        writes = [(self.write(*each), each[-1]) for each in task.writes]
        return Job(args, [(w, w is None or v in kept) for w, v in writes], file)


def is_whole(box: Box, grain: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box consists of whole cells.

    >>> is_whole(((4, 8), (0, 3)), (4, 2), (10, 3))
    True
    >>> is_whole(((4, 7),), (4,), (10,))
    False
    """
    return all(
        start % cell == 0 and (stop % cell == 0 or stop == size)
        for (start, stop), cell, size in zip(box, grain, shape, strict=True)
    )


class Exported:
    """The exported functions of shards, as bytes; equal shards share one."""

    def __init__(self) -> None:
        self._blobs: dict[jax.stages.Wrapped, bytes] = {}

    def __call__(self, shard: Shard) -> bytes:
        """The function of a shard."""
        function = shard.function
        if function not in self._blobs:
            try:
                self._blobs[function] = bytes(shard.export().serialize())
            except ImportError as error:
                raise ImportError(
                    "shards are sent to other processes as jax.export bytes, which "
                    "need the package flatbuffers: pip install flatbuffers"
                ) from error
            except NotImplementedError as error:
                raise ValueError(
                    "a shard that calls the host is not sent to other processes: run "
                    "it in threads, executor=ThreadPoolExecutor(4), or as an array "
                    f"job, task= ({error})"
                ) from error
        return self._blobs[function]


class ProcessWorkers(Workers):
    """Sends exported functions, and for each box its place or its bytes."""

    in_other_processes = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exported = Exported()
        inputs = self.cut_program.graph.inputs
        self.access = RemoteAccess(inputs, self.leaves, self.acc.given)
        if isinstance(self.executor, ProcessPoolExecutor):  # Others pickle lambdas too.
            for there in (*self.access.sources.values(), *self.access.sinks.values()):
                there.check_pickles()

    def submit(self, task: Task) -> Any:
        shard, kept = self.shard(task), self.acc.kept

        def array(value: Value, box: Box) -> Any:
            read = self.access.read(value, box)
            if read is not None:
                return read
            return np.asarray(self.cut_program.read_one(value, box, self.leaves, kept))

        file = self.saved.file(task) if self.saved else None
        job = self.access.job(task, shard, array, file=file)
        return self.executor.submit(run_job, self.exported(shard), job)


@contextlib.contextmanager
def own_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes, which end with this one."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            f"executor={count} starts processes, which a daemonic process, such as a "
            "worker of multiprocessing.Pool, may not: start that worker by "
            "concurrent.futures.ProcessPoolExecutor"
        )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _end_with_parent) as pool:
        yield pool


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, which may have been killed."""

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
