"""How many threads the operations of a compiled program are for."""

import math
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from shardmap.explain.read.hlo.text import Instruction, Module

_PARTS = re.compile(r'"outer_dimension_partitions":\[((?:"\d+",?)+)\]')

_WARPS = re.compile(r'"num_warps":"?(\d+)')
_TILE = re.compile(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]')
_GEMM = re.compile(
    r'"block_m":"?(?P<m>\d+)"?,"block_n":"?(?P<n>\d+)"?,.*?"split_k":"?(?P<split>\d+)'
)
_LIBRARY = re.compile(r'custom_call_target="(?:__)?cu(?:blas|dnn|solver|sparse|fft)')


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
    if platform in ("gpu", "cuda", "rocm"):
        return _of_kernels(kernels_of(module))
    if platform != "cpu":
        return (
            f"Threads on a device: every operation is over the whole chip. {_UNSAID}."
        )
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


class Kernels(NamedTuple):
    """What a program for a GPU says of its kernels.

    Attributes:
      blocks, warps: of the tiled one with most blocks; 0 without any.
      tiled: how many kernels XLA tiled, which says how they are launched.
      operations: of how many.
      by_library: how many are left to a library, such as cuBLAS.
    """

    blocks: int
    warps: int
    tiled: int
    operations: int
    by_library: int


def kernels_of(module: Module) -> Kernels:
    """The kernels of what a call runs on a GPU."""
    done = list(_done(module, module.entry))
    launches = [found for each in done if (found := _launch(each)) is not None]
    library = sum(bool(_LIBRARY.search(each.line)) for each in done)
    blocks, warps = max(launches, default=(0, 0))
    return Kernels(blocks, warps, len(launches), len(done), library)


def _launch(each: Instruction) -> tuple[int, int] | None:
    """The blocks of a tiled kernel, and the warps of a block; None: it does not say."""
    warps = _WARPS.search(each.line)
    if warps is None or not each.shapes:
        return None
    _, shape = each.shapes[0]
    sizes, split = _TILE.search(each.line), 1
    if sizes is not None:
        tile = [int(size) for size in re.findall(r"\d+", sizes[1])]
    elif (gemm := _GEMM.search(each.line)) is not None:
        tile = [1] * (len(shape) - 2) + [int(gemm["m"]), int(gemm["n"])]
        split = int(gemm["split"])
    else:
        return None
    if len(tile) != len(shape):
        return None
    parts = (-(-size // part) for size, part in zip(shape, tile, strict=True))
    return math.prod(parts) * split, int(warps[1])


def _of_kernels(kernels: Kernels) -> str:
    text = "Threads on a device: every operation is a kernel over the whole chip."
    if kernels.tiled:
        text += (
            f" XLA tiled {kernels.tiled:,} of {kernels.operations:,}, the largest into "
            f"{kernels.blocks:,} blocks of {kernels.warps:,} warps (a warp is 32 "
            "threads on NVIDIA)."
        )
    if kernels.by_library:
        text += (
            f" A library, such as cuBLAS or cuDNN, does {kernels.by_library:,} and "
            "decides for itself."
        )
    rest = kernels.operations - kernels.tiled - kernels.by_library
    return f"{text} Of the others: {_UNSAID}." if rest > 0 else text


_UNSAID = (
    "XLA decides how many threads there are when it makes the kernel, by the shapes; "
    "the text of the program does not say it"
)
