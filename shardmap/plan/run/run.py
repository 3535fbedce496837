"""Running a plan: here, in threads, in other processes.

Whatever runs the shards, their results are put together in the order of the shards, so
that the same plan gives the same bytes each time.
"""

import collections
import contextlib
import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ThreadPoolExecutor,
)
from typing import Any

import jax

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import shape_of
from shardmap.plan.engine.stages import Stage
from shardmap.plan.run.checkpoint import Checkpoint
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.out import outputs
from shardmap.plan.run.shards import Accumulator, Shard, Shards
from shardmap.plan.run.workers import Elsewhere, Here, Threads, Work

READ_AHEAD = 2
"""How many shards are read or computed at once in this process by default."""

LARGE = 2**25
"""From how many bytes on a shard is read only when the one before it is done."""


class ShardError(RuntimeError):
    """A shard failed for good. The cause is the last error."""


def run(
    cut_program: CutProgram,
    args: tuple[PyTree, ...],
    out: PyTree,
    *,
    executor: Executor | None,
    max_in_flight: int | None,
    progress: bool,
    retries: int,
    checkpoint: str | os.PathLike[str] | None,
) -> PyTree:
    """See `ShardPlan.run`."""
    leaves = cut_program.leaves(args)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            "plan.run reads and writes arrays on the host, and cannot run inside "
            "jax.jit, jax.grad, jax.vmap or another transformation: use sm.chunked, "
            "which takes the same in_slices"
        )
    places = outputs(cut_program, out, leaves)
    if max_in_flight is not None and max_in_flight < 1:
        raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
    if not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries must be at least 0, got {retries}")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(
            "executor must be None or a concurrent.futures.Executor, such as "
            f"concurrent.futures.ThreadPoolExecutor(4), but got {executor!r}"
        )
    leaves = list(map(sliceable, leaves))
    saved = None if checkpoint is None else Checkpoint(checkpoint, cut_program, leaves)
    acc = Accumulator(cut_program, {value: array for value, array in places if value})
    with contextlib.ExitStack() as stack:
        work: Work
        if executor is None:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            work = Here(cut_program, leaves, acc, pool)
            large = any(bytes_read(stage) > LARGE for stage in cut_program.stages)
            ahead = max_in_flight or (1 if large else READ_AHEAD)
        elif isinstance(executor, ThreadPoolExecutor):
            work = Threads(cut_program, leaves, acc, executor)
            ahead = max_in_flight or 2 * (os.cpu_count() or 1)
        else:
            work = Elsewhere(cut_program, leaves, acc, executor)
            ahead = max_in_flight or 2 * (os.cpu_count() or 1)
        step = stack.enter_context(_bar(cut_program, progress))
        for place, stage in enumerate(cut_program.stages):
            acc.free(place)
            shards = Shards(cut_program, [stage])
            for shard, result in _in_order(shards, work, ahead, retries, saved):
                acc.put(shard, result)
                step()
    return finished(cut_program, acc, places)


def bytes_read(stage: Stage) -> int:
    """What the first shard of a stage reads."""
    reads = stage.recipe(0)[1].reads
    return sum(math.prod(shape_of(box)) * itemsize(v.aval) for v, box in reads)


def finished(
    cut_program: CutProgram,
    acc: Accumulator,
    places: Sequence[tuple[Value | None, Any]],
) -> PyTree:
    """The result, in ``out`` where that was given."""
    results = []
    for made, (value, array) in zip(acc.outputs(), places, strict=True):
        # What stands for no value of its own was not written while shards ran: a
        # constant, or a value that is in ``out`` at another place already.
        if array is not None and value is None:
            array[...] = made
        results.append(made if array is None else array)
    return jax.tree.unflatten(cut_program.out_tree, results)


def _in_order(
    shards: Sequence[Shard],
    work: Work,
    ahead: int,
    retries: int,
    saved: Checkpoint | None,
) -> Iterator[tuple[Shard, Any]]:
    """The results of the shards, at most ``ahead`` of them under way."""
    waiting: collections.deque[tuple[Shard, Future[Any] | None, Any]] = (
        collections.deque()
    )
    numbers = iter(range(len(shards)))
    try:
        while True:
            for number in itertools.islice(numbers, ahead - len(waiting)):
                shard = shards[number]
                done = None if saved is None else saved.load(shard)
                future = _submitted(work, shard) if done is None else None
                waiting.append((shard, future, done))
            if not waiting:
                return
            # The oldest one, though others may be done: sums of floating-point numbers
            # depend on their order.
            shard, future, result = waiting.popleft()
            if future is not None:
                result = _result(shard, future, work, retries)
                if saved is not None:
                    saved.save(shard, result)
            yield shard, result
    finally:
        for _, future, _ in waiting:
            if future is not None:
                future.cancel()


def _result(shard: Shard, future: Future[Any], work: Work, retries: int) -> Any:
    for attempt in itertools.count(1):
        try:
            return work.result(shard, future)
        except BrokenExecutor as error:
            raise ShardError(
                f"the executor broke down while shard {shard.number} of stage "
                f"{shard.stage} was under way ({error}); run again with a new one, "
                "checkpoint= keeps what is done"
            ) from error
        except Exception as error:
            if attempt > retries:
                raise ShardError(
                    f"shard {shard.number} of stage {shard.stage} failed "
                    f"{attempt} times; it reads {shard.in_slices}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            future = _submitted(work, shard)
    raise AssertionError


def _submitted(work: Work, shard: Shard) -> Future[Any]:
    """A future of the shard, which also holds an error of reading or submitting."""
    try:
        return work.submit(shard)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


@contextlib.contextmanager
def _bar(cut_program: CutProgram, progress: bool) -> Iterator[Callable[[], Any]]:
    if not progress:
        yield lambda: None
        return
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError as error:
        raise ImportError(
            "progress=True needs the package tqdm: pip install tqdm"
        ) from error
    with tqdm.tqdm(total=cut_program.num_shards, unit="shard") as bar:
        yield bar.update
