"""Running a plan: here, in threads, in other processes.

Whatever runs the shards, their results are put together in the order of the shards, so
that the same plan gives the same bytes each time.
"""

import contextlib
import ctypes
import os
import time
from typing import Any

import jax

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.plan.run.array_job import ArrayJob, place_in_job
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.checkpoint import Checkpoint
from shardmap.plan.run.disk.scratch import checked, scratch_arrays
from shardmap.plan.run.out import outputs
from shardmap.plan.run.progress import progress_bar
from shardmap.plan.run.shards import Accumulator
from shardmap.plan.run.workers import Workers

SECONDS = 0.05
"""The least time between two calls of glibc, which take a few milliseconds."""


def run(
    cut_program: CutProgram,
    args: tuple[PyTree, ...],
    out: PyTree,
    *,
    engine: type[Workers],
    executor: Any,
    max_in_flight: int | None,
    progress: bool,
    retries: int,
    checkpoint: str | os.PathLike[str] | None,
    scratch: Any = None,
    task: Any = None,
    trims: bool = False,
) -> PyTree:
    """See `ShardPlan.run`.

    Args:
      engine: the kind of workers.
      executor: what they use.
      trims: whether to give back what the allocator keeps of freed memory.
    """
    own = None if task is None else place_in_job(task)
    if own and checkpoint is None:
        raise ValueError("task needs checkpoint, the folder that all tasks share")
    leaves = cut_program.leaves(args)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            "plan.run reads and writes arrays on the host, and cannot run inside "
            "jax.jit, jax.grad, jax.vmap or another transformation: use sm.chunked, "
            "which takes the same in_slices"
        )
    places = outputs(cut_program, out, leaves)
    leaves = list(map(sliceable, leaves))
    saved = None if checkpoint is None else Checkpoint(checkpoint, cut_program, leaves)
    given = {value: array for value, array in places if value}
    job = ArrayJob(cut_program, leaves, own, saved) if own and saved else None
    scratch = cut_program.scratch if scratch is None else checked(scratch)
    with contextlib.ExitStack() as stack:
        kept_there = scratch_arrays(cut_program, None if job else scratch)
        arrays, remove = stack.enter_context(kept_there)
        acc = job or Accumulator(cut_program, {**given, **arrays})
        work = engine(executor, cut_program, leaves, acc, saved is not None)
        numbers = [
            job.numbers(stage) if job else range(stage.num_shards)
            for stage in cut_program.stages
        ]
        total = sum(map(len, numbers))
        step = None
        if progress:
            step = stack.enter_context(progress_bar(cut_program, total))
        ahead = max_in_flight or work.ahead
        trim, trimmed = _trim_of_glibc() if trims else None, time.monotonic()
        for place, stage in enumerate(cut_program.stages):
            for value in acc.free(place):
                remove(value)
            if work.apart:
                acc.flush()
            tasks = work.tasks(stage, numbers[place])
            for done in work.run(tasks, ahead, retries, saved):
                if step and not done.needs:
                    step(done)
                if trim and time.monotonic() - trimmed > SECONDS:
                    trim(0)
                    trimmed = time.monotonic()
            if job:
                job.end_stage(stage)
            if trim:
                trim(0)
    if job:
        if not job.is_last:
            return None
        acc = Accumulator(cut_program, given)
        job.put_into(acc)
    results = []
    for made, (first, array) in zip(acc.outputs(), places, strict=True):
        # What stands for no value of its own was not written while shards ran: a
        # constant, or a value that is in ``out`` at another place already.
        if array is not None and first is None:
            array[...] = made
        results.append(made if array is None else array)
    return jax.tree.unflatten(cut_program.out_tree, results)


def _trim_of_glibc() -> Any:
    """The function of glibc that gives back freed memory, which it keeps; None if none.

    That can be several times what a shard holds.
    """
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, TypeError, OSError):
        return None
