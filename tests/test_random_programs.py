"""Random programs of collectives, nested maps and control flow, against `jax.vmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.map_programs import MAPS, assert_same, float_index, spread

# A step is a tuple of its kind and its numbers, or of its kind and a list of steps.
LEAF_STEPS = st.tuples(
    st.sampled_from(
        [
            "sine",
            "weight",
            "sum",
            "mean",
            "gather",
            "scatter",
            "exchange",
            "permute",
            "index",
            "random",
        ]
    ),
    st.integers(0, 20),
)


def steps_of(steps):
    """Programs of these steps, or of what holds such programs."""
    block = st.lists(steps, min_size=1, max_size=2)
    kinds = st.sampled_from(["scan", "cond", "checkpoint", "jit", "vmap"])
    return st.one_of(
        LEAF_STEPS,
        st.tuples(kinds, block),
        st.tuples(st.sampled_from(["map 2", "map 3", "map 4"]), block),
    )


PROGRAMS = st.lists(steps_of(steps_of(LEAF_STEPS)), min_size=1, max_size=2)


def run(program: Any, x: Any, w: Any, scope: list[str], map_: Any) -> Any:
    """Interprets a program on an element; all values stay small, `f32[2]`.

    `scope` has the names of the axes around.
    """
    for kind, what in program:
        x = step(kind, what, x, w, scope, map_) * 0.5 + jnp.tanh(x)
    return x


def step(kind: str, what: Any, x: Any, w: Any, scope: list[str], map_: Any) -> Any:
    if isinstance(what, int):
        return leaf_step(kind, what, x, w, scope)

    def inside(x):
        return run(what, x, w, scope, map_)

    if kind == "scan":
        return lax.scan(lambda x, s: (inside(x * s), x), x, jnp.array([1.0, -1.0]))[0]
    if kind == "cond":
        return lax.cond(w[0] > -1, inside, jnp.cos, x)
    if kind == "checkpoint":
        return jax.checkpoint(inside)(x)
    if kind == "jit":
        return jax.jit(inside)(x)
    scales = jnp.arange(1.0, 4.0)
    name = f"axis {len(scope)}"
    if kind == "vmap":
        batched = jax.vmap(
            lambda s: run(what, x * s, w, [*scope, name], map_), axis_name=name
        )
        return batched(scales).mean(0)
    scales = jnp.arange(1.0, 1.0 + int(kind[-1]))
    mapped = map_(
        lambda s, w: run(what, x * s, w, [*scope, name], map_),
        axis_name=name,
        in_axes=(0, None),
        out_axes=1,
    )
    return mapped(scales, w).mean(1)


def leaf_step(kind: str, number: int, x: Any, w: Any, scope: list[str]) -> Any:
    name = scope[number % len(scope)]
    size = lax.axis_size(name)
    chosen = number % (2 ** len(scope) - 1) + 1
    several = tuple(n for k, n in enumerate(scope) if chosen >> k & 1)
    if kind == "sine":
        return jnp.sin(x * (1 + number))
    if kind == "weight":
        return x * w
    if kind == "sum":
        return jnp.tanh(lax.psum(x, several[:: -1 if number > 10 else 1]))
    if kind == "mean":
        return lax.pmean(jnp.cos(x) * x, several)
    if kind == "gather":
        gathered = lax.all_gather(x, name, axis=number % 2)
        return gathered.sum(number % 2) / size
    if kind == "permute":
        return lax.ppermute(x, name, [(k, (k + number) % size) for k in range(size)])
    if kind == "index":
        return x * float_index(name) / size
    if kind == "random":
        key = jax.random.fold_in(jax.random.key(number), lax.axis_index(name))
        return x * jax.random.uniform(key)
    pieces = jnp.stack([jnp.sin(x * (k + 1)) for k in range(size)])
    if kind == "scatter":
        # Not tiled, jax.vmap within jax.vmap fails.
        return lax.psum_scatter(pieces, name, tiled=True)[0] / size
    return lax.all_to_all(pieces, name, 0, 0).mean(0)


@given(
    program=PROGRAMS,
    size=st.sampled_from([1, 2, 3, 4, 8, 11]),
    in_axis=st.sampled_from([0, 1, -1]),
    w_axis=st.sampled_from([0, None]),
    out_axis=st.sampled_from([0, 1, -1]),
    eager=st.sampled_from(MAPS),
)
@settings(print_blob=True)
def test_random_programs(program, size, in_axis, w_axis, out_axis, eager):
    def around(map_):
        return map_(
            lambda x, w: run(program, x, w, ["outer"], map_),
            axis_name="outer",
            in_axes=(in_axis, w_axis),
            out_axes=out_axis,
        )

    def value_and_grad(map_, x, w):
        def loss(x, w):
            results = around(map_)(x, w)
            return jnp.sin(results * 3).sum(), results

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

    def compiled(fun):
        return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})

    x = np.moveaxis(spread((size, 2)), 0, in_axis)
    w = spread((2,) if w_axis is None else (size, 2), 1.0)
    expected = compiled(lambda x, w: value_and_grad(jax.vmap, x, w))(x, w)
    both = compiled(lambda x, w: [value_and_grad(map_, x, w) for map_ in MAPS])
    for result in both(x, w):
        assert_same(result, expected, 1e-4)
    assert_same(around(eager)(x, w), expected[0][1], 1e-4)
