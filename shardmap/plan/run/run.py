"""Running a plan: here, in threads, in other processes.

Whatever runs the shards, their results are put together in the order of the shards, so
that the same plan gives the same bytes each time.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import sliceable
from shardmap.plan.engine.nodes import Value
from shardmap.plan.run.array_job import ArrayJob, place_in_job
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.checkpoint import Checkpoint
from shardmap.plan.run.disk.scratch import checked, scratch_arrays
from shardmap.plan.run.out import outputs
from shardmap.plan.run.progress import bar
from shardmap.plan.run.shards import Accumulator
from shardmap.plan.run.trim import trimming
from shardmap.plan.run.workers import Engine


def run(
    cut_program: CutProgram,
    args: tuple[PyTree, ...],
    out: PyTree,
    *,
    engine: Engine,
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
        work = stack.enter_context(engine(cut_program, leaves, acc, saved is not None))
        numbers = [
            job.numbers(stage) if job else range(stage.num_shards)
            for stage in cut_program.stages
        ]
        total = sum(map(len, numbers))
        step = stack.enter_context(bar(cut_program, total, progress))
        ahead = max_in_flight or work.ahead
        trim = stack.enter_context(trimming(trims))
        for place, stage in enumerate(cut_program.stages):
            for value in acc.free(place):
                remove(value)
            if work.apart:
                acc.flush()
            tasks = work.tasks(stage, numbers[place])
            for done in work.run(tasks, ahead, retries, saved):
                step(done)
                trim()
            if job:
                job.end_stage(stage)
    if job:
        if not job.is_last:
            return None
        acc = Accumulator(cut_program, given)
        job.put_into(acc)
    return finished(cut_program, acc, places)


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
