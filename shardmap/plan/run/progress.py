"""A bar: shards and bytes, how many a second, and how long it will take."""

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.slices import shape_of
from shardmap.plan.run.shards import Shard
from shardmap.units import size


def moved(shard: Shard) -> int:
    """The bytes that a shard reads and writes."""
    boxes = [(value, box) for value, box in shard.recipe.reads]
    boxes += [(value, box) for box, _, value in shard.writes()]
    return sum(math.prod(shape_of(box)) * itemsize(v.aval) for v, box in boxes)


@contextlib.contextmanager
def bar(total: int, shown: bool) -> Iterator[Callable[[Shard], Any]]:
    """Shows a bar in a terminal or a notebook, if it is to be shown.

    Args:
      total: how many shards there are.
      shown: whether to show it.

    Yields:
      What is called with each shard that is done.
    """
    if not shown:
        yield lambda shard: None
        return
    try:
        importlib.import_module("tqdm")
        tqdm = importlib.import_module("tqdm.auto")
    except ImportError as error:
        raise ImportError(
            "progress=True needs the package tqdm: pip install tqdm"
        ) from error
    start, done = time.monotonic(), 0
    with tqdm.tqdm(total=total, unit="shard") as shows:

        def step(shard: Shard) -> None:
            nonlocal done
            done += moved(shard)
            rate = done / max(time.monotonic() - start, 1e-9)
            shows.set_postfix_str(f"{size(done)}, {size(int(rate))}/s", refresh=False)
            shows.update()

        yield step
