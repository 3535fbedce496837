"""Digests of plans and arguments: all that counts is in them, and nothing else."""

import functools
import sys
import types

import jax
import numpy as np
import pytest

from shardmap.plan.cutting import cut_function
from shardmap.plan.plan import plan
from shardmap.plan.run.disk import fingerprint as digests
from shardmap.plan.run.disk.fingerprint import fingerprint, fingerprints
from tests.plan.run.checks import Recorded, X, assert_bytes


def _typed_key(seed):
    key = jax.random.key(seed)
    return lambda x: x + jax.random.uniform(key)


def _inside_a_loop(seed):
    inner = jax.jit(lambda x: x * np.full((1, 8), seed, np.float32))
    return lambda x: jax.lax.scan(lambda s, _: (inner(s), None), x, None, length=2)[0]


def _callback(seed):
    def host(x):
        return host and x + np.float32(2 * seed) - np.float32(1)

    def fun(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return fun


class Table:
    """Equal ones print their addresses, which differ."""

    def __init__(self, number):
        self.held = [{"a": number}], self

    def __call__(self, x):
        return x + np.float32(self.held[0][0]["a"])


def _called(host):
    return lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _callable(seed):
    return _called(Table(seed))


def _method(seed):
    return _called(Table(seed).__call__)


def _partial(seed):
    return _called(functools.partial(np.add, np.float32(seed)))


def _slotted(seed):
    class Scale:
        __slots__ = ("by",)

        def __call__(self, x):
            return x * self.by

    scale = Scale()
    scale.by = np.float32(seed)
    return _called(scale)


def _results(seed):
    """The same nodes, in another order of results."""

    def fun(x):
        total, squares = x.sum(0), (x * x).sum(0)
        return {"a": (total, squares)[seed - 1], "b": (squares, total)[seed - 1]}

    return fun


def _generator(seed):
    """A generator of NumPy prints its address in capital letters."""
    held = seed, np.random.default_rng(0)
    return _called(lambda x: held and x)


IN_A_MODULE = {
    "a number and a helper": "host = lambda x: helper(x) * SCALE",
    "a lambda inside": "host = lambda x: (lambda: x * SCALE)()",
    "a function in one inside": """
def host(x):
    def outer():
        def inner():
            return x * SCALE
        return inner()
    return outer()
""",
    "an inner function of a helper": """
def scaled(x):
    return [(lambda: x * SCALE)() for _ in range(1)][0]

def host(x):
    return scaled(x)
""",
    "a number of NumPy": "host = lambda x: x * TYPED",
    "a complex number": "host = lambda x: x * COMPLEX.real.astype(x.dtype)",
    "an entry of a dict": "host = lambda x: x * SETTINGS['by'][0]",
    "a method that a method calls": """
class Model:
    def predict(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * SCALE

host = Model().predict
""",
    "a method of a dataclass": """
@dataclass(frozen=True)
class Model:
    def __call__(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * SCALE

host = Model()
""",
    "a call of an instance": """
class Host:
    def __call__(self, x):
        return x * SCALE

host = Host()
""",
    "a call of a dataclass": """
@dataclass(frozen=True)
class Host:
    by: float = 1.0
    def __call__(self, x):
        return x * SCALE

host = Host()
""",
}
MODULE = """
from dataclasses import dataclass
import numpy as np

SCALE = {number}
TYPED = np.float32(SCALE)
COMPLEX = np.complex64(SCALE)
SETTINGS = {{"by": [SCALE]}}

def helper(x):
    return x + {number}
"""


def _of_module(program, seed):
    module = types.ModuleType("helpers")
    with pytest.MonkeyPatch.context() as patch:  # A dataclass looks for its module.
        patch.setitem(sys.modules, "helpers", module)
        exec(MODULE.format(number=float(seed)) + program, vars(module))
    return _called(module.host)


@pytest.mark.parametrize(
    "make",
    [
        *(_typed_key, _inside_a_loop, _callback, _callable, _method, _partial),
        *(_generator, _slotted, _results),
        *(
            pytest.param(functools.partial(_of_module, program), id=name)
            for name, program in IN_A_MODULE.items()
        ),
    ],
)
def test_what_a_function_holds_tells_it_from_others(make, tmp_path):
    first, same, other = (plan(make(k), X, in_slices=({0: 8},)) for k in (1, 1, 2))
    want = jax.tree.leaves(first.run(X, checkpoint=tmp_path))
    assert_bytes(jax.tree.leaves(same.run(X, checkpoint=tmp_path)), want)
    with pytest.raises(ValueError, match="belongs to another plan"):
        other.run(X, checkpoint=tmp_path)


def test_a_variable_that_is_not_set_yet_has_a_digest(tmp_path):
    def host(x):
        return x if x.size else later

    made = plan(_called(host), X, in_slices=({0: 8},))
    assert made.run(X, checkpoint=tmp_path).tobytes() == X.tobytes()
    later = None


def test_plans_of_other_cuts_and_constants_differ():
    def of(fun, pieces):
        return fingerprint(cut_function(fun, (X,), ({0: pieces},)))

    def plus(table):
        return lambda x: x + table

    ones, twos = (np.full((64, 8), k, np.float32) for k in (1, 2))
    assert of(plus(ones), 8) == of(plus(ones.copy()), 8)
    assert len({of(plus(ones), 8), of(plus(twos), 8), of(plus(ones), 4)}) == 3
    assert of(lambda x: x.sum(0), 8) != of(lambda x: x.max(0), 8)


def test_small_arguments_that_are_read_are_compared(tmp_path):
    made = plan(lambda x: x * 2, X, in_slices=({0: 8},))
    want = made.run(Recorded(X), checkpoint=tmp_path)
    assert made.run(X, checkpoint=tmp_path).tobytes() == want.tobytes()
    with pytest.raises(ValueError, match=r"args\[0\]"):
        made.run(Recorded(X + 1), checkpoint=tmp_path)


def test_large_arguments_are_not_compared(monkeypatch):
    small, same, other = fingerprints([1.0, np.float64(1.0), 2.0])
    assert small == same != other
    monkeypatch.setattr(digests, "COMPARED", 8)
    assert fingerprints([np.zeros(9, np.int8), np.zeros(8, np.int8)])[0] is None
    assert fingerprints([np.zeros(8, np.int8)])[0] is not None
