"""``spmap(batch_size=AUTO, memory=...)``: as many elements at once as fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm

ROWS = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)


def pairs(x):
    """Holds some 2 * 128 KiB for each element: XLA cannot fuse a sort."""
    wide = jnp.tile(x, 32)
    return jnp.sort(wide[:, None] * x[None], 0)[7].sum()


def batch_size(fun, *args):
    [equation] = jax.make_jaxpr(fun)(*args).eqns
    return equation.params["batch_size"]


def test_results_are_those_of_all_at_once():
    mapped = sm.spmap(pairs, batch_size=sm.AUTO, memory="1 MiB")
    expected = jax.vmap(pairs)(ROWS)
    np.testing.assert_allclose(jax.jit(mapped)(ROWS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.deep
def test_gradients_are_those_of_all_at_once():
    mapped = sm.spmap(pairs, batch_size=sm.AUTO, memory="1 MiB")
    gradient = jax.grad(lambda x: mapped(x).sum())
    expected = jax.grad(lambda x: jax.vmap(pairs)(x).sum())(ROWS)
    np.testing.assert_allclose(gradient(ROWS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.deep
def test_the_more_memory_the_more_elements_at_once():
    sizes = [
        batch_size(sm.spmap(pairs, batch_size=sm.AUTO, memory=memory), ROWS)
        for memory in ("200 KiB", "400 KiB", "800 KiB", "1 GB")
    ]
    assert sizes[-1] is None
    assert 1 <= sizes[0] < sizes[1] < sizes[2] < 8


@pytest.mark.parametrize(
    "element",
    [lambda x: jnp.tanh(x)[::-1], lambda x: (x * 2).sum()],
    ids=["reversed", "a sum"],
)
def test_arguments_and_results_are_not_counted(element):
    mapped = sm.spmap(
        element, batch_size=sm.AUTO, memory=1000, devices=jax.devices()[:1]
    )
    assert batch_size(mapped, ROWS) is None


def test_temporaries_are_within_the_memory():
    mapped = sm.spmap(pairs, memory="1 MiB", devices=jax.devices()[:1])
    compiled = jax.jit(mapped).lower(ROWS).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**20


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": sm.AUTO}, "batch_size=AUTO and memory= go together"),
        (
            {"memory": 9, "batch_size": 2},
            "batch_size=AUTO and memory= go together, but",
        ),
        ({"batch_size": sm.AUTO, "memory": "lots"}, "spmap memory must be a number"),
        (
            {"batch_size": sm.AUTO, "memory": 9, "lowering": "spmd"},
            "lowering='spmd' and batch_size=AUTO do not go together",
        ),
    ],
)
def test_options_that_do_not_fit(options, match):
    with pytest.raises(ValueError, match=match):
        sm.spmap(pairs, **options)


def test_too_little_memory_names_what_needs_it():
    mapped = sm.spmap(pairs, batch_size=sm.AUTO, memory="10 kB")
    with pytest.raises(
        ValueError,
        match=r"memory=9.8 KiB is too little for spmap of pairs: one element holds "
        r"[\d.]+ KiB at once besides its operands and results\. Give more, or map",
    ):
        mapped(ROWS)
