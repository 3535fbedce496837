"""The cost of a compiled program: operations, bytes and memory."""

import collections
from typing import Any

import jax

from shardmap.explaining.read.hlo.flops import flops_of
from shardmap.explaining.read.hlo.instructions import inside
from shardmap.explaining.read.hlo.loops import runs
from shardmap.explaining.read.hlo.module import Computation, Instruction, Module
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.report import Cost

MOST_LINES = 5


def cost_of(
    compiled: jax.stages.Compiled | None, module: Module, peak: int | None
) -> Cost:
    """The cost of a call on one device, of which all is known if it is compiled."""
    flops = flops_of(module.entry)
    if compiled is None:
        return Cost(flops=flops, peak_bytes=peak)
    accessed = (compiled.cost_analysis() or {}).get("bytes accessed", -1)
    sizes = compiled.memory_analysis()
    argument, output, temporary, donated = _sizes(sizes)
    host_argument, host_output, host_temporary, host_donated = _sizes(sizes, "host_")
    peak = peak or getattr(sizes, "total_allocation_bytes", None)
    if argument is not None:
        before = argument + output - donated
        # What the compilers call temporary may lack values, or have some twice.
        temporary = temporary if peak is None else max(0, peak - before)
        peak = before + temporary
    host = None
    if host_argument is not None:
        host = host_argument + host_output + host_temporary - host_donated
    return Cost(
        flops=flops,
        bytes_accessed=accessed if accessed >= 0 else None,  # -1 stands for unknown.
        peak_bytes=peak,
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary,
        donated_bytes=donated,
        host_bytes=host or None,
    )


def _sizes(sizes: Any, where: str = "") -> list[Any]:
    """Bytes of arguments, results, temporary values and donated ones."""
    parts = ("argument", "output", "temp", "alias")
    return [getattr(sizes, f"{where}{each}_size_in_bytes", None) for each in parts]


def busiest_lines(module: Module, sources: Sources) -> tuple[tuple[str, float], ...]:
    """The lines with most of the cycles that the compiler estimates; their shares.

    XLA for TPU has estimates of most instructions, but not of collectives, gathers of
    rows and library calls.
    """
    cycles: collections.Counter[str | None] = collections.Counter()
    for each, count in runs(module.entry):
        window = each.config.get("window_config") or {}
        if estimate := int(window.get("estimated_cycles", 0)):
            cycles[sources.of(each)] += estimate * (count or 1)
    total = cycles.total()
    most = cycles.most_common(MOST_LINES)
    return tuple((line, n / total) for line, n in most if line is not None)


def loops_of(module: Module) -> list[Instruction]:
    """The loops of a program. XLA counts the bytes of each body once."""
    return [each for each in module.instructions if each.opcode == "while"]


def read_bytes(entry: Computation) -> int:
    """The bytes of arguments that a program reads at least.

    Of one that only indices or slices are taken from, such as an embedding, it reads
    these. A donated cache that is updated in place is read whole.
    """
    return sum(min(_read(each), each.shape.bytes) for each in entry.parameters)


def _read(value: Instruction) -> int:
    return sum(_read_by(user, value) for user in value.users)


def _read_by(user: Instruction, value: Instruction) -> int:
    if user.opcode in ("gather", "dynamic-slice") and user.operands[0] is value:
        return user.shape.bytes
    if user.opcode == "bitcast":
        return _read(user)
    if user.opcode == "fusion":
        return sum(map(_read, inside(user, value)))
    return value.shape.bytes
