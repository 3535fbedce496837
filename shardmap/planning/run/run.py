"""Runs a plan: here, in threads, in other processes.

Every executor combines results in the order of the shards, so the same plan gives the
same bytes each time.
"""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.blocks import sliceable
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.scratch import checked, reserve, scratch_arrays
from shardmap.planning.run.out import outputs, shared_chunks
from shardmap.planning.run.shards import Accumulator, index_of
from shardmap.planning.run.tasks import shard_tasks
from shardmap.planning.run.workers import LocalWorkers, ThreadWorkers, Workers
from shardmap.planning.sources.stores import decoding_within
from shardmap.units import check_bool, integer_of, shown


def run(
    cut_program: CutProgram,
    leaves: Sequence[Any],
    out: PyTree,
    *,
    executor: Any,
    max_in_flight: int | None,
    progress: bool,
    retries: int,
    checkpoint: str | os.PathLike[str] | None,
    scratch: Any,
    task: Any,
    stage: Any,
    memory: int | None,
    read: int,
) -> PyTree:
    """See `ShardPlan.run`; within ``memory``, so many bytes are held while ``read``."""
    if max_in_flight is not None:
        max_in_flight = integer_of("max_in_flight", max_in_flight, least=1)
    retries = integer_of("retries", retries, least=0)
    check_bool("progress", progress)
    in_job = saved = job = None
    # What few runs need is imported where it is needed.
    if task is not None:
        from shardmap.planning.run.array_job import ArrayJob, place_in_job

        in_job = place_in_job(task)
    if stage is not None:
        stage = index_of("stages", stage, len(cut_program.stages))
        if not in_job:
            raise ValueError(
                "stage needs task: it is the stage that an array job runs, after the "
                "jobs of the stages before"
            )
    if in_job and checkpoint is None:
        raise ValueError("task needs checkpoint, the folder that all tasks share")
    if in_job and _is_client(executor):
        raise ValueError(
            "task spreads a plan over processes, and a Dask client over its workers: "
            "give one of them"
        )
    with contextlib.ExitStack() as stack:
        engine, pool = stack.enter_context(_engine(executor, max_in_flight or 1))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                "plan.run reads and writes arrays on the host, and cannot run inside "
                "jax.jit, jax.grad, jax.vmap or another transformation: use "
                "sm.chunked, which takes the same in_slices"
            )
        places = outputs(cut_program, out, leaves)
        for value, axis, cell, times in shared_chunks(cut_program, places):
            warnings.warn(
                f"plan.run: shards share chunks of {cut_program.output_names[value]} "
                f"along axis {axis}: each is read and written again {times:.3g} times. "
                f"Cut at multiples of {cell}, or give out and memory to plan",
                stacklevel=3,
            )
        for _, array in places:
            if isinstance(array, np.memmap) and array.mode != "c" and array.filename:
                reserve("out", array)
        given = {value: array for value, array in places if value}
        leaves = list(map(sliceable, leaves))
        if checkpoint is not None:
            from shardmap.planning.run.disk.checkpoint import Checkpoint
            from shardmap.planning.run.disk.folder import path_of

            in_memory = path_of("checkpoint", checkpoint).startswith("memory://")
            if in_memory and (engine is None or engine.in_other_processes):
                raise ValueError(
                    f"checkpoint={checkpoint!r} is in the memory of one process, and "
                    "the processes of executor write to it: give a folder or a store "
                    "that all of them reach"
                )
            saved = Checkpoint(checkpoint, cut_program, leaves)
            if in_job:
                job = ArrayJob(cut_program, leaves, in_job, saved, stage)
        scratch = cut_program.scratch if scratch is None else checked(scratch)
        has_own = job or engine is None  # The folder of the job, workers of Dask.
        kept_there = scratch_arrays(cut_program, None if has_own else scratch)
        arrays, remove = stack.enter_context(kept_there)
        acc = job or Accumulator(cut_program, {**given, **arrays})
        numbers = [
            job.numbers(each) if job else range(each.num_shards)
            for each in cut_program.stages
        ]
        bar = None
        if progress and engine:
            bar = stack.enter_context(_progress(sum(map(len, numbers))))
        if engine is None:
            from shardmap.planning.run.dask import run_on_cluster

            run_on_cluster(pool, cut_program, leaves, acc, saved, retries, progress)
            stages: Sequence[Stage] = []
        else:
            work = engine(pool, cut_program, leaves, acc, saved)
            stages = cut_program.stages[: None if stage is None else stage + 1]
        stores = [*leaves, *given.values()]
        trim = stack.enter_context(decoding_within(stores, memory, read))
        for place, each in enumerate(stages):
            for value in acc.free(place):
                remove(value)
            if work.in_other_processes:
                acc.flush()
            tasks = shard_tasks(each, numbers[place])
            if bar is not None:
                bar.set_description(f"stage {each.number}")
            for _ in work.run(tasks, max_in_flight or work.ahead, retries):
                if bar is not None:
                    bar.update()
                trim()
            if job:
                job.end_stage(each)
    if job:
        if not job.is_last:
            return None
        acc = Accumulator(cut_program, given)
        job.put_into(acc)
    results = []
    for result, (first, array) in zip(acc.outputs(), places, strict=True):
        # Constants, and values that are in ``out`` at another place already, were not
        # written while shards ran.
        if array is not None and first is None:
            array[...] = result
        results.append(result if array is None else array)
    return cut_program.result(results)


@contextlib.contextmanager
def _engine(executor: Any, readers: int) -> Iterator[tuple[type[Workers] | None, Any]]:
    """The kind of workers for an executor, None for Dask's own, and what they use."""
    if executor is None:
        with ThreadPoolExecutor(readers) as pool:
            yield LocalWorkers, pool
        return
    from shardmap.planning.run.processes import ProcessWorkers, own_processes

    if hasattr(executor, "__index__") and not isinstance(executor, bool):
        count = integer_of("the number of processes, executor,", executor, least=1)
        with own_processes(count) as processes:
            yield ProcessWorkers, processes
    elif isinstance(executor, ThreadPoolExecutor):
        yield ThreadWorkers, executor
    elif _is_client(executor):
        yield None, executor
    elif isinstance(executor, Executor):
        # Of a ProcessPoolExecutor. The lock of a thread of JAX stays locked in a fork.
        context = getattr(executor, "_mp_context", None)
        if context is not None and context.get_start_method() == "fork":
            raise ValueError(
                "executor forks this process, whose threads of JAX may hold locks: "
                "give the pool mp_context=multiprocessing.get_context('spawn')"
            )
        yield ProcessWorkers, executor
    else:
        raise TypeError(
            "executor must be None, a number of processes, a "
            "concurrent.futures.Executor or a distributed.Client, got "
            f"{shown(executor)} of type {type(executor).__name__}"
        )


def _is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )


def _progress(total: int) -> Any:
    """A bar of tqdm for so many shards."""
    try:
        tqdm: Any = importlib.import_module("tqdm.auto")
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return tqdm.tqdm(total=total, unit="shard")
