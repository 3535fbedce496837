"""The progress of a run: a bar of tqdm, or lines of text without it."""

import contextlib
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator

from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.tasks import Task
from shardmap.units import size

SECONDS = 1.0
"""The least time between two lines of text."""


@contextlib.contextmanager
def progress_bar(
    cut_program: CutProgram, total: int
) -> Iterator[Callable[[Task], None]]:
    """Shows on stderr which of ``total`` shards are done; call it with each of them."""
    try:
        bar = importlib.import_module("tqdm.auto").tqdm(total=total, unit="shard")
    except ImportError:
        bar = None
    done, nbytes, start, last = 0, 0, time.monotonic(), -math.inf

    def step(task: Task) -> None:
        nonlocal done, nbytes, last
        done += 1
        nbytes += Shard(cut_program, task.stage, task.number).nbytes
        now = time.monotonic()
        seconds = max(now - start, 1e-9)
        stage = f"stage {task.stage.number}"
        moved = f"{size(nbytes)}, {size(round(nbytes / seconds))}/s"
        if bar is not None:
            bar.set_description(stage, refresh=False)
            bar.set_postfix_str(moved, refresh=False)
            bar.update()
        elif done == total or now - last >= SECONDS:
            last, left = now, seconds / done * (total - done)
            text = f"{stage}: {done} of {total} shards, {moved}, {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)

    with contextlib.nullcontext() if bar is None else bar:
        yield step
