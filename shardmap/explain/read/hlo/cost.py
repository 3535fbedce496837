"""The cost of a compiled program: operations, bytes and memory."""

import math
import re
from typing import Any

import jax

from shardmap.explain.read.hlo.sources import Sources
from shardmap.explain.read.hlo.text import Instruction, Module
from shardmap.explain.report import Cost, Held

_NO_MEMORY = frozenset(
    "bitcast call conditional constant get-tuple-element parameter tuple while".split()
)
# For a dot, and for a call of cuBLAS, whose configuration has the same text.
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_SPREAD = re.compile(r"lhs_dilate=([\dx]+)")
MOST_HELD = 5


def cost_of(compiled: jax.stages.Compiled, module: Module) -> Cost:
    """The compiler's numbers, with the products in every step of a loop.

    Args:
      compiled: the program.
      module: its text.
    """
    analysis = compiled.cost_analysis() or {}
    keys = ("flops", "transcendentals", "bytes accessed")
    # The compiler gives -1 for unknown.
    numbers = [n if (n := analysis.get(key, -1)) >= 0 else None for key in keys]
    memory = compiled.memory_analysis()
    sizes: list[Any] = [
        getattr(memory, f"{part}_size_in_bytes", None)
        for part in ("argument", "output", "temp", "alias")
    ]
    argument, output, temporary, alias = sizes
    later = _products(module, module.entry) - _products(module, module.entry, once=True)
    return Cost(
        flops=None if numbers[0] is None else numbers[0] + later,
        transcendentals=numbers[1],
        bytes_accessed=numbers[2],
        # Temporary values are one block, which is allocated during the whole call.
        peak_bytes=None if None in sizes else argument + output + temporary - alias,
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary,
        donated_bytes=alias,
        later_flops=later,
    )


def loops_of(module: Module) -> list[Instruction]:
    """The loops of a program. XLA counts each body once."""
    return [each for each in module.by_name.values() if each.opcode == "while"]


def _products(module: Module, name: str, once: bool = False) -> int:
    """The flops of products and convolutions in a computation and those it calls.

    Args:
      module: the program.
      name: the name of the computation.
      once: whether to count one step of each loop instead of all known steps.
    """
    total = 0
    for each in module.computations.get(name, ()):
        inside = [_products(module, called, once) for _, called in each.called]
        together = max if each.opcode == "conditional" else sum
        steps = 1 if once else each.trips or 1
        total += flops_of_product(each, module) + steps * together(inside or [0])
    return total


def flops_of_product(each: Instruction, module: Module) -> int:
    """Two flops per multiplication, also with padding; 0 for other operations."""
    contracted = _CONTRACTED.search(each.line)
    labels = _KERNEL_LABELS.search(each.line) if each.opcode == "convolution" else None
    if not contracted and not labels:
        return 0
    left, right = [operand.shapes[0][1] for operand in module.operands_of(each)[:2]]
    depth = 1
    if contracted:
        dims = contracted[1].replace('"', "").split(",")
        depth = math.prod(left[int(dim)] for dim in dims if dim)
    elif labels:
        spread = _SPREAD.search(each.line)
        zeros = math.prod(map(int, spread[1].split("x"))) if spread else 1
        depth = math.prod(right) // right[labels[1].index("o")] // zeros
    return 2 * depth * math.prod(each.shapes[0][1])


def largest_at_peak(module: Module, sources: Sources) -> tuple[Held, ...]:
    """The largest values, except arguments, at the peak of memory.

    A value is live from the instruction that makes it to the last that uses it, in
    XLA's order. XLA may let values share memory, which is not visible here.
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
    """The values live at the peak of a computation and those it calls."""
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
    """The last instruction that needs each value, also through tuples and views."""
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
    """An upper bound on the memory of XLA's CPU library inside one fusion.

    XLA's buffers do not include the values inside. The library may hold each of them,
    or compute them in parts.
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
