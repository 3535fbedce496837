"""The values alive where a compiled program holds most, and the lines they are of.

A value is alive from the instruction that makes it to the last that takes it, in the
order in which XLA runs them. XLA may let values share memory, which this does not know.
"""

from shardmap.explain.read.hlo.text import Instruction, Module
from shardmap.explain.report import Held

_NO_MEMORY = frozenset(
    "bitcast conditional constant get-tuple-element parameter tuple while call".split()
)
MOST = 5


def largest_at_peak(module: Module) -> tuple[Held, ...]:
    """The largest temporary values and results alive at the peak, the largest first."""
    alive = _peak(module, module.entry)
    alive.sort(key=lambda each: -each.bytes)
    return tuple(
        Held(
            _type(each),
            each.bytes,
            each.operation,
            module.source_of(each),
        )
        for each in alive[:MOST]
    )


def _type(each: Instruction) -> str:
    """Its arrays; the first ones, where there are many."""
    shapes = [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in each.shapes]
    if len(shapes) > MOST:
        shapes[MOST - 1 :] = [f"{len(shapes) - MOST + 1:,} more"]
    return ", ".join(shapes)


def _peak(module: Module, name: str) -> list[Instruction]:
    """What is alive where a computation, with those that it calls, holds most."""
    instructions = module.computations.get(name, [])
    last = _last_uses(instructions)
    alive: dict[str, Instruction] = {}
    best: list[Instruction] = []
    most = -1
    for k, each in enumerate(instructions):
        if each.opcode not in _NO_MEMORY:
            alive[each.name] = each
        inside: list[Instruction] = []
        if each.opcode in ("while", "conditional", "call"):
            peaks = [_peak(module, called) for how, called in each.called]
            inside = max(peaks, key=_total, default=[])
        held = [*alive.values(), *inside]
        if _total(held) > most:
            best, most = held, _total(held)
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
