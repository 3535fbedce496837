"""What comes in between: interrupts, and finalizers that call maps, at any moment.

Python runs the handlers of signals, and finalizers, between any two steps. Here they
come where functions begin, which can be counted: the same moment is the same number.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap._jax import context
from shardmap.api.calls import programs
from shardmap.arrays.programs import running
from shardmap.explain.read.source import source_of

ROWS = np.ones((2, 3), np.float32)
SINES = np.sin(2 * ROWS)
LEAVES = {"__exit__", "set_trace", "set_axis_env"}


def new_map():
    return sm.spmap(lambda x: jnp.sin(lax.psum(x, "i")), "i")


def moments(run, is_one):
    """The functions that begin while it runs, of those asked for, and their callers."""
    begun = []

    def note(frame, event, _):
        if event == "call" and is_one(frame):
            begun.append((frame.f_code.co_qualname, frame.f_back.f_code.co_qualname))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return begun


def run_and_at(number, act, run, is_one):
    """Runs it, and acts as the function of that number begins."""
    begun = 0

    def look(frame, event, _):
        nonlocal begun
        if event == "call" and is_one(frame):
            begun += 1
            if begun == number:
                sys.setprofile(None)
                act()

    sys.setprofile(look)
    try:
        return run()
    finally:
        sys.setprofile(None)


def interrupt():
    raise KeyboardInterrupt("by the user")


def leaves(frame):
    """Whether it is JAX's; Python's own locks do not bear an interrupt there either."""
    is_of_jax = frame.f_globals.get("__name__", "").startswith("jax")
    return is_of_jax and frame.f_code.co_name in LEAVES


def places(begun):
    """The number of the last of those that have equal names."""
    return sorted({names: number for number, names in enumerate(begun, 1)}.values())


def halves(x):
    return jnp.sin(x) / x.sum()


def line_of_a_program():
    """What JAX notes as the line of an operation that is traced here."""
    [equation] = jax.make_jaxpr(lambda x: jnp.negative(x))(1.0).eqns
    return source_of(equation)


HERE = line_of_a_program()

INTERRUPTED = {
    "call": lambda mapped: mapped,
    "lower": lambda mapped: mapped.lower,
    "trace": lambda mapped: mapped.trace,
    "explain": lambda mapped: sm.explain(mapped),
    "chunked": lambda mapped: sm.chunked(lambda x: halves(x), {0: 2}),
    "plan": lambda mapped: (
        lambda x: sm.plan(lambda x: halves(x), x, in_slices={0: 2}).run(x)
    ),
}


def once(run, mapped):
    return run(mapped)(ROWS)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", INTERRUPTED)
def test_an_interrupt_where_jax_leaves_a_trace_leaves_it(how):
    """Where the interrupt comes as a method begins that was to put something back."""
    run = INTERRUPTED[how]
    run(new_map())(ROWS)
    numbers = places(moments(lambda: once(run, new_map()), leaves))
    assert len(numbers) > 5
    before, interrupted = context.noted(), 0
    for number in numbers:
        mapped = new_map()
        try:
            run_and_at(number, interrupt, functools.partial(once, run, mapped), leaves)
        except KeyboardInterrupt:
            interrupted += 1
        assert context.noted() == before
        assert not isinstance(jnp.add(1, 1), jax.core.Tracer)
        assert line_of_a_program() == HERE
        assert running._turn.name is None
        assert running._compiling.allowed
        assert programs._just_read.get() is None
    assert interrupted > 5
    np.testing.assert_allclose(mapped(ROWS), SINES, rtol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("around", ["nothing", "jit", "vmap"])
@pytest.mark.parametrize("called", ["known", "new", "no collective"])
def test_a_finalizer_calls_a_map_while_another_is_made(around, called):
    known, plain = new_map(), sm.spmap(lambda x: x + 1)
    known(ROWS), plain(ROWS)
    mapped = {
        "nothing": lambda: new_map(),
        "jit": lambda: jax.jit(new_map()),
        "vmap": lambda: jax.vmap(new_map(), in_axes=1, out_axes=1),
    }[around]

    def is_one(frame):
        return frame.f_code.co_filename.endswith(".py")

    call = {"known": known, "new": lambda x: new_map()(x), "no collective": plain}
    finalized = []

    def finalize():
        # It is bound into what is traced, if anything is, as all that is called there.
        finalized.append(jax.typeof(call[called](ROWS)).shape)

    mapped()(ROWS)
    count = len(moments(lambda: mapped()(ROWS), is_one))
    # Not all runs have as many moments.
    for number in range(count // 12, count, count // 12):
        results = run_and_at(number, finalize, lambda: mapped()(ROWS), is_one)
        np.testing.assert_allclose(results, SINES, rtol=1e-5)
    assert len(finalized) >= 8
    assert set(finalized) == {ROWS.shape}
