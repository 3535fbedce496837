"""Random programs in maps, by both lowerings and on any devices, against one oracle.

`make test-deep` runs 45, and with HYPOTHESIS_PROFILE=nightly 3,150 new ones.
"""

import _thread
import collections
import contextlib
import functools
import queue
import threading
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh

import shardmap as sm
from tests.map_programs import LOWERINGS, assert_same, spread
from tests.strategies import examples
from tests.together.random_around import AROUND, PLACES, mesh_of, placed, taken
from tests.together.random_calls import (
    BLOCK_NAMES,
    CALLS,
    LAYOUTS,
    around_by,
    blocks_on,
    by_vmaps,
    called,
    map_on,
)
from tests.together.random_devices import OnDevices
from tests.together.random_oracle import ByLoops
from tests.together.random_programs import (
    AXIS_NAMES,
    COLLECTIVES,
    DERIVATIVES,
    LOCAL,
    PARTITIONS,
    Scope,
    has,
)
from tests.together.random_values import DTYPES, State, start

NUMBERS = st.integers(0, 10_000)


def _blocks(steps: Any) -> Any:
    return st.lists(steps, min_size=1, max_size=2).map(tuple)


def _inside(kinds: list[str], steps: Any) -> Any:
    return st.tuples(st.sampled_from(kinds), NUMBERS, _blocks(steps))


_LOCAL = st.tuples(st.sampled_from(LOCAL), NUMBERS)
_COLLECTIVE = st.tuples(st.sampled_from(COLLECTIVES), NUMBERS)
_ANYWHERE = ["scan", "jit", "checkpoint", "custom", "parts", *DERIVATIVES]
_AGREED = [*_ANYWHERE, "cond", "rounds", "agreed", "map"]
_LOCAL_INSIDE = _inside([*_ANYWHERE, "branch", "switch", "while"], _LOCAL)
_FIRST = st.one_of(_COLLECTIVE, _LOCAL, _LOCAL_INSIDE)
_SECOND = st.one_of(_COLLECTIVE, _LOCAL_INSIDE, _inside([*_AGREED, "vmap"], _FIRST))
_TOGETHER = _blocks(st.one_of(_COLLECTIVE, _inside(_AGREED, _SECOND)))
_ALONE = _blocks(st.one_of(_LOCAL, _inside(_ANYWHERE, _LOCAL_INSIDE)))
PROGRAMS = st.integers(0, 3).flatmap(lambda k: _TOGETHER if k else _ALONE)

# Where they are new ones, so that all processors have work.
PARTS = 1 if settings.default.derandomize else 7


class Rows:
    """A host function that counts the rows it is called with."""

    def __init__(self):
        self.count = collections.Counter()
        self._lock = threading.Lock()

    def __call__(self, value):
        with self._lock:
            self.count[tuple(value.tolist())] += 1


def whole_program(machine, program, call, w_axis, around, taps, blocks=None):
    """The function of all elements that a machine makes of a program.

    Args:
      around: what maps the whole map, as `jax.vmap`; or None.
      blocks: ``blocks(fun, in_axes, **options)`` maps a function of one element over
        three axes.
    """

    looped = () if call.batch_size is None else (AXIS_NAMES[0],)

    def mapped_over(names, level):
        def element(program, x, n, d, w):
            indices = {name: machine.index((name,)) for name in looped}
            scope = Scope(
                names, w, jnp.bool_(True), taps, level, looped=looped, indices=indices
            )
            new = machine.run(program, State(x, n, d), scope)
            return new, machine.ending(call.ending, new.x, scope)

        return element

    if blocks:
        fun = mapped_over(tuple(BLOCK_NAMES), 1)
        return called(fun, program, call, (0, 0, 0, w_axis), blocks)
    if around:
        two = mapped_over(tuple(AXIS_NAMES[:2]), 1)

        def inside(x, n, d, w):
            several = jnp.stack([x, x + 1, x * 2]), jnp.stack([n, n + 1, n])
            map_ = functools.partial(
                machine.map_, level=0, name=AXIS_NAMES[1], out_axes=(0, None)
            )
            in_axes = (0, 0, None, None)
            return called(two, program, call, in_axes, map_)(*several, d, w)

        in_axes = (call.in_axis, 0, 0, w_axis)
        return around(inside, in_axes, 0, AXIS_NAMES[0])
    map_ = functools.partial(
        machine.map_,
        level=0,
        name=AXIS_NAMES[0],
        out_axes=(call.out_axes, None),
        batch_size=call.batch_size,
    )
    in_axes = (call.in_axis, 0, 0, w_axis)
    return called(mapped_over((AXIS_NAMES[0],), 1), program, call, in_axes, map_)


def on_a_foreign_thread(fun):
    """The function, run on a thread that Python's `threading` does not know."""

    def run(*args):
        ended = queue.Queue()

        def thread():
            try:
                ended.put((fun(*args), None))
            except BaseException as error:
                ended.put((None, error))

        _thread.start_new_thread(thread, ())
        result, error = ended.get(timeout=600)
        if error is not None:
            raise error
        return result

    return run


def compiled(fun):
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def evaluated(fun, what):
    """The function that is called: of values, derivatives, or a batch of programs."""

    def loss(x, n, d, w):
        results = fun(x, n, d, w)
        numbers = [a for state, agreed in results for a in (state.x, agreed)]
        return sum(jnp.sin(a * 3).sum() for a in numbers), results

    gradients = jax.value_and_grad(loss, (0, 3), has_aux=True)
    if what == "gradients":
        return gradients
    if what == "batched gradients":
        return lambda x, n, d, w: jax.vmap(gradients, (0, None, None, 0))(
            jnp.stack([x, jnp.cos(x), x * 2]), n, d, jnp.stack([w, w + 1, w])
        )
    if what == "tangents":
        return lambda x, n, d, w: jax.jvp(
            lambda x, w: [(state.x, agreed) for state, agreed in fun(x, n, d, w)],
            (x, w),
            (jnp.cos(x), jnp.sin(w)),
        )
    return fun


@pytest.mark.filterwarnings("ignore:.* runs as a whole")
@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
@given(
    program=PROGRAMS,
    size=st.integers(1, 11),
    dtype=st.sampled_from(DTYPES),
    w_axis=st.sampled_from([0, None]),
    layout=LAYOUTS,
    call=CALLS,
    outside=st.sampled_from([None] * 6 + ["vmap", "shard_map"]),
    beside=st.sampled_from([False, False, False, True]),
    around=AROUND,
    place=PLACES,
    foreign=st.booleans(),
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
    part,
    program,
    size,
    dtype,
    w_axis,
    layout,
    call,
    outside,
    beside,
    around,
    place,
    foreign,
    what,
):
    if outside == "shard_map" and has(program, ["broadcast"]):
        outside = None  # On CPU JAX has none over the axis of a `jax.shard_map`.
    if outside == "shard_map":
        # The devices are those of the `jax.shard_map`.
        layout, size, beside = ("free",), (size - 1) % 8 + 1, False
        around = place = None
    by_blocks = layout[0] == "blocks"
    size, outside = (8, None) if by_blocks else (size, outside)
    # Nested maps of other sizes may cut all devices otherwise, which does not go
    # together in one program.
    beside = beside and not by_blocks and (layout[0] != "free" or what == "values")
    call = call._replace(
        in_axis=0 if by_blocks else call.in_axis,
        donated=() if beside else call.donated,
        batch_size=None if by_blocks or outside else call.batch_size,
    )
    # What a host runs in shards is no part of a program.
    around = None if around == "plan" and what != "values" else around
    if what != "values" and layout[0] != "mesh":
        place = None  # JAX describes all results of a program on its first mesh.
    if beside and place == "elements":
        place = "whole"  # JAX takes only so many rows as an Explicit axis divides.
    is_set = layout[0] == "mesh" and layout[-1] == "set"
    if is_set:
        # JAX cuts and stacks no arrays whose types say how they are sharded.
        beside, outside, around = False, None, None
        what = what if what in ("values", "jit") else "values"
        place = place or "whole"
    differentiable = "gradients" in what or has(program, ["gradient"])
    forward = what == "tangents" or has(program, ["tangent"])
    taps = (
        what in ("values", "jit")
        and not (outside or around)
        and not has(program, DERIVATIVES)
        # JAX wants one mesh for all of a program that calls the host.
        and not (beside and what == "jit" and has(program, ["map", *PARTITIONS]))
        and not (is_set and what == "jit")
        and not (place and layout[-1] == "explicit" and what == "jit")
    )
    partitions = (
        outside in (None, "vmap")
        and around != "partitions"
        and (layout[0] == "free" or (layout[0] == "devices" and layout[1] > 1))
    )

    def results(machine, call, outer, blocks, take):
        outer, blocks = outer if outside else None, blocks if by_blocks else None
        fun = whole_program(machine, program, call, w_axis, outer, taps, blocks)

        def of_all(x, n, d, w):
            if not beside:
                return [fun(x, n, d, w)]
            few = (size + 1) // 2
            some_x = lax.slice_in_dim(x, 0, few, axis=call.in_axis)
            some_w = w if w_axis is None else w[:few]
            return [fun(x, n, d, w), fun(some_x, n[:few], d[:few], some_w)]

        return evaluated(take(of_all), what)

    x, w = spread((size, 2)), spread((2,) if w_axis is None else (size, 2), 1.0)
    n, d = np.arange(size, dtype=np.int32) % 5, start(size, dtype)
    args = np.moveaxis(x, 0, call.in_axis), n, d, w

    def oracle(*args):
        machine = ByLoops(differentiable)
        plain = call._replace(static=None, donated=())
        fun = results(machine, plain, jax.vmap, by_vmaps(machine), lambda fun: fun)
        return fun(*args), machine.tapped

    expected, tapped = compiled(oracle)(*args)
    rows = collections.Counter(
        tuple(row)
        for rows, alive in tapped
        for row in np.asarray(rows)[np.asarray(alive)].tolist()
    )
    count = layout[1] if layout[0] == "devices" else 8
    mesh = Mesh(jax.devices()[:count], "p")
    if layout[0] == "mesh":
        mesh = mesh_of(layout[-1])

    def take(fun):
        return taken(fun, around, args, count)

    for lowering in LOWERINGS:
        recorder = Rows()
        map_ = map_on(layout, lowering)
        machine = OnDevices(map_, differentiable, forward, recorder, partitions)
        blocks = blocks_on(layout, lowering) if by_blocks else None
        fun = results(machine, call, around_by(outside), blocks, take)
        given = list(map(jnp.array, args)) if call.donated else args
        given = placed(given, place, mesh, call.in_axis)
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            called_fun = fun if what == "values" else compiled(fun)
            if foreign and not is_set:  # A mesh is set for one thread.
                called_fun = on_a_foreign_thread(called_fun)
            result = called_fun(*given)
        assert_same(result, expected, 1e-4)
        sm.taps_barrier()
        if has(program, ["branch", "switch", "while"]):
            # Vectorised elements tap where they do not get, too.
            assert set(recorder.count) >= set(rows), lowering
        elif has(program, ["map", *PARTITIONS]) or layout[0] != "devices":
            # Every device that an element is on taps.
            assert set(recorder.count) == set(rows), lowering
        else:
            assert recorder.count == rows, lowering
        kept = [k for k in range(4) if k not in call.donated]
        assert_same([given[k] for k in kept], [args[k] for k in kept])
