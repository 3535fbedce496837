"""The task of one shard in another process: read, run, write.

It gets an exported function and, for each box that it reads or writes, either where the
value lies or the bytes themselves. What it cannot write comes back. No object of JAX is
pickled. A worker keeps the functions that it has seen.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import export

# These register themselves.
from shardmap.arrays.sources import files, labelled, stores  # noqa: F401
from shardmap.arrays.sources.registry import Away, away
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, slices
from shardmap.plan.run.buffers import read_box
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.shards import Shard


class Read(NamedTuple):
    """A box that is read where the shard runs."""

    source: Away
    box: Box
    shape: tuple[int, ...]
    dtype: Any

    def array(self) -> Any:
        aval: Any = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return np.asarray(read_box(self.source.open(), self.box, aval))


class Write(NamedTuple):
    """A box that is written where the shard runs."""

    sink: Away
    box: Box

    def put(self, part: np.ndarray) -> None:
        index: Any = slices(self.box)
        array = self.sink.open(writable=True)
        array[index] = part
        if hasattr(array, "flush"):
            array.flush()


Arg: TypeAlias = Read | np.ndarray


def exported(shard: Shard) -> bytes:
    """The function of a shard as bytes.

    Raises:
      ImportError: the package that writes them is not installed.
    """
    try:
        return bytes(shard.export().serialize())
    except ImportError as error:
        raise ImportError(
            "shards travel to other processes as jax.export bytes, which need the "
            "package flatbuffers: pip install flatbuffers"
        ) from error


@functools.lru_cache(maxsize=256)
def _imported(blob: bytes) -> Callable[..., Any]:
    return jax.jit(export.deserialize(bytearray(blob)).call)


def run_task(
    blob: bytes, args: Sequence[Arg], writes: Sequence[Write | None]
) -> list[np.ndarray | None]:
    """Runs one shard, and gives those of its results that it has not written."""
    arrays = [arg.array() if isinstance(arg, Read) else arg for arg in args]
    with jax.enable_x64(True):  # The types are those of the function, whatever is set.
        results: list[np.ndarray | None] = [*map(np.asarray, _imported(blob)(*arrays))]
    for k, write in enumerate(writes):
        part = results[k]
        if write is not None and part is not None:
            write.put(part)
            results[k] = None
    return results


class Travels(NamedTuple):
    """Which arguments and results other processes open themselves."""

    sources: dict[Value, Away]
    sinks: dict[Value, Away]

    @classmethod
    def of(
        cls,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        given: Mapping[Value, Any],
        read_only: bool = False,
    ) -> "Travels":
        """What of arguments and ``out`` travels.

        Args:
          cut_program: the plan.
          leaves: its arguments.
          given: the array-likes to put results in, by value.
          read_only: whether results are all wanted back.
        """
        inputs = cut_program.graph.inputs
        found = zip(inputs, map(away, leaves), strict=True)
        sources = {value: source for value, source in found if source is not None}
        sinks = {value: sink for value, out in given.items() if (sink := away(out))}
        return cls(sources, {} if read_only else sinks)

    def source(self, value: Value) -> Away | None:
        return self.sources.get(value) or self.sinks.get(value)

    def write(self, box: Box, combiner: str, value: Value) -> Write | None:
        """How a result is written where it is made; None if it comes back.

        Cells that several shards write are left to one process.
        """
        sink = self.sinks.get(value)
        if sink is None or sink.grain is None or combiner != "insert":
            return None
        if is_key(value.aval):
            return None
        return Write(sink, box) if is_whole(box, sink.grain, value.shape) else None

    def read(self, value: Value, box: Box) -> Read | None:
        """How the worker reads a box; None if it is sent."""
        source = self.source(value)
        if source is None or is_key(value.aval):
            return None
        return Read(source, box, value.shape, value.aval.dtype)


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
