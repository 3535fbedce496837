"""Collectives of one's own, which `register_collective` tells of."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

import shardmap as sm
from tests.map.collectives.pprod import AXIS_EFFECT, pprod_primitive
from tests.map.map_checks import array
from tests.map_programs import assert_same, both_lowerings, same_under_vmap


def registered(combiner):
    """The product over axes, as a collective that is registered."""
    primitive = pprod_primitive(says_axis=combiner is not None)
    sm.register_collective(primitive, combiner)
    return lambda x, *names: primitive.bind(x, axes=names)


@pytest.fixture(scope="module", params=["mul", None], ids=["combiner", "vmap"])
def pprod(request):
    return registered(request.param)


TWOS = np.full(16, 2, np.float32)


@pytest.mark.few(1)
@both_lowerings
def test_all_elements_are_in_the_product(spmap, pprod):
    mapped = spmap(lambda x: pprod(x, "i"), "i")
    for use in (mapped, jax.jit(mapped)):
        np.testing.assert_array_equal(use(TWOS), np.full(16, 65536))


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [1, 17])
@both_lowerings
def test_of_axes_of_any_length(spmap, pprod, size):
    def body(x):
        return pprod(x, "i") + x

    x = array(size, 2)
    expected = jax.vmap(body, axis_name="i")(x)
    assert_same(spmap(body, "i")(x), expected)
    assert_same(spmap(body, "i", devices=jax.devices()[:1])(x), expected)


def test_in_parts_of_a_block():
    pprod = registered("mul")
    mapped = sm.spmap(lambda x: pprod(x, "i"), "i", batch_size=1, out_axes=None)
    assert mapped(TWOS) == 65536
    x = np.linspace(0.5, 1.5, 40, dtype=np.float32)
    np.testing.assert_allclose(mapped(x), np.prod(x), rtol=1e-5)


PLACES = {
    "in a loop": lambda f, x: lax.fori_loop(0, 2, lambda _, v: f(v) + x, x),
    "in a branch": lambda f, x: lax.cond(f(x) > 0, f, lambda v: -v, x),
    "in checkpoint": lambda f, x: jax.checkpoint(lambda v: f(jnp.sin(v)))(x),
    "in a vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x + 1])),
    "its derivative": lambda f, x: jax.jvp(f, (x,), (x,))[1],
}


@pytest.mark.few(7)
@pytest.mark.parametrize("place", PLACES)
@both_lowerings
def test_wherever_it_is_used(spmap, pprod, place):
    def body(x):
        return PLACES[place](lambda v: pprod(v, "i"), x)

    x = array(12)
    expected = jax.jit(jax.vmap(body, axis_name="i"))(x)
    assert_same(spmap(body, "i")(x), expected)


@pytest.mark.few(1)
@both_lowerings
def test_derivatives_of_the_map(spmap, pprod):
    def loss(map_, x):
        return map_(lambda v: pprod(v, "i") * v, axis_name="i")(x).sum()

    x = array(12)
    for derivative in (jax.grad, jax.jacfwd):
        expected = jax.jit(derivative(functools.partial(loss, jax.vmap)))(x)
        assert_same(derivative(functools.partial(loss, spmap))(x), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("x",), ("y",), ("x", "y"), ("y", "x")])
def test_of_several_axes(pprod, names):
    def build(map_):
        def body(v):
            return pprod(v, *names) + v

        return map_(map_(body, axis_name="y"), axis_name="x")

    same_under_vmap(build, array(5, 3))


def test_the_map_may_be_in_a_vmap(pprod):
    mapped = sm.spmap(lambda x: pprod(x, "i", "v"), "i")
    both = jax.vmap(mapped, axis_name="v")(np.full((3, 4), 2, np.float32))
    np.testing.assert_array_equal(both, np.full((3, 4), 2**12))


@pytest.mark.few(1)
@pytest.mark.parametrize("levels", [1, 2])
def test_plans_cut_what_is_beside_the_mapped_axis(pprod, levels):
    def mapped(x):
        def over(x):
            return pprod(x, "i")

        return sm.spmap(over if levels == 1 else sm.spmap(over, "j"), "i")(x)

    x = array(4, 6)
    expected = np.broadcast_to(np.prod(x, 0), x.shape)
    made = sm.plan(mapped, x, in_slices={1: 3})
    assert made.num_shards == 3
    np.testing.assert_allclose(made.run(x), expected, rtol=1e-6)
    np.testing.assert_allclose(sm.chunked(mapped, {1: 3})(x), expected, rtol=1e-6)


@pytest.mark.parametrize("size", [8, 16])
def test_explain_tells_what_is_sent_and_for_which_line(pprod, size):
    [sent] = sm.spmap(lambda x: pprod(x, "i"), "i").explain(TWOS[:size]).collectives
    assert (sent.kind, sent.group_size) == ("all-gather", 8)
    assert "test_registered.py" in sent.source


OPERATORS = {
    **{"add": operator.add, "and": operator.and_, "max": max, "min": min},
    **{"mul": operator.mul, "or": operator.or_, "xor": operator.xor},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("combiner", OPERATORS)
def test_each_combiner(combiner):
    own_p = Primitive(f"own_{combiner}")
    own_p.def_effectful_abstract_eval(
        lambda x, *, axis_name, axis_index_groups: (x, {AXIS_EFFECT(axis_name)})
    )
    sm.register_collective(own_p, combiner)

    def over(x, groups=None):
        return own_p.bind(x, axis_name="i", axis_index_groups=groups)

    x = np.random.default_rng(0).integers(-5, 5, 11, np.int32)
    expected = functools.reduce(OPERATORS[combiner], x)
    for size in (None, 1):
        mapped = sm.spmap(over, "i", batch_size=size, out_axes=None)
        np.testing.assert_array_equal(mapped(x), expected)
    groups = ((0, 2, 10), (1,), (3, 4, 5, 6, 7, 8, 9))
    grouped = sm.spmap(functools.partial(over, groups=groups), "i")(x)
    for group in groups:
        expected = functools.reduce(OPERATORS[combiner], x[list(group)])
        np.testing.assert_array_equal(grouped[group[0]], expected)


def test_one_of_several_arrays_goes_by_its_batching_rule():
    swap_p = Primitive("swap_with_next")
    swap_p.multiple_results = True

    def batch(axis_data, operands, dims, *, axis_name):
        assert axis_data.name == axis_name
        x, y = map(jnp.moveaxis, operands, dims, (0, 0))
        return (jnp.roll(y, 1, 0), jnp.roll(x, -1, 0)), (0, 0)

    swap_p.def_abstract_eval(lambda x, y, *, axis_name: (y, x))
    batching.fancy_primitive_batchers[swap_p] = batch
    sm.register_collective(swap_p)
    same_under_vmap(
        lambda map_: map_(lambda x, y: swap_p.bind(x, y, axis_name="i"), axis_name="i"),
        array(11),
        array(11, 2),
    )


def test_a_combiner_is_of_one_array():
    scaled_p = Primitive("scaled")
    scaled_p.def_abstract_eval(lambda x, *, axes, factor: x)
    sm.register_collective(scaled_p, "mul")
    mapped = sm.spmap(lambda x: scaled_p.bind(x, axes=("i",), factor=2), "i")
    message = (
        r"^scaled over axis 'i' of size 16 .* has 1 arrays and the parameters "
        r"\['axes', 'factor'\]. Register it without combiner=.$"
    )
    with pytest.raises(ValueError, match=message):
        mapped(TWOS)


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"takes a jax.extend.core.Primitive, got <"):
        sm.register_collective(lax.psum)
    with pytest.raises(ValueError, match="psum is a collective already"):
        sm.register_collective(jax.extend.core.primitives.psum_p)
    with pytest.raises(ValueError, match="combiner='sum', which is not one of add, an"):
        sm.register_collective(Primitive("own"), "sum")
