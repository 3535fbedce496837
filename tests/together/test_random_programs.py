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
from tests.together.random_devices import OnDevices
from tests.together.random_oracle import ByLoops
from tests.together.random_programs import (
    AXIS_NAMES,
    COLLECTIVES,
    DERIVATIVES,
    LOCAL,
    Scope,
)
from tests.together.random_values import DTYPES, State, start

NUMBERS = st.integers(0, 10_000)


def _blocks(steps: Any) -> Any:
    return st.lists(steps, min_size=1, max_size=2)


def _inside(kinds: list[str], steps: Any) -> Any:
    return st.tuples(st.sampled_from(kinds), NUMBERS, _blocks(steps))


_LOCAL = st.tuples(st.sampled_from(LOCAL), NUMBERS)
_COLLECTIVE = st.tuples(st.sampled_from(COLLECTIVES), NUMBERS)
_ANYWHERE = ["scan", "jit", "checkpoint", "custom", *DERIVATIVES]
_AGREED = [*_ANYWHERE, "cond", "rounds", "agreed", "map"]
_LOCAL_INSIDE = _inside([*_ANYWHERE, "branch", "switch", "while"], _LOCAL)
_FIRST = st.one_of(_COLLECTIVE, _COLLECTIVE, _LOCAL, _LOCAL_INSIDE)
_SECOND = st.one_of(_COLLECTIVE, _LOCAL_INSIDE, _inside([*_AGREED, "vmap"], _FIRST))
PROGRAMS = _blocks(st.one_of(_COLLECTIVE, _inside(_AGREED, _SECOND)))

# Where they are new ones, so that all processors have work.
PARTS = 1 if settings.default.derandomize else 7

LAYOUTS = st.one_of(
    st.tuples(st.just("devices"), st.integers(1, 8)),
    st.tuples(st.just("free")),
    st.tuples(st.just("mesh"), st.permutations("abc"), st.integers(1, 3)),
    st.tuples(st.just("blocks"), st.permutations(AXIS_NAMES[:3])),
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
    kind, *which = layout
    options = []
    if kind == "devices":
        options = [{"devices": jax.devices()[: which[0]]}]
    elif kind == "mesh":
        axes, count = tuple(which[0]), which[1]
        mesh = sm.make_mesh({"a": 2, "b": 2, "c": 2})
        options = [{"mesh": mesh, "mesh_axes": axes[:count]}]
        if rest := axes[count:]:
            options.append({"mesh": mesh, "mesh_axes": rest})

    def map_(fun, level, name, in_axes, out_axes=0):
        if level is None:
            return jax.vmap(fun, in_axes, out_axes)
        given = options[level] if level < len(options) else {}
        axes = {"in_axes": in_axes, "out_axes": out_axes}
        return sm.spmap(fun, name, **axes, lowering=lowering, **given)

    return map_


def blocks_on(layout, lowering):
    """Three maps of two elements each, as one `mesh_map` of blocks of one element."""
    mesh = sm.make_mesh(dict.fromkeys(layout[1], 2))
    cut = {name: k for k, name in enumerate(AXIS_NAMES[:3])}

    def maps(fun, w_axis):
        def block(x, n, d, w):
            given = x[0, 0, 0], n[0, 0, 0], d[0, 0, 0]
            result = fun(*given, w if w_axis is None else w[0, 0, 0])
            return jax.tree.map(lambda leaf: leaf[None, None, None], result)

        in_axes = (cut, cut, cut, {} if w_axis is None else cut)
        return sm.mesh_map(block, mesh, in_axes, cut, lowering=lowering)

    return maps


def whole_program(machine, program, w_axis, has_vmap, taps, blocks=None):
    """The function of all elements that a machine makes of a program.

    Args:
      blocks: ``blocks(fun, w_axis)`` maps a function of one element over three axes.
    """

    def element(x, n, d, w, names, level):
        scope = Scope(names, w, jnp.bool_(True), taps, level)
        return machine.run(program, State(x, n, d), scope)

    in_axes = (0, 0, 0, w_axis)
    names = AXIS_NAMES[0]
    if blocks:

        def three(x, n, d, w):
            return element(x, n, d, w, tuple(AXIS_NAMES[:3]), 1)

        def by_blocks(*args):
            cut = [
                arg if axis is None else arg.reshape(2, 2, 2, *arg.shape[1:])
                for arg, axis in zip(args, in_axes, strict=True)
            ]
            return blocks(three, w_axis)(*cut)

        return by_blocks
    if not has_vmap:

        def one(x, n, d, w):
            return element(x, n, d, w, (names,), 1)

        return machine.map_(one, 0, names, in_axes)

    def around(x, n, d, w):
        def two(x, n, d):
            return element(x, n, d, w, tuple(AXIS_NAMES[:2]), 1)

        several = jnp.stack([x, x + 1, x * 2]), jnp.stack([n, n + 1, n])
        return machine.map_(two, 0, AXIS_NAMES[1], (0, 0, None))(*several, d)

    return jax.vmap(around, in_axes, axis_name=names)


def by_vmaps(machine):
    """The oracle of `blocks_on`."""

    def maps(fun, w_axis):
        for name in reversed(AXIS_NAMES[:3]):
            fun = machine.vmap(fun, 0, name, (0, 0, 0, w_axis))
        return fun

    return maps


def compiled(fun):
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def has(program, kinds):
    """Whether a step of these kinds is in the program."""
    return any(
        kind in kinds or any(has(inside, kinds) for inside in rest)
        for kind, _, *rest in program
    )


def evaluated(fun, what):
    """The function that is called: of values, derivatives, or a batch of programs."""

    def loss(x, n, d, w):
        results = fun(x, n, d, w)
        return sum(jnp.sin(result.x * 3).sum() for result in results), results

    gradients = jax.value_and_grad(loss, (0, 3), has_aux=True)
    if what == "gradients":
        return gradients
    if what == "batched gradients":
        return lambda x, n, d, w: jax.vmap(gradients, (0, None, None, 0))(
            jnp.stack([x, jnp.cos(x), x * 2]), n, d, jnp.stack([w, w + 1, w])
        )
    if what == "tangents":
        return lambda x, n, d, w: jax.jvp(
            lambda x, w: [result.x for result in fun(x, n, d, w)],
            (x, w),
            (jnp.cos(x), jnp.sin(w)),
        )
    return fun


@pytest.mark.parametrize("part", range(PARTS))
@given(
    program=PROGRAMS,
    size=st.integers(1, 11),
    dtype=st.sampled_from(DTYPES),
    w_axis=st.sampled_from([0, None]),
    layout=LAYOUTS,
    has_vmap=st.sampled_from([False, False, False, True]),
    beside=st.sampled_from([False, False, False, True]),
    what=st.sampled_from(
        ["values", "jit", "jit", "gradients", "tangents", "batched gradients"]
    ),
)
@settings(
    examples(15),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
def test_random_programs(
    part, program, size, dtype, w_axis, layout, has_vmap, beside, what
):
    by_blocks = layout[0] == "blocks"
    size, has_vmap = (8, False) if by_blocks else (size, has_vmap)
    # Nested maps of other sizes may cut all devices otherwise, which does not go
    # together in one program.
    beside = beside and not by_blocks and (layout[0] != "free" or what == "values")
    differentiable = "gradients" in what or has(program, ["gradient"])
    forward = what == "tangents" or has(program, ["tangent"])
    taps = what in ("values", "jit") and not has_vmap and not has(program, DERIVATIVES)

    def calls(machine, blocks):
        fun = whole_program(
            machine, program, w_axis, has_vmap, taps, blocks if by_blocks else None
        )

        def results(x, n, d, w):
            if not beside:
                return [fun(x, n, d, w)]
            few = (size + 1) // 2
            some_w = w if w_axis is None else w[:few]
            return [fun(x, n, d, w), fun(x[:few], n[:few], d[:few], some_w)]

        return evaluated(results, what)

    x, w = spread((size, 2)), spread((2,) if w_axis is None else (size, 2), 1.0)
    n, d = np.arange(size, dtype=np.int32) % 5, start(size, dtype)

    def oracle(x, n, d, w):
        machine = ByLoops(differentiable)
        return calls(machine, by_vmaps(machine))(x, n, d, w), machine.tapped

    expected, tapped = compiled(oracle)(x, n, d, w)
    rows = collections.Counter(
        tuple(row)
        for rows, alive in tapped
        for row in np.asarray(rows)[np.asarray(alive)].tolist()
    )
    for lowering in LOWERINGS:
        recorder = Rows()
        map_ = map_on(layout, lowering)
        machine = OnDevices(map_, differentiable, forward, recorder)
        fun = calls(machine, blocks_on(layout, lowering) if by_blocks else None)
        result = (fun if what == "values" else compiled(fun))(x, n, d, w)
        assert_same(result, expected, 1e-4)
        sm.taps_barrier()
        if has(program, ["map"]) or layout[0] != "devices":
            # Every device that an element is on taps.
            assert set(recorder.count) == set(rows), lowering
        else:
            assert recorder.count == rows, lowering
