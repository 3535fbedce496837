"""Digests by which a checkpoint recognises a plan and its arguments.

A digest is the same in every process: it has no addresses and no order of a set in it.
Functions that shards call back count by their code and what they close over.
"""

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap.plan.engine.emitting.equal import description
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Scalar
from shardmap.plan.run.cut_program import CutProgram

COMPARED = 2**20
"""Up to how many bytes the values of an argument are compared."""

CALLED = "callback"
"""The parameter of an equation that is a function which shards call."""


def fingerprint(cut_program: CutProgram) -> str:
    """A digest of the shards of a plan."""
    graph = cut_program.graph
    digest = Digest()
    for stage in cut_program.stages:
        digest.add([loop.pieces for loop in stage.loops])
        digest.add([(result.axes, result.combiner) for result in stage.results])
    digest.add([str(value.aval) for value in graph.inputs])
    for value, constant in graph.constants.items():
        digest.add((value.number, constant))
    for node in graph.nodes:
        operands = [v.value if isinstance(v, Scalar) else v.number for v in node.ins]
        digest.add((node.name, operands))
        digest.add(node.params)
    return digest.text()


def fingerprints(leaves: Sequence[Any]) -> list[str | None]:
    """One for each argument that is small enough to be compared."""
    found: list[str | None] = []
    for leaf in leaves:
        if isinstance(leaf, bool | int | float | complex):
            leaf = np.asarray(leaf)
        small = isinstance(leaf, np.ndarray | np.generic | jax.Array)
        if not small or leaf.size * leaf.dtype.itemsize > COMPARED:
            found.append(None)
            continue
        digest = Digest()
        digest.add(leaf)
        found.append(digest.text())
    return found


class Digest:
    """A digest of values of Python, JAX and NumPy.

    Args:
      inside: the ids of what it is a part of, where something may hold itself.
    """

    def __init__(self, inside: set[int] | None = None) -> None:
        self._hash = hashlib.sha256()
        self._inside: set[int] = set() if inside is None else inside

    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, thing: Any, called: bool = False) -> None:
        """Adds a value.

        Args:
          thing: the value.
          called: whether it is, or is held by, a function that shards call.
        """
        if id(thing) in self._inside:
            return
        self._inside.add(id(thing))
        try:
            self._add(thing, functools.partial(self.add, called=called), called)
        finally:
            self._inside.discard(id(thing))

    def _say(self, *words: object) -> None:
        # Functions among the parameters print their addresses, which differ.
        text = re.sub(r"0x[0-9a-f]+", "", repr(words))
        self._hash.update(text.encode())

    def _add(self, thing: Any, add: Callable[[Any], None], called: bool) -> None:
        kind = type(thing).__qualname__
        if isinstance(thing, jex_core.Jaxpr | jex_core.ClosedJaxpr):
            self._say(description(thing, self._part))
        elif isinstance(thing, jax.Array) or hasattr(thing, "__array__"):
            self._array(thing)
        elif isinstance(thing, tuple | list):
            self._say(kind, len(thing))
            for each in thing:
                add(each)
        elif isinstance(thing, Mapping):
            self._say(kind, len(thing))
            for key in sorted(thing, key=repr):
                add(key)
                self.add(thing[key], called or key == CALLED)
        elif isinstance(thing, set | frozenset):
            self._say(kind, sorted(map(repr, thing)))
        elif isinstance(thing, types.CodeType):
            self._say(kind, thing.co_code, thing.co_names)
            add(thing.co_consts)
        elif isinstance(thing, types.FunctionType):
            self._function(thing, add, called)
        elif isinstance(thing, types.MethodType):
            add((thing.__func__, thing.__self__))
        elif isinstance(thing, functools.partial):
            add((thing.func, thing.args, thing.keywords))
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            self._say(kind)
            for field in dataclasses.fields(thing):
                add(getattr(thing, field.name, None))
        elif called and not isinstance(thing, type | types.ModuleType):
            self._say(kind, thing if not hasattr(thing, "__dict__") else None)
            add(vars(type(thing)).get("__call__"))
            add(getattr(thing, "__dict__", None))
        else:
            self._say(kind, thing)

    def _part(self, thing: Any) -> str:
        digest = Digest(self._inside)
        digest.add(thing)
        return digest.text()

    def _array(self, array: Any) -> None:
        if isinstance(array, jax.Array) and is_key(array.aval):
            self._say(array.dtype)
            array = jax.random.key_data(array)
        array = np.asarray(array)
        self._say(array.dtype, array.shape)
        self._hash.update(np.ascontiguousarray(array).tobytes())

    def _function(
        self, function: types.FunctionType, add: Callable[[Any], None], called: bool
    ) -> None:
        self._say(function.__module__, function.__qualname__)
        add(function.__code__)
        if not called:
            return
        add((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                add(cell.cell_contents)
            except ValueError:  # Not set yet.
                self._say("empty")
        for name in function.__code__.co_names:
            held = function.__globals__.get(name)
            own = getattr(held, "__module__", None) == function.__module__
            if own or isinstance(held, np.ndarray | jax.Array | int | float | str):
                add(held)
