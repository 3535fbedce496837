"""The programs that are called or explained, caught while other code runs.

Of an example, and of tests, of each function the first:

    python -m tests.explain.caught heat --size 128 --steps 2
    python -m pytest -p tests.explain.caught tests/map/rules
"""

import collections
import contextlib
import importlib
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.api.function import Mapped
from shardmap.explain import api
from tests.explain.hlo_text import moved


@contextlib.contextmanager
def catching():
    """Gives a list, which these come into, once each.

    They are the maps that are called with arrays, and what is explained.
    """
    caught, seen = [], set()
    call, explain = Mapped.__call__, api._explain

    def catch(fun, args, kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        # What is called under a mesh that is set cannot be asked later, without it.
        if not traced and jax.sharding.get_abstract_mesh().empty:
            shapes = tuple((np.shape(leaf), type(leaf)) for leaf in leaves)
            if (key := (id(fun), tree, shapes)) not in seen:
                seen.add(key)
                # A call may take its arguments away.
                caught.append((fun, *jax.tree.map(as_shape, (args, kwargs))))

    def called(self, *args, **kwargs):
        catch(self, args, kwargs)
        return call(self, *args, **kwargs)

    def explained(fun, wires, args, kwargs):
        catch(fun, args, kwargs)
        return explain(fun, wires, args, kwargs)

    with (
        mock.patch.object(Mapped, "__call__", called),
        mock.patch.object(api, "_explain", explained),
    ):
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
            jitted = fun if hasattr(fun, "lower") else jax.jit(fun)
            text = jitted.lower(*args, **kwargs).compile().as_text()
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


# As a plugin of pytest


OF_TESTS, LOOKED_INTO = Found(), set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    with catching() as calls:
        yield
    if calls and (name := item.nodeid.partition("[")[0]) not in LOOKED_INTO:
        LOOKED_INTO.add(name)
        try:
            OF_TESTS.look_at(*calls[0])
        except Exception as error:
            OF_TESTS.lies.append(f"{name}: {error!r}")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.line(str(dict(OF_TESTS)))
    terminalreporter.line(f"lies: {OF_TESTS.lies}")


if __name__ == "__main__":
    program = importlib.import_module(f"examples.{sys.argv[1]}")
    with catching() as calls:
        program.main(sys.argv[2:])
    result = looked_at(calls)
    print(dict(result))
    print("lies:", result.lies)
