"""Digests by which a checkpoint recognises a plan and its arguments.

A digest is the same in every process: it has no addresses and no order of a set in it.
Functions that shards call back count by their code, what they close over, and the
functions, numbers, arrays and containers of their module that they or functions inside
them use. Objects count by what they hold and by the methods of their class.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap.plan.engine.jaxpr_key import description
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Scalar
from shardmap.plan.run.cut_program import CutProgram

COMPARED = 2**20
"""The most bytes of an argument whose values are compared."""

CALLED = "callback"
"""The parameter of an equation that is a function which shards call."""

VALUES = np.ndarray, np.generic, jax.Array, int, float, complex, str, tuple, list, dict
"""The types of variables of a module that count where a function uses them."""


def fingerprint(cut_program: CutProgram) -> str:
    """A digest of the shards of a plan."""
    graph = cut_program.graph
    digest = Digest()
    for stage in cut_program.stages:
        digest.add([loop.pieces for loop in stage.loops])
        digest.add([(r.value.number, r.axes, r.combiner) for r in stage.results])
    digest.add((cut_program.x64, cut_program.partitionable))
    digest.add([str(value.aval) for value in graph.inputs])
    digest.add([v.value if isinstance(v, Scalar) else v.number for v in graph.outputs])
    digest.add(str(cut_program.out_tree))
    for value, constant in graph.constants.items():
        digest.add((value.number, constant))
    for node in graph.nodes:
        operands = [v.value if isinstance(v, Scalar) else v.number for v in node.ins]
        digest.add((node.name, operands))
        digest.add(node.params)
    return digest.text()


def fingerprints(leaves: Sequence[Any]) -> list[str | None]:
    """The digests of arguments, None for those that are not compared."""
    found = []
    for leaf in leaves:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        # An array-like may name its dtype; keys have one that NumPy does not know.
        is_jax = isinstance(array, jax.Array)
        dtype = array.dtype if is_jax else np.dtype(array.dtype)
        is_small = math.prod(array.shape) * dtype.itemsize <= COMPARED
        found.append(_digest(_read(array)) if is_small else None)
    return found


def _read(array: Any) -> Any:
    """All of an array, of a dataset or of another array-like."""
    if isinstance(array, np.ndarray | np.generic | jax.Array):
        return array
    return np.asarray(array[tuple(slice(0, size) for size in array.shape)])


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
                if key == CALLED:
                    self._add_called(thing[key], {})
        elif isinstance(thing, set | frozenset):
            self._say(kind, sorted(map(repr, thing)))
        else:
            self._say(kind, thing)

    def _say(self, *words: object) -> None:
        # Functions print their addresses, which differ.
        text = re.sub(r"0x[0-9a-fA-F]+", "", repr(words))
        self._hash.update(text.encode())

    def _add_called(self, thing: Any, seen: dict[int, Any]) -> None:
        """Adds a function that shards call: its code, and the values that it uses.

        Args:
          thing: the function, or a part of it.
          seen: the functions and objects that were added, by their ids.
        """
        parts: tuple[Any, ...] = ()
        if isinstance(thing, types.FunctionType):
            defaults = thing.__defaults__, thing.__kwdefaults__
            parts = thing.__code__, *defaults, *_variables(thing)
        elif isinstance(thing, types.CodeType):
            self._say(thing.co_code, thing.co_names)
            parts = thing.co_consts
        elif isinstance(thing, types.MethodType):
            parts = thing.__func__, thing.__self__
        elif isinstance(thing, functools.partial):
            parts = thing.func, *thing.args, *thing.keywords.values()
        elif isinstance(thing, tuple | list):
            parts = tuple(thing)
        elif isinstance(thing, Mapping):
            parts = *thing.keys(), *thing.values()
        elif isinstance(thing, type | types.ModuleType | np.ndarray | jax.Array):
            self.add(thing)
        elif dataclasses.is_dataclass(thing):
            values = (getattr(thing, f.name) for f in dataclasses.fields(thing))
            parts = *_methods(thing), *values
        elif hasattr(thing, "__dict__") or hasattr(thing, "__slots__"):
            parts = *_methods(thing), object.__getstate__(thing)
        else:
            self.add(thing)
        if parts and id(thing) in seen:
            self._say("again")
            return
        seen[id(thing)] = thing  # It stays alive, so that its id is its own.
        for part in parts:
            self._add_called(part, seen)


def _methods(thing: object) -> tuple[Any, ...]:
    """The type of an object, its methods, and its ``__call__``, perhaps a base's."""
    kind = type(thing)
    own = [f for f in vars(kind).values() if isinstance(f, types.FunctionType)]
    return kind, *own, inspect.getattr_static(thing, "__call__", None)


def _variables(function: types.FunctionType) -> Iterator[Any]:
    """The values of outer variables of a function, and those of its module."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # Not set yet.
            yield cell.cell_contents
    for name in _names(function.__code__):
        held = function.__globals__.get(name)
        own = getattr(held, "__module__", None) == function.__module__
        if own or isinstance(held, VALUES):
            yield held


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function uses, also in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _digest(thing: Any) -> str:
    digest = Digest()
    digest.add(thing)
    return digest.text()
