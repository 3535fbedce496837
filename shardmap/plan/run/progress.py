"""The progress of a run: a bar of tqdm, or lines of text without it."""

import contextlib
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from shardmap.plan.engine.keys import box_bytes
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.tasks import Task
from shardmap.units import size

_SECONDS_BETWEEN_LINES = 1.0


def moved(cut_program: CutProgram, task: Task) -> int:
    """The bytes that a shard reads and writes."""
    shard = Shard(cut_program, task.stage, task.number)
    boxes = [(value, box) for value, box in shard.recipe.reads]
    boxes += [(value, box) for box, _, value in shard.writes]
    return sum(box_bytes(value, box) for value, box in boxes)


@contextlib.contextmanager
def bar(
    cut_program: CutProgram, total: int, shown: bool
) -> Iterator[Callable[[Task], Any]]:
    """Shows the progress of a run on stderr, if it is to be shown.

    Args:
      cut_program: the plan.
      total: how many shards there are.
      shown: whether to show it.

    Yields:
      What is called with each task that is done.
    """
    if not shown:
        yield lambda task: None
        return
    start, done = time.monotonic(), 0
    with _tqdm(total) if _has_tqdm() else _lines(total) as show:

        def step(task: Task) -> None:
            nonlocal done
            if task.needs:
                return
            done += moved(cut_program, task)
            rate = done / max(time.monotonic() - start, 1e-9)
            show(f"stage {task.stage.number}", f"{size(done)}, {size(int(rate))}/s")

        yield step


_Show = Callable[[str, str], None]
"""Called after each shard with the name of its stage and the bytes so far."""


def _has_tqdm() -> bool:
    try:
        importlib.import_module("tqdm")
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _tqdm(total: int) -> Iterator[_Show]:
    tqdm = importlib.import_module("tqdm.auto")
    with tqdm.tqdm(total=total, unit="shard") as shows:

        def show(stage: str, so_far: str) -> None:
            shows.set_description(stage, refresh=False)
            shows.set_postfix_str(so_far, refresh=False)
            shows.update()

        yield show


@contextlib.contextmanager
def _lines(total: int) -> Iterator[_Show]:
    """A line a second at most, and one at the end."""
    count, last = 0, -math.inf

    def show(stage: str, so_far: str) -> None:
        nonlocal count, last
        count += 1
        now = time.monotonic()
        if count == total or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            text = f"{stage}: {count} of {total} shards, {so_far}"
            print(text, file=sys.stderr, flush=True)

    yield show
