"""What the first years' programs call by function compute what it computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap import compat
from shardmap.compat import ops, util


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ops.index_update, [1, 9, 9]),
        (ops.index_add, [1, 11, 12]),
        (ops.index_mul, [1, 18, 27]),
        (ops.index_min, [1, 2, 3]),
        (ops.index_max, [1, 9, 9]),
    ],
)
def test_updates(function, expected):
    x = np.array([1, 2, 3])
    np.testing.assert_array_equal(function(x, jnp.index_exp[1:], 9), expected)
    np.testing.assert_array_equal(x, [1, 2, 3])


def test_xla_computation_takes_static_arguments():
    made = ops.xla_computation(lambda x, n: x * n, static_argnums=1)(jnp.ones(3), 2)
    assert "multiply" in made.as_hlo_text()


def test_lists_must_be_equally_long():
    with pytest.raises(ValueError, match="shorter"):
        util.safe_map(max, [1, 2], [1])
    with pytest.raises(ValueError, match="longer"):
        util.safe_zip([1], [1, 2])


def test_tie_in_is_its_second_argument():
    assert jax.jit(lambda x: ops.tie_in(x, 2 * x))(3) == 6


A, B = (np.random.RandomState(k).randn(8, 3, 4).astype(np.float32) for k in (0, 1))


@pytest.mark.parametrize("mapped", [sm.spmap, jax.vmap])
def test_a_product_over_a_named_axis(mapped):
    def f(a, b):
        return ops.pdot(a, b, "i", pos_contract=((1,), (1,)), pos_batch=((0,), (0,)))

    result = mapped(f, axis_name="i", out_axes=None)(A, B)
    np.testing.assert_allclose(result, np.einsum("ijk,ijk->j", A, B), rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "operands", "expected"),
    [
        ("jk{i},lk{i}->jl", (A, B), "ijk,ilk->jl"),
        ("jk{i}, jk{i} -> k{i}j", (A, B), "ijk,ijk->ikj"),
        ("jk{i}->k", (A,), "ijk->k"),
        ("jk{i}->kj{i}", (A,), "ijk->ikj"),
    ],
)
def test_einsum_with_a_named_axis(spec, operands, expected):
    out_axes = 0 if "i" in spec.partition("->")[2] else None
    f = sm.spmap(lambda *xs: ops.xeinsum(spec, *xs), "i", out_axes=out_axes)
    result = np.einsum(expected, *operands)
    np.testing.assert_allclose(f(*operands), result, rtol=1e-4, atol=1e-5)


def test_einsum_with_several_named_axes():
    f = compat.xmap(
        lambda x, y: ops.xeinsum("{i,j},{k}->{i,k}", x, y),
        in_axes=(["i", "j"], ["k"]),
        out_axes=["i", "k"],
    )
    x, y = A[0], np.arange(5, dtype=np.float32)
    np.testing.assert_allclose(f(x, y), np.outer(x.sum(1), y), rtol=1e-5, atol=1e-6)
