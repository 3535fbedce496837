"""Times contenders against each other, and reports medians, ratios and targets.

All contenders of a benchmark run in one process, one after the other, over and over in
changing order, so that a busy moment of the machine meets them all alike.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "shardmap"


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    run: Callable[..., Any]
    """The work. This is timed."""
    prepare: Callable[[], tuple[Any, ...]] = tuple
    """Makes the arguments of `run`, before the clock starts."""
    finish: Callable[[Any], Any] = lambda result: None
    """Takes the result of `run`, after the clock has stopped."""


@dataclass(frozen=True)
class Benchmark:
    """Contenders that do the same work, one of them called `shardmap`."""

    name: str
    measures: str
    """What is timed, in a few words."""
    contenders: Callable[[], Mapping[str, Contender]]
    """Makes the contenders, which may be costly."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Contender -> the most that our time divided by its time may be."""
    repeats: int = 1000

    def sample(self, repeats: int) -> Mapping[str, Sequence[float]]:
        """The seconds of each run, by contender."""
        return interleave(self.contenders(), repeats)


@dataclass(frozen=True)
class Result:
    """The seconds that each contender took, each time that it ran."""

    benchmark: Benchmark
    samples: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def ratio(self, name: str) -> float:
        """Our median time divided by the contender's: below 1 means that we win."""
        return self.median(OURS) / self.median(name)

    def verdict(self, name: str) -> str:
        limit = self.benchmark.limits.get(name)
        if limit is None:
            return ""
        return "ok" if self.ratio(name) <= limit else "MISS"


def interleave(
    contenders: Mapping[str, Contender],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Runs every contender `repeats` times, taking turns in random order.

    Each runs once more at first, which is not counted.

    Returns:
      The seconds of each run, by contender.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()  # As timeit does: a collection would be charged to whoever runs then.
    try:
        for turn in range(repeats + 1):
            shuffle(order)
            for name in order:
                contender = contenders[name]
                arguments = contender.prepare()
                start = clock()
                result = contender.run(*arguments)
                seconds = clock() - start
                contender.finish(result)
                if turn > 0:
                    samples[name].append(seconds)
    finally:
        gc.enable()
    return samples


def measure(benchmark: Benchmark, repeats: int | None = None) -> Result:
    return Result(benchmark, benchmark.sample(repeats or benchmark.repeats))


def table(results: Sequence[Result]) -> str:
    """The results as text: a line per contender, with our time divided by its time."""
    rows = [("benchmark", "contender", "median", "ours / its", "must be", "")]
    for result in results:
        first = True
        for name in result.samples:
            limit = result.benchmark.limits.get(name)
            rows.append(
                (
                    result.benchmark.name if first else "",
                    name,
                    duration(result.median(name)),
                    "" if name == OURS else f"{result.ratio(name):.2f}",
                    "" if limit is None else f"<= {limit:.2f}",
                    result.verdict(name),
                )
            )
            first = False
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if column in (2, 3, 4) else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def as_json(results: Sequence[Result], versions: Mapping[str, Any]) -> dict[str, Any]:
    """The results as what `json.dump` takes, times in seconds."""
    return {
        "versions": dict(versions),
        "benchmarks": [
            {
                "name": result.benchmark.name,
                "measures": result.benchmark.measures,
                "contenders": {
                    name: {
                        "median": result.median(name),
                        "quartiles": statistics.quantiles(samples, n=4),
                        "runs": len(samples),
                        "ratio": result.ratio(name),
                        "limit": result.benchmark.limits.get(name),
                        "verdict": result.verdict(name),
                    }
                    for name, samples in result.samples.items()
                },
            }
            for result in results
        ],
    }
