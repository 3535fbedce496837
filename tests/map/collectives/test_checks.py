"""What is asked of collectives where a body is traced."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map.collectives.pprod import pprod_primitive
from tests.map.map_checks import array
from tests.map_programs import LOWERINGS


def test_permutations_may_count_from_the_end():
    pairs = [(k, k - 1) for k in range(4)]
    for lowering in LOWERINGS:
        mapped = sm.spmap(lambda v: lax.ppermute(v, "i", pairs), "i", lowering=lowering)
        np.testing.assert_array_equal(mapped(np.arange(4)), [1, 2, 3, 0])


@pytest.mark.parametrize("size", [8, 11])
def test_what_cannot_be_added_is_refused(size):
    keys = jax.random.split(jax.random.key(0), size)
    add = sm.spmap(lambda v: lax.psum(v, "i"), "i")
    with pytest.raises(TypeError, match=rf"^psum over axis 'i' of size {size} adds, "):
        add(keys)
    scatter = sm.spmap(lambda v: lax.psum_scatter(v, "i"), "i")
    with pytest.raises(TypeError, match=r"psum_scatter over .* values of dtype bool"):
        scatter(np.ones((size, size), bool))


REFUSED = {
    "too few in groups": (
        lambda v: lax.psum(v, "i", axis_index_groups=[[0, 1], [2]]),
        "psum over axis 'i' of size 4: its axis_index_groups [[0, 1], [2]] have 3 "
        "indices. Each index from 0 to 3 must be in one group.",
    ),
    "too many in groups": (
        lambda v: lax.all_gather(v, "i", axis_index_groups=[[0, 1, 2], [3, 4, 5]]),
        "all_gather over axis 'i' of size 4: its axis_index_groups [[0, 1, 2], "
        "[3, 4, 5]] have 6 indices. Each index from 0 to 3 must be in one group.",
    ),
    "uneven groups": (
        lambda v: lax.psum_scatter(
            jnp.stack([v] * 3), "i", axis_index_groups=[[0, 1, 2], [3]]
        ),
        "psum_scatter over axis 'i' of size 4: its axis_index_groups must all be of "
        "one size, but [[0, 1, 2], [3]] have 1 and 3 indices. Only psum, pmax and "
        "pmin take groups that differ.",
    ),
    "a source that is not there": (
        lambda v: lax.ppermute(v, "i", [(0, 1), (4, 0)]),
        "ppermute over axis 'i' of size 4 has no element 4, which its perm (4, 0) "
        "names. Its elements are 0 to 3.",
    ),
    "in a loop": (
        lambda v: lax.fori_loop(0, 3, lambda _, v: lax.ppermute(v, "i", [(0, -5)]), v),
        "ppermute over axis 'i' of size 4 has no element -5, which its perm (0, -5) "
        "names. Its elements are 0 to 3.",
    ),
    "two sources": (
        lambda v: lax.ppermute(v, "i", [(0, 1), (2, 1)]),
        "ppermute sources and destinations must be unique, got ((0, 1), (2, 1)) over "
        "axis 'i' of size 4.",
    ),
    "broadcast": (
        lambda v: lax.pbroadcast(v, "i", 4),
        "pbroadcast over axis 'i' of size 4 has no element 4, which its source names. "
        "Its elements are 0 to 3.",
    ),
    "a name twice": (
        lambda v: lax.psum(v, ("i", "i")),
        "psum over axes 'i' and 'i' together of size 16 names axis 'i' more than once.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    body, message = REFUSED[name]
    values = np.arange(4, dtype=np.float32)
    for devices in (2, 4):
        mapped = sm.spmap(body, "i", devices=jax.devices()[:devices])
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            mapped(values)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            jax.eval_shape(mapped, values)
        with jax.disable_jit(), pytest.raises(ValueError, match=re.escape(message)):
            mapped(values)


@pytest.mark.parametrize("around", ["map", "vmap"])
def test_what_is_refused_of_several_axes(around):
    outer = sm.spmap if around == "map" else jax.vmap
    groups = [[0, 1], [2, 3]]

    def body(v):
        return lax.psum(v, ("y", "x"), axis_index_groups=groups)

    message = (
        "psum over axes 'y' and 'x' together of size 6: its axis_index_groups "
        "[[0, 1], [2, 3]] have 4 indices. Each index from 0 to 5 must be in one group."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        outer(sm.spmap(body, "y"), axis_name="x")(array(2, 3))


UNKNOWN = {
    "at once": lambda f, x: f(x),
    "in a loop": lambda f, x: lax.fori_loop(0, 3, lambda _, v: f(v), x),
    "in a branch": lambda f, x: lax.cond(x > 0, f, lambda v: v, x),
    "in checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "in a map inside": lambda f, x: sm.spmap(f, "y")(jnp.stack([x, x])),
    "in a vmap inside": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "in a derivative": lambda f, x: jax.jvp(f, (x,), (x,))[1],
}


@pytest.mark.parametrize("says_axis", [True, False])
@pytest.mark.parametrize("place", UNKNOWN)
def test_an_unknown_collective_is_refused(place, says_axis):
    pprod_p = pprod_primitive(says_axis)

    def body(v):
        return UNKNOWN[place](lambda v: pprod_p.bind(v, axes=("i",)), v)

    values = np.full(16, 2, np.float32)
    message = r"^pprod over axis 'i' of size 16: maps do not know this collective\. If"
    mapped = sm.spmap(body, "i")
    planned = functools.partial(sm.plan, mapped)
    by_parts = sm.spmap(body, "i", batch_size=1)
    uses = [jax.jit(mapped), jax.grad(mapped), mapped.explain, by_parts]
    for use in [mapped, *uses, sm.chunked(mapped, {0: 2}), planned]:
        with pytest.raises(NotImplementedError, match=message):
            use(values)


NEWER = [name for name in dir(lax) if name in ("psum_scatter_start", "ppermute_start")]


@pytest.mark.filterwarnings("ignore:jax.lax.psend is deprecated")
@pytest.mark.parametrize("name", ["psend", *NEWER])
def test_those_of_jax_that_maps_do_not_know_are_refused(name):
    args = {"psum_scatter_start": {"tiled": True}}.get(name, {"perm": [(0, 1)]})
    mapped = sm.spmap(lambda v: getattr(lax, name)(v, "i", **args), "i")
    with pytest.raises(NotImplementedError, match="over axis 'i' of size 4: maps do"):
        mapped(np.ones((4, 4), np.float32))


def test_a_primitive_over_the_axis_of_a_vmap_is_left_to_its_rule():
    pprod_p = pprod_primitive()
    mapped = sm.spmap(lambda v: pprod_p.bind(v, axes=("v",)), "i")
    both = jax.vmap(mapped, axis_name="v")(np.full((3, 16), 2, np.float32))
    np.testing.assert_array_equal(both, np.full((3, 16), 8))
