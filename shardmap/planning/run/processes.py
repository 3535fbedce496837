"""Shards in other processes, by any executor of `concurrent.futures`.

A process gets an exported function and, for each box that a shard reads or writes,
either where the array is or the bytes themselves. Results that it cannot write come
back. No object of JAX is pickled.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import export

from shardmap.planning.engine.keys import is_key
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.slices import Box, slices
from shardmap.planning.run.buffers import read_box, start_dtype
from shardmap.planning.run.failures import contained
from shardmap.planning.run.shards import Shard
from shardmap.planning.run.tasks import Task
from shardmap.planning.run.workers import Workers

# These register themselves.
from shardmap.planning.sources import files, labelled, stores  # noqa: F401
from shardmap.planning.sources.registry import RemoteRef, remote_ref


class Read(NamedTuple):
    """A box that is read where the shard runs."""

    source: RemoteRef
    box: Box
    shape: tuple[int, ...]
    dtype: Any

    def array(self) -> Any:
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


Arg: TypeAlias = Read | np.ndarray


@functools.lru_cache(maxsize=256)
def _imported(blob: bytes) -> Callable[..., Any]:
    return jax.jit(export.deserialize(bytearray(blob)).call)


def computed(blob: bytes, args: Sequence[Arg]) -> list[np.ndarray]:
    """The results of one shard."""
    arrays = [arg.array() if isinstance(arg, Read) else arg for arg in args]
    with jax.enable_x64(True):  # The types are those of the function, whatever is set.
        return [*map(np.asarray, _imported(blob)(*arrays))]


@contained
def run_task(
    blob: bytes, args: Sequence[Arg], writes: Sequence[Write | None]
) -> list[np.ndarray | None]:
    """Runs one shard, and returns its results; None for those that it has written."""
    results: list[np.ndarray | None] = [*computed(blob, args)]
    for k, write in enumerate(writes):
        if write is not None:
            write.put(results[k])
            results[k] = None
    return results


class RemoteAccess:
    """Which arguments and results other processes open themselves.

    Args:
      inputs: the values of the arguments.
      leaves: the arguments.
      out: the arrays to write results to, by value.
    """

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
        """How the worker writes a result; None if it comes back.

        Cells that several shards share are written by this process.
        """
        sink = self.sinks.get(value)
        if sink is None or sink.grain is None or combiner != "insert":
            return None
        if is_key(value.aval) or not is_whole(box, sink.grain, value.shape):
            return None
        return Write(sink, box)


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
        """The function of a shard.

        Raises:
          ImportError: the package that writes its bytes is not installed.
        """
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
        out = {} if self.saved else self.acc.given
        self.access = RemoteAccess(self.cut_program.graph.inputs, self.leaves, out)
        if isinstance(self.executor, ProcessPoolExecutor):  # Others pickle lambdas too.
            for there in (*self.access.sources.values(), *self.access.sinks.values()):
                there.check_pickles()

    def submit(self, task: Task) -> Any:
        shard = self.shard(task)
        starts, kept = shard.recipe.starts, self.acc.kept
        args: list[Any] = [
            self.access.read(value, box)
            or np.asarray(self.cut_program.read_one(value, box, self.leaves, kept))
            for value, box in shard.recipe.reads
        ]
        args.append(np.asarray(starts, start_dtype(starts)))
        writes = [self.access.write(*write) for write in task.writes]
        return self.executor.submit(run_task, self.exported(shard), args, writes)
