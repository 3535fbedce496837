"""Taps in loops and branches.

Elements that run by themselves tap as the function does on one of them in a `jax.jit`;
vectorised ones as `jax.vmap` has it, and their numbers are the same.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm


class Calls:
    """Values by the element that they are of, in order, with the program's number."""

    def __init__(self):
        self.by_element = collections.defaultdict(list)

    def tap(self, element, program, value):
        sm.tap(self._note, (element, np.int32(program), value))
        return value

    def _note(self, given):
        element, program, value = given
        name = ALONE[program].__name__ if program >= 0 else ""
        self.by_element[int(element)].append((name, value.tolist()))

    def wait(self):
        sm.taps_barrier()
        calls, self.by_element = self.by_element, collections.defaultdict(list)
        return dict(calls)


# Each takes a tap of one value, and one element: a number of type int32.


def in_condition(note, x):
    return lax.while_loop(lambda x: note(x) < 2, lambda x: x + 1, x)


def in_body(note, x):
    return lax.while_loop(lambda x: x < 2, lambda x: note(x) + 1, x)


def in_condition_and_body(note, x):
    return lax.while_loop(lambda x: note(x) < 2, lambda x: note(10 * x) // 10 + 1, x)


def in_fori_loop(note, x):
    return lax.fori_loop(0, x, lambda k, c: c + note(k), x)


def in_scan(note, x):
    return lax.scan(lambda c, k: (note(c + k), None), x, jnp.arange(3))[0]


def in_cond(note, x):
    return lax.cond(x > 1, note, lambda x: -x, x)


def in_switch(note, x):
    return lax.switch(x % 3, [note, lambda x: x + 1, lambda x: note(note(x) + 100)], x)


def in_branches_without_results(note, x):
    lax.cond(x > 1, lambda: (note(x), None)[1], lambda: None)
    return x


def in_while_in_scan(note, x):
    return lax.scan(lambda c, k: (in_condition(note, c - k), None), x, jnp.arange(3))[0]


def in_while_in_while(note, x):
    def body(x):
        return x + 1 + 0 * lax.while_loop(lambda y: note(y) < 1, lambda y: y + 1, -x)

    return lax.while_loop(lambda x: note(x) < 3, body, x)


def in_cond_in_while_in_jit(note, x):
    @jax.jit
    def body(x):
        x = jax.checkpoint(lambda x: x + 1)(x)
        return lax.cond(x % 2 == 0, note, lambda x: x + 1, x)

    return lax.while_loop(lambda x: jax.jit(lambda x: x < 4)(x), body, x)


def with_index_in_loop(note, x):
    def body(x):
        return note(x + 100 * lax.axis_index("i")) - 100 * lax.axis_index("i") + 1

    return lax.while_loop(lambda x: x < 2, body, x)


def with_sums_of_equal_loops(note, x):
    def body(carry):
        k, x = carry
        return k + 1, note(lax.psum(x, "i"))

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]


ALONE = [
    in_condition,
    in_body,
    in_condition_and_body,
    in_fori_loop,
    in_scan,
    in_cond,
    in_switch,
    in_branches_without_results,
    in_while_in_scan,
    in_while_in_while,
    in_cond_in_while_in_jit,
]
IN_CONDITIONS = [
    in_condition,
    in_condition_and_body,
    in_while_in_scan,
    in_while_in_while,
]
VECTORISED = [program for program in ALONE if program not in IN_CONDITIONS]
LAYOUTS = {
    "one each": (8, {}),
    "batch_size": (11, {"devices": jax.devices()[:2], "batch_size": 1}),
    "uneven": (11, {}),
    "spmd": (8, {"lowering": "spmd"}),
    "one device": (5, {"devices": jax.devices()[:1]}),
}
BY_THEMSELVES = ["one each", "batch_size"]
TOGETHER = [name for name in LAYOUTS if name not in BY_THEMSELVES]


def all_programs(calls, programs, k, x):
    return {
        program.__name__: program(
            functools.partial(calls.tap, k, ALONE.index(program)), x
        )
        for program in programs
    }


@functools.lru_cache
def one_by_one(count, programs=tuple(ALONE)):
    """Elements, each with its number, their results and their calls."""
    k = np.arange(count, dtype=np.int32)
    x = k % 7 - 3
    calls = Calls()
    f = jax.jit(functools.partial(all_programs, calls, programs))
    results = [f(*pair) for pair in zip(k, x, strict=True)]
    return k, x, jax.tree.map(lambda *rows: np.stack(rows), *results), calls.wait()


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", BY_THEMSELVES)
def test_each_element_taps_as_it_does_alone(layout):
    count, options = LAYOUTS[layout]
    k, x, expected, expected_calls = one_by_one(count)
    calls = Calls()
    f = sm.spmap(functools.partial(all_programs, calls, ALONE), **options)
    jax.tree.map(np.testing.assert_array_equal, f(k, x), expected)
    assert calls.wait() == expected_calls


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", TOGETHER)
def test_vectorised_elements_tap_as_under_vmap(layout):
    """Each taps what it does alone, in order, and what JAX computes beside that."""
    count, options = LAYOUTS[layout]
    k, x, expected, expected_calls = one_by_one(count, tuple(VECTORISED))
    calls = Calls()
    f = sm.spmap(functools.partial(all_programs, calls, VECTORISED), **options)
    jax.tree.map(np.testing.assert_array_equal, f(k, x), expected)
    seen = calls.wait()
    assert set(seen) == set(k.tolist())
    for element, own in expected_calls.items():
        rest = iter(seen[element])
        assert all(call in rest for call in own)


@pytest.mark.few(1)
@pytest.mark.parametrize("program", [in_condition, in_while_in_scan])
@pytest.mark.parametrize("layout", TOGETHER)
def test_tapped_conditions_of_vectorised_elements_are_refused(layout, program):
    count, options = LAYOUTS[layout]
    mapped = sm.spmap(functools.partial(program, tapped), **options)
    with pytest.raises(
        NotImplementedError, match=r"condition of a while_loop, in a map"
    ):
        mapped(np.arange(count, dtype=np.int32))


def tapped(x):
    return sm.tap(lambda v: None, x)


@pytest.mark.few(1)
def test_in_nested_maps():
    k, x, expected, expected_calls = one_by_one(8)
    calls = Calls()
    f = sm.spmap(functools.partial(all_programs, calls, ALONE), "j")
    result = jax.jit(sm.spmap(f, "i"))(k.reshape(2, 4), x.reshape(2, 4))
    result = jax.tree.map(np.ravel, result)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert calls.wait() == expected_calls


def mapped_on(layout, program):
    """Elements, each with its number, what the map of them gives, and its calls."""
    count, options = LAYOUTS[layout]
    k = np.arange(count, dtype=np.int32)
    x = k % 7 - 3
    calls = Calls()

    def f(k, x):
        return program(functools.partial(calls.tap, k, -1), x)

    return k, x, sm.spmap(f, "i", **options)(k, x), calls.wait()


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "batch_size"])
def test_with_sums_of_equal_loops(layout):
    """Taps are the same wherever the elements lie."""
    k, x, result, calls = mapped_on(layout, with_sums_of_equal_loops)
    totals = [int(x.sum()), int(x.sum()) * len(x)]
    np.testing.assert_array_equal(result, np.full(len(x), totals[-1]))
    assert calls == {int(j): [("", value) for value in totals] for j in k}


def test_with_the_index_in_a_loop():
    k, x, result, calls = mapped_on("one each", with_index_in_loop)
    np.testing.assert_array_equal(result, np.maximum(x, 2))
    assert calls == {
        int(j): [("", int(v + 100 * j)) for v in range(x[j], 2)] for j in k if x[j] < 2
    }


def shares_the_condition(x):
    """The tapped value is one for all elements."""

    def goes_on(carry):
        tapped(carry[0])
        return carry[1] < 2

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] + 1), (0, x))[1]


counted = functools.partial(in_condition, tapped)


@pytest.mark.parametrize(
    "f",
    [
        jax.vmap(counted),
        jax.vmap(jax.jit(counted)),
        jax.vmap(functools.partial(in_condition, jax.checkpoint(tapped))),
        jax.vmap(shares_the_condition),
        lambda x: jax.vmap(sm.spmap(counted))(x[None]),
    ],
)
def test_a_tapped_condition_under_vmap_is_refused(f):
    """JAX's rule would go on with elements that have ended."""
    x = np.arange(4, dtype=np.int32)
    with pytest.raises(
        NotImplementedError, match="condition of a while_loop under jax"
    ):
        f(x)


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("lowering", ["manual", "spmd"])
@pytest.mark.parametrize("size", [8, 11])
@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint, jax.jit])
def test_gradients_tap_values_once(lowering, size, transform):
    k = np.arange(size, dtype=np.int32)
    x = np.linspace(-1, 2, size, dtype=np.float32)
    calls = Calls()

    def f(k, x):
        note = functools.partial(calls.tap, k, -1)

        def step(x, _):
            return jnp.where(x > 0.5, note(x) * x, 2 * x), None

        return lax.scan(transform(step), x, None, length=3)[0]

    def loss(f):
        return lambda x: f(k, x).sum()

    alone = jax.jit(jax.grad(f, 1))
    expected = np.stack([alone(*pair) for pair in zip(k, x, strict=True)])
    expected_calls = calls.wait()
    mapped = sm.spmap(f, lowering=lowering)
    np.testing.assert_allclose(jax.grad(loss(mapped))(x), expected, rtol=1e-6)
    assert calls.wait() == expected_calls
