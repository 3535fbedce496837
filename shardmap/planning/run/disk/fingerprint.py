"""Digests by which a checkpoint recognises a plan and its arguments.

The same plan has the same digest in every process: that of its function's StableHLO, of
its cuts, and of the rules by which it was cut.
"""

import hashlib
import importlib.metadata
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.primitives import PURE_CALLBACK, callback_of
from shardmap._jax.walk import equations
from shardmap._version import __version__
from shardmap.planning.engine.nodes import is_key
from shardmap.planning.lax.per_piece import text_of
from shardmap.planning.run.cut_program import CutProgram
from shardmap.source import source_of

COMPARED = 2**20
"""The most bytes of an argument whose values are all compared."""

SAMPLES, SAMPLE = 16, 2**10
"""The number of parts of a larger one that are compared, and their elements at most."""


def software() -> dict[str, str]:
    """What a plan is compiled with; others may compute other bytes."""
    return {
        "shardmap": __version__,
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": jax.default_backend(),
    }


def fingerprint(cut_program: CutProgram) -> str:
    """A digest of the shards of a plan."""
    closed, stages = cut_program.closed, cut_program.stages
    texts = []
    for equation in equations(closed):
        if equation.primitive is PURE_CALLBACK:
            texts.append(text_of(callback_of(equation.params)))
            if texts[-1] is None:
                raise ValueError(
                    f"checkpoint: {equation.primitive} at {source_of(equation)} calls "
                    "the host, and nothing tells whether that code is the same when "
                    "the run goes on: call a function that closes over nothing by "
                    "per_piece, or compute what it returns before, and pass it as an "
                    "argument"
                )
    with cut_program.settings():
        lowered = jax.jit(jex_core.jaxpr_as_fun(closed)).lower(*closed.in_avals)
    told = [
        (cut_program.x64, cut_program.partitionable, str(cut_program.out_tree), texts),
        list(map(str, cut_program.analysis.rules.values())),
        [[loop.pieces for loop in stage.loops] for stage in stages],
        [[(r.value.number, r.axes) for r in stage.results] for stage in stages],
    ]
    return _sum(lowered.as_text().encode(), repr(told).encode())


def fingerprints(leaves: Sequence[Any]) -> list[str]:
    """The digest of each argument."""
    return list(map(_of_argument, leaves))


def _of_argument(leaf: Any) -> str:
    """That of its type and bytes; if it is large, of some parts, and when written."""
    if isinstance(leaf, jax.Array) and is_key(leaf.aval):
        leaf = jax.random.key_data(leaf)
    array: Any = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    shape, dtype = tuple(map(int, array.shape)), np.dtype(array.dtype)
    lengths, places = shape, [0.0]
    if math.prod(shape) * dtype.itemsize > COMPARED:
        # Along the diagonal, so that they are from everywhere.
        longest = int(SAMPLE ** (1 / len(shape)))
        lengths = tuple(min(n, longest) for n in shape)
        places = np.linspace(0, 1, SAMPLES).tolist()
    contents = [repr((shape, dtype.str, dtype.name)).encode()]
    for place in places:
        starts = [int(place * (n - m)) for n, m in zip(shape, lengths, strict=True)]
        index = tuple(slice(k, k + m) for k, m in zip(starts, lengths, strict=True))
        contents.append(np.asarray(array[index] if shape else array).tobytes())
    while isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap):
        leaf = leaf.base
    if isinstance(leaf, np.memmap) and leaf.filename is not None:
        status = os.stat(leaf.filename)
        contents.append(f"{status.st_size} bytes of {status.st_mtime_ns}".encode())
    return _sum(*contents)


def _sum(*contents: bytes) -> str:
    return hashlib.sha256(b" ".join(contents)).hexdigest()
