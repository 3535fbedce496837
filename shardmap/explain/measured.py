"""What a call really takes, next to what was predicted of it."""

import ctypes
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardmap._jax.types import PyTree
from shardmap.explain.report import Report
from shardmap.units import duration, size

_STATUS = pathlib.Path("/proc/self/status")
_RESET = pathlib.Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Number:
    """One number, measured and predicted.

    Attributes:
      name: what it is of.
      measured, predicted: in seconds or bytes; None where it is not known.
      unit: "s" or "B".
      note: what to keep in mind when the two are compared.
    """

    name: str
    measured: float | None
    predicted: float | None
    unit: str
    note: str

    @property
    def ratio(self) -> float | None:
        """Measured by predicted."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted

    def texts(self) -> tuple[str, str, str]:
        """What was measured, what was predicted, and how they compare."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} x"
        return self._text(self.measured), self._text(self.predicted), ratio

    def _text(self, value: float | None) -> str:
        if value is None:
            return "unknown"
        return duration(value) if self.unit == "s" else size(round(value))


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """What some calls took. Printed, it is a table.

    Attributes:
      name: the function's.
      seconds: of each call, the first left out, which compiles.
      numbers: time, peak and bytes, measured and predicted.
    """

    name: str
    seconds: tuple[float, ...]
    numbers: tuple[Number, ...]

    def __repr__(self) -> str:
        took = duration(statistics.median(self.seconds))
        return f"<Measurement of {self.name}: {took} a call>"

    def __str__(self) -> str:
        rows = [("", "measured", "predicted", "")]
        rows += [(each.name, *each.texts()) for each in self.numbers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.name}, {len(self.seconds)} calls"]
        for row, each in zip(rows, (None, *self.numbers), strict=True):
            cells = [f"{row[0]:<{widths[0]}}"]
            cells += [f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(["", *cells]).rstrip())
            if each is not None and each.note:
                lines.append(f"      {each.note}")
        return "\n".join(lines)


def measure(
    fun: Callable[..., Any],
    donates: bool,
    report: Report,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    repeats: int,
) -> Measurement:
    """Runs a function some times, and compares.

    Args:
      fun: the function.
      donates: whether a call takes its arguments away.
      report: what was predicted.
      args, kwargs: what it is called with; they are left as they are.
      repeats: how often it is called, after a first time.
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

    def call() -> tuple[float, PyTree]:
        given = jax.tree.map(_copy, (args, kwargs)) if donates else (args, kwargs)
        jax.block_until_ready(given)
        start = time.perf_counter()
        result = jax.block_until_ready(run(*given[0], **given[1]))
        return time.perf_counter() - start, result

    _, result = call()
    held_in, held_out = _held((args, kwargs)), _held(result)
    devices = _devices((args, kwargs, result))
    del result
    _give_back()
    before = _memory(devices)
    _reset_peak()
    seconds = tuple(call()[0] for _ in range(repeats))
    return Measurement(
        report.name,
        seconds,
        _numbers(report, seconds, _grown(devices, before), held_in, held_out),
    )


def _numbers(
    report: Report,
    seconds: Sequence[float],
    grown: int | None,
    held_in: int | None,
    held_out: int | None,
) -> tuple[Number, ...]:
    cost = report.cost
    ins, outs, temporary = (
        (None, None, None)
        if cost is None
        else (cost.argument_bytes, cost.output_bytes, cost.temporary_bytes)
    )
    new = None
    if outs is not None and temporary is not None:
        # All devices of a CPU are in one process.
        new = (temporary + outs) * (
            report.num_devices if report.device_kind == "cpu" else 1
        )
    return (
        Number(
            "time of a call",
            statistics.median(seconds),
            report.seconds,
            "s",
            "predicted are only the collectives, on the interconnect that was named"
            if report.interconnect is not None
            else "explain(fun, interconnect=...) predicts the time of collectives",
        ),
        Number(
            "memory that it grew by",
            grown,
            new,
            "B",
            "of the whole process, which uses memory again that it has"
            if report.device_kind == "cpu"
            else "of one device, above what it held before",
        ),
        Number("arguments on a device", held_in, ins, "B", ""),
        Number("results on a device", held_out, outs, "B", ""),
    )


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _held(tree: PyTree) -> int | None:
    """The bytes on the device that has most of some arrays; None: they are not on any.

    What lies in NumPy is laid out by the call, and cannot be looked at.
    """
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array):
            return None
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def _devices(tree: PyTree) -> list[Any]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return list({device for array in arrays for device in array.devices()})


def _memory(devices: Sequence[Any]) -> dict[Any, int | None]:
    """The bytes in use on each device; on a CPU, of the process."""
    return {
        device: _of_process("VmRSS")
        if device.platform == "cpu"
        else (device.memory_stats() or {}).get("bytes_in_use")
        for device in devices
    }


def _give_back() -> None:
    """Gives the system what the process does not use, where its allocator can.

    What a call takes is then seen, and not taken from what an earlier one left.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _reset_peak() -> None:
    """Forgets the most memory that the process had, where the system can."""
    try:
        _RESET.write_text("5")
    except OSError:
        return


def _grown(devices: Sequence[Any], before: dict[Any, int | None]) -> int | None:
    found = []
    for device in devices:
        held = before[device]
        if device.platform == "cpu":
            most = _of_process("VmHWM")
        else:
            most = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if held is not None and most is not None:
            found.append(max(0, most - held))
    return max(found, default=None)


def _of_process(name: str) -> int | None:
    """A number of Linux's on this process, in bytes."""
    if not _STATUS.exists():
        return None
    lines = dict(
        line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line
    )
    return int(lines[name].split()[0]) * 1024 if name in lines else None
