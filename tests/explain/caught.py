"""The programs that are called or explained, caught while other code runs.

Of an example, and of tests, of each test the first ones:

    python -m tests.explain.caught heat --size 128 --steps 2
    python -m pytest -n 0 -p tests.explain.caught tests/map/rules

At the end it prints the lies, the collectives without a line, and how many programs it
held against their compiled text. It fails for a lie, for a collective of the user's
without a line, and if more than 5 % of the compiler's have none; not for the tests.
"""

import collections
import contextlib
import functools
import importlib
import os
import pathlib
import sys
from unittest import mock

import jax
import pytest

import shardmap as sm
from shardmap._jax.context import nothing_is_traced
from shardmap.api.function import Mapped
from shardmap.explaining import api
from shardmap.planning.chunked import ChunkedFunction
from tests.explain.agreement import disagreements

OURS = [pathlib.Path(__file__).parents[2] / name for name in ("tests", "examples")]
MOST = int(os.environ.get("CAUGHT_MOST", "2"))
"""How many programs of a test are looked at, its cases together."""


TRANSFORMATIONS = "jit grad value_and_grad vmap jacfwd jacrev hessian pmap".split()


class Transformed:
    """What a transformation of JAX gives to our programs, with its calls caught."""

    def __init__(self, fun, catch):
        functools.update_wrapper(self, fun)
        self._fun, self._catch = fun, catch

    def __call__(self, *args, **kwargs):
        self._catch(self._fun, args, kwargs)
        return self._fun(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._fun, name)


@contextlib.contextmanager
def catching():
    """Gives a list, which these come into, once each.

    They are maps, functions in pieces and what tests and examples transform, where
    they are called with arrays, and what is explained.
    """
    caught, seen = [], set()
    explain = api.explanation_for

    def catch(fun, args, kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        # What is around can no longer be there when it is asked.
        alone = nothing_is_traced() and jax.sharding.get_abstract_mesh().empty
        if alone and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            shapes = tuple((getattr(leaf, "shape", ()), type(leaf)) for leaf in leaves)
            if (key := (id(fun), tree, shapes)) not in seen:
                seen.add(key)
                # A call may take its arguments away.
                caught.append((fun, *jax.tree.map(as_shape, (args, kwargs))))

    def caught_calls_of(kind):
        call = kind.__call__

        def called(self, *args, **kwargs):
            catch(self, args, kwargs)
            return call(self, *args, **kwargs)

        return mock.patch.object(kind, "__call__", called)

    def transformed_by(name):
        transform = getattr(jax, name)

        def transformed(*args, **kwargs):
            made = transform(*args, **kwargs)
            caller = pathlib.Path(sys._getframe(1).f_code.co_filename)
            # A decorator with options gives the decorator.
            is_made = bool(args) and any(map(caller.is_relative_to, OURS))
            return Transformed(made, catch) if is_made else made

        return mock.patch.object(jax, name, transformed)

    def explained(fun, given, there, args, kwargs, *options, **more):
        catch(fun, args, kwargs)
        return explain(fun, given, there, args, kwargs, *options, **more)

    with contextlib.ExitStack() as patched:
        for kind in (Mapped, ChunkedFunction):
            patched.enter_context(caught_calls_of(kind))
        for name in TRANSFORMATIONS:
            patched.enter_context(transformed_by(name))
        patched.enter_context(mock.patch.object(api, "explanation_for", explained))
        yield caught


def as_shape(leaf):
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    weak = leaf.aval.weak_type
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak
    )


class Found(collections.Counter):
    """How many programs and collectives were looked at, and what was wrong."""

    def __init__(self):
        super().__init__()
        self.lies, self.nowhere = [], []

    def look_at(self, fun, args, kwargs, where=""):
        """Compares what is said of a program with the text that it is compiled to."""
        try:
            jitted = fun if hasattr(fun, "lower") else jax.jit(fun)
            compiled = jitted.lower(*args, **kwargs).compile()
        except Exception:
            self["refused"] += 1  # As the call that was caught.
            return
        self["programs"] += 1
        try:
            report = sm.explain(fun)(*args, **kwargs)
            lies = disagreements(report, compiled)
        except Exception as error:
            self.lies.append(f"{where}: {error!r}")
            return
        self.lies += [f"{where or report.name}: {lie}" for lie in lies]
        for each in report.collectives:
            made = "compiler" if each.added_by_partitioner else "user"
            self[made] += 1
            self[f"{made}, located"] += each.source is not None
            if each.source is None:
                self.nowhere.append(f"{where}: {each}")

    @property
    def is_true(self):
        """Whether nothing is wrong, and all lines are there that are to be."""
        return (
            not self.lies
            and self["programs"] > 0
            and self["user, located"] == self["user"]
            and self["compiler, located"] >= 0.95 * self["compiler"]
        )

    def lines(self):
        yield from (f"without a line: {each}" for each in self.nowhere)
        yield from (f"a lie: {each}" for each in self.lies)
        counts = "; ".join(f"{what}: {n:,}" for what, n in sorted(self.items()))
        yield f"{'true' if self.is_true else 'WRONG'} ({counts})"


def looked_at(caught):
    summary = Found()
    for each in caught:
        summary.look_at(*each)
    return summary


# As a plugin of pytest


OF_TESTS, LOOKED_INTO = Found(), collections.Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    with catching() as calls:
        yield
    test = item.nodeid.partition("[")[0]
    for call in calls[: MOST - LOOKED_INTO[test]]:
        LOOKED_INTO[test] += 1
        OF_TESTS.look_at(*call, where=item.nodeid)


def pytest_sessionfinish(session):
    """Whether the tests pass is not asked: what looks on traces functions again."""
    session.exitstatus = 0 if OF_TESTS.is_true else 1


def pytest_terminal_summary(terminalreporter):
    for line in OF_TESTS.lines():
        terminalreporter.line(line)


if __name__ == "__main__":
    program = importlib.import_module(f"examples.{sys.argv[1]}")
    with catching() as calls:
        program.main(sys.argv[2:])
    result = looked_at(calls)
    print(*result.lines(), sep="\n")
    sys.exit(0 if result.is_true else 1)
