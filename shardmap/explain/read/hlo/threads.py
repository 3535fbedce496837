"""How many threads the operations of a compiled program are for."""

import math
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from shardmap.explain.read.hlo.text import Instruction, Module

_PARTS = re.compile(r'"outer_dimension_partitions":\[((?:"\d+",?)+)\]')


class Threads(NamedTuple):
    """What XLA decided for a CPU.

    Attributes:
      most: into how many parts it cut an operation at most, each for a thread.
      cut: how many operations it cut.
      operations: of how many.
      by_library: how many are left to a library, which takes threads as it sees fit.
    """

    most: int
    cut: int
    operations: int
    by_library: int


_NO_WORK = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call".split()
)


def threads_of(module: Module) -> Threads:
    """The threads of what a call runs on a CPU."""
    done = list(_done(module, module.entry))
    parts = [
        math.prod(map(int, re.findall(r"\d+", found[1])))
        for each in done
        if (found := _PARTS.search(each.line))
    ]
    library = sum('"kind":"__' in each.line for each in done)
    return Threads(max(parts, default=1), len(parts), len(done), library)


def _done(module: Module, name: str) -> Iterator[Instruction]:
    """The operations of a computation, a fusion as one."""
    for each in module.computations.get(name, ()):
        if each.opcode not in _NO_WORK:
            yield each
        elif each.opcode in ("while", "conditional", "call"):
            for _, inner in each.called:
                yield from _done(module, inner)


def sentence(module: Module, platform: str) -> str:
    """How many threads there are, and who decides it."""
    if platform != "cpu":
        return _ON_A_CHIP
    threads = threads_of(module)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    text = (
        f"Threads on a device: XLA cut {threads.cut:,} of {threads.operations:,} "
        f"operations into up to {threads.most:,} parts, each for a thread, by their "
        f"size and for the {cores:,} cores of this machine"
        if threads.cut
        else "Threads on a device: one for each operation, as XLA found none large "
        "enough to cut"
    )
    if threads.by_library:
        text += (
            f"; its library for products and sums does {threads.by_library:,} and "
            "takes as many as it sees fit"
        )
    return f"{text}. All devices of this process share the cores."


_ON_A_CHIP = (
    "Threads on a device: every operation is a kernel over the whole chip. XLA decides "
    "how many threads it has when it makes the kernel, by the shapes; the text of the "
    "program does not say it."
)
