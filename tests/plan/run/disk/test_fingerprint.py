"""Digests of plans and arguments: all that counts is in them, and nothing else."""

import functools

import jax
import numpy as np
import pytest

from shardmap.plan.cutting import cut_function
from shardmap.plan.plan import plan
from shardmap.plan.run.disk import fingerprint as digests
from shardmap.plan.run.disk.fingerprint import fingerprint, fingerprints
from tests.plan.run.checks import X


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


MODULE = """
def _helper(x):
    return x + {number}

def host(x):
    return _helper(x) * SCALE

def host_with_lambda(x):
    return (lambda: x * SCALE)()

SCALE = {number}
"""


def _of_module(seed, name):
    module = {"__name__": "helpers"}
    exec(MODULE.format(number=float(seed)), module)
    return _called(module[name])


def _helper_and_number_of_its_module(seed):
    return _of_module(seed, "host")


def _number_in_a_lambda_inside(seed):
    return _of_module(seed, "host_with_lambda")


@pytest.mark.parametrize(
    "make",
    [
        *(_typed_key, _inside_a_loop, _callback, _callable, _method, _partial),
        *(_helper_and_number_of_its_module, _number_in_a_lambda_inside),
    ],
)
def test_what_a_function_holds_tells_it_from_others(make, tmp_path):
    first, same, other = (plan(make(k), X, in_slices=({0: 8},)) for k in (1, 1, 2))
    want = first.run(X, checkpoint=tmp_path)
    assert same.run(X, checkpoint=tmp_path).tobytes() == want.tobytes()
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


def test_large_arguments_are_not_compared(monkeypatch):
    small, same, other, text = fingerprints([1.0, np.float64(1.0), 2.0, "a"])
    assert small == same != other
    assert text is None
    monkeypatch.setattr(digests, "COMPARED", 8)
    assert fingerprints([np.zeros(9, np.int8), np.zeros(8, np.int8)])[0] is None
    assert fingerprints([np.zeros(8, np.int8)])[0] is not None
