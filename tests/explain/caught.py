"""The maps that a program calls, caught while it runs; `python -m` runs an example.

python -m tests.explain.caught heat --size 128 --steps 2
"""

import collections
import contextlib
import importlib
import sys
from unittest import mock

import jax
import numpy as np

import shardmap as sm
from shardmap.api.function import Mapped
from tests.explain.hlo_text import moved


@contextlib.contextmanager
def catching():
    """Gives a list, which all maps that are called with arrays come into, once each."""
    caught, seen = [], set()
    call = Mapped.__call__

    def called(self, *args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        # What is called under a mesh that is set cannot be asked later, without it.
        if not traced and jax.sharding.get_abstract_mesh().empty:
            shapes = tuple((np.shape(leaf), type(leaf)) for leaf in leaves)
            if (key := (id(self), tree, shapes)) not in seen:
                seen.add(key)
                # A call may take its arguments away.
                caught.append((self, *jax.tree.map(as_shape, (args, kwargs))))
        return call(self, *args, **kwargs)

    with mock.patch.object(Mapped, "__call__", called):
        yield caught


def as_shape(leaf):
    if isinstance(leaf, jax.Array) and leaf.committed:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


class Found(collections.Counter):
    """How many programs and collectives were looked at, and what was wrong."""

    def __init__(self):
        super().__init__()
        self.lies = []

    def look_at(self, fun, args, kwargs):
        """Compares what is said of a map with the text of its compiled program."""
        try:
            text = fun.lower(*args, **kwargs).compile().as_text()
        except (TypeError, ValueError):
            self["refused"] += 1  # As the call that was caught.
            return
        report = sm.explain(fun)(*args, **kwargs)
        said, there = collections.Counter(), collections.Counter()
        for each in report.collectives:
            made = "compiler" if each.added_by_partitioner else "user"
            self[made] += 1
            self[f"{made}, located"] += each.source is not None
            if each.in_compiled:
                # The other reading counts what XLA does not know once as well.
                said[each.kind, each.bytes_in, each.bytes_out] += each.count or 1
        for each, times in moved(text).items():
            there[each.kind, each.bytes_in, each.bytes_out] += times
        self["programs"] += 1
        if said != there:
            self.lies.append(f"{report.name}: said {said}, there {there}")


def looked_at(caught):
    found = Found()
    for each in caught:
        found.look_at(*each)
    return found


if __name__ == "__main__":
    program = importlib.import_module(f"examples.{sys.argv[1]}")
    with catching() as calls:
        program.main(sys.argv[2:])
    result = looked_at(calls)
    print(dict(result))
    print("lies:", result.lies)
