"""Digests by which a checkpoint recognises a plan and its arguments.

A digest is the same in every process: it has no addresses and no order of a set in it.
An equation counts by its name, its parameters and its rule; one of a primitive that is
not JAX's also by what it is lowered to.
"""

import hashlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.primitives import PURE_CALLBACK
from shardmap._jax.types import Aval
from shardmap._jax.walk import equations, jaxprs_in
from shardmap._version import __version__
from shardmap.planning.engine.jaxpr_key import description
from shardmap.planning.engine.keys import is_key
from shardmap.planning.engine.nodes import Node, Scalar
from shardmap.planning.lax.table import BUILT_IN
from shardmap.planning.run.cut_program import CutProgram

COMPARED = 2**20
"""The most bytes of an argument whose values are all compared."""

SAMPLES, SAMPLE = 16, 2**10
"""The number of parts of a larger one that are compared, and their elements."""


def software() -> dict[str, str]:
    """What a plan is compiled with; others may compute other bytes."""
    return {
        "shardmap": __version__,
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": jax.default_backend(),
    }


def fingerprint(cut_program: CutProgram) -> str:
    """A digest of the shards of a plan.

    Raises:
      ValueError: it calls the host, whose code no digest tells.
    """
    graph = cut_program.graph
    digest = Digest()
    for stage in cut_program.stages:
        digest.add([loop.pieces for loop in stage.loops])
        digest.add([(r.value.number, r.axes, str(r.combiner)) for r in stage.results])
    digest.add((cut_program.x64, cut_program.partitionable))
    digest.add([str(value.aval) for value in graph.inputs])
    digest.add([v.value if isinstance(v, Scalar) else v.number for v in graph.outputs])
    digest.add(str(cut_program.out_tree))
    for value, constant in graph.constants.items():
        digest.add((value.number, constant))
    for node in graph.nodes:
        operands = [v.value if isinstance(v, Scalar) else v.number for v in node.ins]
        digest.add((node.name, operands, str(cut_program.analysis.rules[node.number])))
        digest.add(node.params)
        for primitive, params, avals in _bound(node):
            if primitive is PURE_CALLBACK:
                raise ValueError(
                    f"checkpoint: {primitive} at {node.source} calls the host, and "
                    "nothing tells whether that code is the same when the run goes "
                    "on: compute what it returns before, and pass it as an argument"
                )
            if primitive not in BUILT_IN:
                digest.add(_lowered(primitive, params, avals))
    return digest.text()


def _bound(node: Node) -> Iterator[tuple[Any, Mapping[str, Any], list[Aval]]]:
    """The primitives that a node binds, with their parameters and operands' avals."""
    yield node.primitive, node.params, [x.aval for x in node.ins]
    for jaxpr in jaxprs_in(node.params):
        for equation in equations(jaxpr):
            avals: Any = [atom.aval for atom in equation.invars]
            yield equation.primitive, equation.params, avals


def _lowered(primitive: Any, params: Mapping[str, Any], avals: Sequence[Aval]) -> str:
    """What one equation is lowered to, as text."""

    def function(*values: jax.Array) -> Any:
        return primitive.bind(*values, **primitive.get_bind_params(dict(params)))

    return jax.jit(function).lower(*avals).as_text()


def fingerprints(leaves: Sequence[Any]) -> list[list[str | None]]:
    """The digest of each argument, and of the file that it is mapped from.

    Of large arguments, evenly spaced samples count; of a file its size and when it was
    written.
    """
    return [[_digest([*_samples(leaf)]), _file(leaf)] for leaf in leaves]


def _samples(leaf: Any) -> Iterator[Any]:
    array: Any = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    # An array-like may name its dtype; keys have one that NumPy does not know.
    is_jax = isinstance(array, jax.Array)
    dtype = array.dtype if is_jax else np.dtype(array.dtype)
    shape = tuple(map(int, array.shape))
    size = math.prod(shape)
    if size * dtype.itemsize <= COMPARED:
        yield _read(array, [slice(0, n) for n in shape])
        return
    yield shape, str(dtype)
    if is_jax:
        array = np.asarray(jax.random.key_data(array) if is_key(array.aval) else array)
    lengths = [1] * len(shape)
    left = SAMPLE
    for axis in reversed(range(len(shape))):
        lengths[axis] = min(shape[axis], left)
        left //= lengths[axis]
    for place in np.linspace(0, size - 1, SAMPLES).astype(np.int64):
        index = np.unravel_index(int(place), shape)
        starts = [
            min(int(k), n - m) for k, n, m in zip(index, shape, lengths, strict=True)
        ]
        yield _read(
            array, [slice(k, k + m) for k, m in zip(starts, lengths, strict=True)]
        )


def _read(array: Any, index: Sequence[slice]) -> Any:
    """A part of an array, of a dataset or of another array-like."""
    if isinstance(array, np.generic):
        return array
    part = array[tuple(index)]
    return part if isinstance(part, jax.Array) else np.asarray(part)


def _file(leaf: Any) -> str | None:
    """The size and the time of the file that an array is mapped from, if it is."""
    while leaf is not None and not isinstance(leaf, np.memmap):
        leaf = leaf.base if isinstance(leaf, np.ndarray) else None
    if leaf is None or leaf.filename is None:
        return None
    status = os.stat(leaf.filename)
    return f"{status.st_size} bytes of {status.st_mtime_ns}"


class Digest:
    """A digest of values of Python, JAX and NumPy."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, thing: Any) -> None:
        kind = type(thing).__qualname__
        if isinstance(thing, jex_core.Jaxpr | jex_core.ClosedJaxpr):
            self._say(description(thing, _digest))
        elif isinstance(thing, jax.Array) and is_key(thing.aval):
            self._say(thing.dtype)
            self.add(jax.random.key_data(thing))
        elif hasattr(thing, "__array__"):
            array = np.asarray(thing)
            self._say(array.dtype.str, array.dtype.name, array.shape)
            self._hash.update(np.ascontiguousarray(array).tobytes())
        elif isinstance(thing, tuple | list):
            self._say(kind, len(thing))
            for each in thing:
                self.add(each)
        elif isinstance(thing, Mapping):
            self._say(kind, len(thing))
            for key in sorted(thing, key=repr):
                self.add(key)
                self.add(thing[key])
        elif isinstance(thing, set | frozenset):
            self._say(kind, sorted(map(repr, thing)))
        else:
            self._say(kind, thing)

    def _say(self, *words: object) -> None:
        # Functions print their addresses, which differ.
        text = re.sub(r"0x[0-9a-fA-F]+", "", repr(words))
        self._hash.update(text.encode())


def _digest(thing: Any) -> str:
    digest = Digest()
    digest.add(thing)
    return digest.text()
