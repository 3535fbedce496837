"""The time and memory of real calls, beside the predictions of a report."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardmap.explain.report import Report
from shardmap.units import duration, size


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """The time and memory of some calls. Prints beside the predictions.

    Attributes:
      name: the function's.
      seconds: the time of each call, without the first, which compiles.
      peak_bytes: the most memory in use so far on any of the devices; None where a
        device does not count it, such as a CPU.
      predicted_bytes: the peak memory on a device, by the compiler.
    """

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int | None
    predicted_bytes: int | None

    def __repr__(self) -> str:
        took = duration(statistics.median(self.seconds))
        return f"<Measurement of {self.name}: {took} a call>"

    def __str__(self) -> str:
        took = duration(statistics.median(self.seconds))
        peak = "not counted here" if self.peak_bytes is None else size(self.peak_bytes)
        needed = (
            "unknown" if self.predicted_bytes is None else size(self.predicted_bytes)
        )
        return (
            f"{self.name}, {len(self.seconds)} calls\n"
            f"  time of a call: {took}\n"
            f"  peak memory of a device: {peak}; predicted: {needed}"
        )


def measure(
    fun: Callable[..., Any],
    donates: bool,
    report: Report,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    repeats: int,
) -> Measurement:
    """Calls a function ``repeats`` times, after a call that compiles it.

    Args:
      fun: the function.
      donates: whether a call donates arguments, which are then copied first.
      report: the predictions.
      args, kwargs: the arguments.
      repeats: how many calls are measured.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"measure runs {report.name}, but the argument at {where} is only a "
                f"shape, {leaf}: give arrays"
            )
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    run = fun if hasattr(fun, "lower") else jax.jit(fun)
    seconds = []
    for _ in range(repeats + 1):
        given = jax.tree.map(_copy, (args, kwargs)) if donates else (args, kwargs)
        jax.block_until_ready(given)
        start = time.perf_counter()
        result = jax.block_until_ready(run(*given[0], **given[1]))
        seconds.append(time.perf_counter() - start)
    arrays = [a for a in jax.tree.leaves(result) if isinstance(a, jax.Array)]
    devices = {device for array in arrays for device in array.devices()}
    stats = [(device.memory_stats() or {}) for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return Measurement(
        report.name,
        tuple(seconds[1:]),
        max(peaks, default=None),
        None if report.cost is None else report.cost.peak_bytes,
    )


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
