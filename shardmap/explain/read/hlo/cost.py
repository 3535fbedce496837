"""What a compiled program costs: operations, bytes, and the memory that it holds."""

from typing import Any

import jax

from shardmap.explain.read.hlo.sources import Sources
from shardmap.explain.read.hlo.text import Instruction, Module
from shardmap.explain.report import Cost, Held

_NO_MEMORY = frozenset(
    "bitcast call conditional constant get-tuple-element parameter tuple while".split()
)
MOST_HELD = 5


def cost_of(compiled: jax.stages.Compiled) -> Cost:
    """The compiler's numbers."""
    analysis = compiled.cost_analysis() or {}
    keys = ("flops", "transcendentals", "bytes accessed")
    # The compiler says -1 where it does not know.
    numbers = [n if (n := analysis.get(key, -1)) >= 0 else None for key in keys]
    memory = compiled.memory_analysis()
    sizes: list[Any] = [
        getattr(memory, f"{part}_size_in_bytes", None)
        for part in ("argument", "output", "temp", "alias")
    ]
    argument, output, temporary, alias = sizes
    return Cost(
        flops=numbers[0],
        transcendentals=numbers[1],
        bytes_accessed=numbers[2],
        # Temporary values are one block, which is there as long as the call runs.
        peak_bytes=None if None in sizes else argument + output + temporary - alias,
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary,
        donated_bytes=alias,
    )


def has_loops(module: Module) -> bool:
    """Whether the program has a loop, the body of which XLA counts once."""
    return any(each.opcode == "while" for each in module.by_name.values())


def largest_at_peak(module: Module, sources: Sources) -> tuple[Held, ...]:
    """The largest values alive where a device holds most, but arguments.

    A value is alive from the instruction that makes it to the last that takes it, in
    the order in which XLA runs them. XLA may let values share memory, which is not
    visible here.
    """
    alive = _peak(module, module.entry)
    alive.sort(key=lambda each: -each.bytes)
    return tuple(
        Held(_type(each), each.bytes, each.operation, sources.of(each))
        for each in alive[:MOST_HELD]
    )


def _type(each: Instruction) -> str:
    """The types of its arrays, the first few."""
    shapes = [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in each.shapes]
    if len(shapes) > MOST_HELD:
        shapes[MOST_HELD - 1 :] = [f"{len(shapes) - MOST_HELD + 1:,} more"]
    return ", ".join(shapes)


def _peak(module: Module, name: str) -> list[Instruction]:
    """The values alive at the peak of a computation and those it calls."""
    instructions = module.computations.get(name, [])
    last = _last_uses(instructions)
    alive: dict[str, Instruction] = {}
    best: list[Instruction] = []
    for k, each in enumerate(instructions):
        if each.opcode not in _NO_MEMORY:
            alive[each.name] = each
        inside: list[Instruction] = []
        if each.opcode in ("while", "conditional", "call"):
            peaks = [_peak(module, called) for how, called in each.called]
            inside = max(peaks, key=_total, default=[])
        best = max(best, [*alive.values(), *inside], key=_total)
        for done in [name for name in alive if last.get(name, k) <= k]:
            del alive[done]
    return best


def _last_uses(instructions: list[Instruction]) -> dict[str, int]:
    """The last instruction that needs each; tuples and views pass it on."""
    last: dict[str, int] = {}
    for k in reversed(range(len(instructions))):
        each = instructions[k]
        end = len(instructions) if each.is_root else k
        if each.opcode in _NO_MEMORY:
            end = max(end, last.get(each.name, k))
        for name in each.operands:
            last[name] = max(last.get(name, 0), end)
        if each.is_root:
            last[each.name] = len(instructions)
    return last


def _total(held: list[Instruction]) -> int:
    return sum(each.bytes for each in held)


def library_bytes(module: Module) -> int:
    """The most bytes that XLA's library on CPU holds of values inside one fusion.

    The buffers that XLA assigns leave them out. The library may hold each of them, or
    compute them in parts.
    """
    no_values = ("bitcast", "broadcast", "constant", "parameter")
    held = [
        sum(
            part.bytes
            for part in module.parts_of(each)
            if part.opcode not in no_values and not part.is_root
        )
        for each in module.by_name.values()
        if each.opcode == "fusion" and "__ynn_fusion" in each.line
    ]
    return max(held, default=0)
