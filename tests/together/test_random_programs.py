"""Random programs in maps, by both lowerings and on any devices, against one oracle.

`make test` runs 15, `make test-deep` 45, and with HYPOTHESIS_PROFILE=nightly 3,150 new
ones.
"""

import collections
import threading
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmap as sm
from tests.map_programs import LOWERINGS, assert_same, spread
from tests.strategies import examples
from tests.together.random_oracle import ByLoops
from tests.together.random_programs import (
    AXIS_NAMES,
    COLLECTIVES,
    LOCAL,
    OnDevices,
    Scope,
    State,
)

NUMBERS = st.integers(0, 10_000)


def _blocks(steps: Any) -> Any:
    return st.lists(steps, min_size=1, max_size=2)


def _inside(kinds: list[str], steps: Any) -> Any:
    return st.tuples(st.sampled_from(kinds), NUMBERS, _blocks(steps))


_LOCAL = st.tuples(st.sampled_from(LOCAL), NUMBERS)
_COLLECTIVE = st.tuples(st.sampled_from(COLLECTIVES), NUMBERS)
_LOCAL_INSIDE = _inside(["branch", "while", "scan", "jit", "checkpoint"], _LOCAL)
_FIRST = st.one_of(_COLLECTIVE, _COLLECTIVE, _LOCAL, _LOCAL_INSIDE)
_SECOND = st.one_of(
    _COLLECTIVE,
    _LOCAL_INSIDE,
    _inside(["scan", "cond", "rounds", "jit", "checkpoint", "vmap", "map"], _FIRST),
)
PROGRAMS = _blocks(
    st.one_of(
        _COLLECTIVE,
        _inside(["scan", "cond", "rounds", "jit", "checkpoint", "map"], _SECOND),
    )
)

# Where they are new ones, so that all processors have work.
PARTS = 1 if settings.default.derandomize else 7

LAYOUTS = st.one_of(
    st.tuples(st.just("devices"), st.integers(1, 8)),
    st.tuples(st.just("mesh"), st.permutations("abc"), st.integers(1, 3)),
)


class Rows:
    """A host function that counts the rows it is called with."""

    def __init__(self):
        self.count = collections.Counter()
        self._lock = threading.Lock()

    def __call__(self, value):
        with self._lock:
            self.count[tuple(value.tolist())] += 1


def map_on(layout, lowering):
    """`spmap` on devices, or on mesh axes in some order; `jax.vmap` for level None."""
    kind, which, *count = layout
    if kind == "devices":
        options = [{"devices": jax.devices()[:which]}]
    else:
        mesh = sm.make_mesh({"a": 2, "b": 2, "c": 2})
        axes = tuple(which)
        options = [{"mesh": mesh, "mesh_axes": axes[: count[0]]}]
        if rest := axes[count[0] :]:
            options.append({"mesh": mesh, "mesh_axes": rest})

    def map_(fun, level, name, in_axes):
        if level is None:
            return jax.vmap(fun, in_axes)
        given = options[level] if level < len(options) else {}
        return sm.spmap(fun, name, in_axes=in_axes, lowering=lowering, **given)

    return map_


def whole_program(machine, program, w_axis, has_vmap, taps):
    """The function of all elements that a machine makes of a program."""

    def element(x, n, w, names, level):
        scope = Scope(names, w, jnp.bool_(True), taps, level)
        return machine.run(program, State(x, n), scope)

    in_axes = (0, 0, w_axis)
    if not has_vmap:
        names = (AXIS_NAMES[0],)
        return machine.map_(
            lambda x, n, w: element(x, n, w, names, 1), 0, names[0], in_axes
        )

    def around(x, n, w):
        return machine.map_(
            lambda x, n: element(x, n, w, tuple(AXIS_NAMES[:2]), 1),
            0,
            AXIS_NAMES[1],
            (0, 0),
        )(jnp.stack([x, x + 1, x * 2]), jnp.stack([n, n + 1, n]))

    return jax.vmap(around, in_axes, axis_name=AXIS_NAMES[0])


def compiled(fun):
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def has_map(program):
    return any(
        kind == "map" or any(has_map(inside) for inside in rest)
        for kind, _, *rest in program
    )


@pytest.mark.parametrize("part", range(PARTS))
@given(
    program=PROGRAMS,
    size=st.integers(1, 11),
    w_axis=st.sampled_from([0, None]),
    layout=LAYOUTS,
    has_vmap=st.sampled_from([False, False, False, True]),
    what=st.sampled_from(["values", "jit", "gradients"]),
)
@settings(
    examples(15),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
def test_random_programs(part, program, size, w_axis, layout, has_vmap, what):
    differentiable, taps = what == "gradients", what != "gradients" and not has_vmap

    def evaluated(machine):
        fun = whole_program(machine, program, w_axis, has_vmap, taps)
        if not differentiable:
            return fun

        def loss(x, n, w):
            result = fun(x, n, w)
            return jnp.sin(result.x * 3).sum(), result

        return jax.value_and_grad(loss, (0, 2), has_aux=True)

    x, w = spread((size, 2)), spread((2,) if w_axis is None else (size, 2), 1.0)
    n = np.arange(size, dtype=np.int32) % 5

    def oracle(x, n, w):
        machine = ByLoops(differentiable)
        return evaluated(machine)(x, n, w), machine.tapped

    expected, tapped = compiled(oracle)(x, n, w)
    rows = collections.Counter(
        tuple(row)
        for rows, alive in tapped
        for row in np.asarray(rows)[np.asarray(alive)].tolist()
    )
    for lowering in LOWERINGS:
        recorder = Rows()
        machine = OnDevices(map_on(layout, lowering), differentiable, recorder)
        fun = evaluated(machine)
        result = (fun if what == "values" else compiled(fun))(x, n, w)
        assert_same(result, expected, 1e-4)
        sm.taps_barrier()
        if has_map(program) or layout[0] == "mesh":
            # Every device that an element is on taps.
            assert set(recorder.count) == set(rows), lowering
        else:
            assert recorder.count == rows, lowering
