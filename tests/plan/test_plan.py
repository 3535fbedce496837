"""The plan as users see it: cuts in, shards out, reasons told."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.api.spmap import spmap
from shardmap.plan.in_slices import EACH
from shardmap.plan.notation import register_rule
from shardmap.plan.plan import plan
from tests.plan.lax.test_rules import assert_same
from tests.plan.plan_programs import X, Y


def iota(*shape, dtype=np.int32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def check(fun, *args, in_slices, shards=None, stages=1, want=None):
    """Runs the plan, compares it with the function, and returns it."""
    made = plan(fun, *args, in_slices=in_slices)
    got = made.run(*args)
    assert_same(got, jax.jit(fun)(*args))
    if want is not None:
        np.testing.assert_array_equal(got, want)
    if shards is not None:
        assert made.num_shards == len(made.shards) == shards
    assert len(made.stages) == stages
    return made


def slices(*pairs):
    return tuple(slice(*pair) for pair in pairs)


# The cases of this plan's ancestor, with its numbers.


def test_transpose_squeeze_batched_dot():
    left = iota(2, 2, 3, dtype=np.float32)
    right = iota(1, 1, 3, 2, 2, dtype=np.float32) + 10

    def fun(left, right):
        x = jnp.transpose(left + jnp.ones((1, 1, 1)), (0, 2, 1))
        y = jnp.squeeze(right - 1, (0, 1))
        return jax.lax.dot_general(x, y, (((2, 1), (1, 0)), ((), ())))

    made = check(
        fun,
        left,
        right,
        in_slices=({0: (2,), 1: (2,)}, {4: EACH}),
        shards=2,
        want=[[319, 340], [823, 880]],
    )
    whole = slices((0, 2), (0, 2), (0, 3))
    for k, shard in enumerate(made.shards):
        first = slices((0, 1), (0, 1), (0, 3), (0, 2), (k, k + 1))
        assert shard.in_slices == (whole, first)


def test_add_a_value_to_itself():
    t = iota(3, 3)
    made = check(lambda x: x + x, t, in_slices=({0: EACH, 1: EACH},), shards=9)
    for k, shard in enumerate(made.shards):
        [read, _] = shard.args(t)
        assert read.tolist() == [[k]]


def test_cosine_of_rows():
    made = check(jnp.cos, iota(3, 3), in_slices=({0: EACH},), shards=3)
    assert [s.in_slices for s in made.shards] == [
        (slices((k, k + 1), (0, 3)),) for k in range(3)
    ]
    assert made.run(iota(3, 3)).dtype == np.float32


def test_dot_in_rows_and_columns():
    made = check(
        jnp.dot,
        iota(3, 2),
        iota(2, 3),
        in_slices=({0: EACH}, {1: EACH}),
        shards=9,
        want=[[3, 4, 5], [9, 14, 19], [15, 24, 33]],
    )
    assert [s.out_slices for s in made.shards] == [
        slices((i, i + 1), (j, j + 1)) for i in range(3) for j in range(3)
    ]


@pytest.mark.parametrize(
    ("fun", "shape", "shards"),
    [
        (lambda x: x + 1, (4,), 4),
        (lambda x: x + jnp.array([1]), (4,), 4),
        (lambda x: x + jnp.array([1, 1, 1, 1]), (4,), 4),
        (lambda x: jnp.squeeze(x, (0, 1)), (1, 1, 4), 4),
        (lambda x: jnp.transpose(x, (2, 0, 1)), (2, 3, 4), 24),
    ],
)
def test_each_element_alone(fun, shape, shards):
    check(fun, iota(*shape), in_slices=EACH, shards=shards)


def vectors(*values):
    return [np.array(value, np.float32) for value in values]


def test_a_dot_and_what_follows():
    a, b = vectors([1, 2], [3, 4])

    def fun(a, b):
        return jnp.dot(a + b, a - b) * 2 / 4

    # Linear in the partial result: one stage is enough where two were needed.
    made = check(fun, a, b, in_slices=EACH, shards=2, want=-10)
    assert made.shards[0].combiner == "add"
    check(lambda a, b: jnp.tanh(fun(a, b)), a, b, in_slices=EACH, stages=2)


def test_a_dot_a_sum_and_what_follows():
    args = vectors([[1, 2]], [[3], [4]], [5, 6])

    def fun(a, b, c):
        w = jnp.dot(a + b, a - b) * 2
        return jnp.sum(w) + w - c[None]

    # Three stages were needed; here sum(w) + w is linear in the parts of w.
    check(
        fun,
        *args,
        in_slices=EACH,
        stages=2,
        want=[[-215, -198], [-225, -204]],
    )


@pytest.mark.parametrize(
    ("in_slices", "shards"),
    [
        (({0: EACH, 1: (3,)}, {0: (3,), 1: EACH}), 4),
        ((EACH, {0: (3,), 1: EACH}), 12),
        (({0: EACH, 1: (3,)}, EACH), 12),
    ],
)
def test_a_dot_with_and_without_cut_contraction(in_slices, shards):
    a = iota(2, 3, dtype=np.float32) + 1
    b = iota(3, 2, dtype=np.float32) + 1

    def fun(a, b):
        return jnp.dot(a + 1, b - 2) * 3 / 4

    want = [[9.75, 16.5], [16.5, 30]]
    made = check(fun, a, b, in_slices=in_slices, shards=shards, want=want)
    if shards == 4:
        shapes = [[read.shape for read in s.args(a, b)[:-1]] for s in made.shards]
        assert shapes == [[(1, 3), (3, 1)]] * 4


def test_not_of_a_sum():
    a, b = vectors([[1, 0], [2, 3]], [[1, -1], [2, 3]])

    def fun(a, b):
        summed = jnp.sum(b + 1, axis=1)
        return jnp.logical_not(summed).astype(jnp.float32)[None] - a

    def inline(a, b):
        negate = jax.jit(lambda s: jnp.logical_not(s).astype(s.dtype))
        return negate(jnp.sum(b + 1, axis=1))[None] - a

    check(fun, a, b, in_slices=EACH, stages=2)
    check(inline, a, b, in_slices=EACH, stages=2)


def test_two_workers():
    a, b = iota(2, 3) + 1, iota(3, 2) + 1
    made = check(
        lambda a, b: (a + 1) * jnp.transpose(b - 2),
        a,
        b,
        in_slices=({0: EACH, 1: (3,)}, {0: (3,)}),
        shards=2,
    )
    first, second = (np.asarray(s.function(*s.args(a, b))[0]) for s in made.shards)
    np.testing.assert_array_equal(first, [[-2, 3, 12]])
    np.testing.assert_array_equal(second, [[0, 12, 28]])
    assert [s.out_slices for s in made.shards] == [
        slices((0, 1), (0, 3)),
        slices((1, 2), (0, 3)),
    ]


def test_ragged_pieces_of_one_operand():
    a, b = iota(3, 1, dtype=np.float32), iota(1, 3, dtype=np.float32)
    made = check(
        lambda a, b: jnp.cos(a) + jnp.sin(b),
        a,
        b,
        in_slices=(None, {1: [(0, 1), (1, 3)]}),
        shards=2,
    )
    assert made.out_slices == {1: [(0, 1), (1, 3)]}


# The ancestor's holes.


def test_free_axes_of_a_batched_dot():
    x, y = iota(2, 3, 4), iota(2, 4, 5)
    made = check(jnp.matmul, x, y, in_slices=({0: EACH, 1: EACH}, {0: EACH}), shards=6)
    assert made.shards[0].out_slices == slices((0, 1), (0, 1), (0, 5))


def test_a_full_contraction_to_a_scalar():
    made = check(jnp.vdot, iota(6), iota(6), in_slices=EACH, shards=6, want=55)
    assert made.shards[3].out_slices == ()


def test_a_value_and_its_transpose():
    made = check(lambda x: x + x.T, iota(4, 4), in_slices=({0: 2, 1: 2},), shards=4)
    apart = made.shards[1].in_slices[0]
    assert apart == [slices((0, 2), (2, 4)), slices((2, 4), (0, 2))]
    assert made.cut_fraction <= 0.5


def test_an_unused_argument_is_not_read():
    class Unreadable:
        shape, dtype = (4,), np.dtype(np.float32)

        def __getitem__(self, index):
            raise AssertionError("this was read")

    x = iota(4, dtype=np.float32)
    made = plan(lambda a, b, c: a * 2 + c, x, Unreadable(), x, in_slices=EACH)
    np.testing.assert_array_equal(made.run(x, Unreadable(), x), x * 3)
    assert made.shards[0].in_slices[1] is None


def test_cut_contractions_are_summed():
    made = check(jnp.dot, X, X.T.copy(), in_slices=({1: 3}, None), shards=3)
    assert made.shards[0].combiner == "add"
    check(jnp.dot, X, X.T.copy(), in_slices=({1: 2}, {0: 3}), shards=4)


def test_different_cuts_are_refined():
    made = check(jnp.add, X, Y, in_slices=({0: 2}, {0: (3, 5)}), shards=3)
    assert made.out_slices == {0: [(0, 3), (3, 4), (4, 8)]}


# What else a plan promises.


def test_neighbours_are_read_once():
    made = check(lambda x: x[1:] - x[:-1], iota(9), in_slices=({0: 3},), shards=3)
    assert [s.in_slices[0] for s in made.shards] == [
        slices((0, 3)),
        slices((2, 6)),
        slices((5, 9)),
    ]


def test_constants_are_cut_too():
    constant = jnp.asarray(Y)
    made = check(lambda x: x * constant, X, in_slices=({0: 4},), shards=4)
    assert made.cut_fraction == 0.25


def test_positions_are_arguments_so_that_shards_share_a_function():
    made = check(lambda x: x + jnp.arange(12.0), iota(12) * 1.0, in_slices=({0: EACH},))
    assert len({shard.function for shard in made.shards}) == 1
    edges = check(
        lambda x: jnp.convolve(x, jnp.ones(3)), iota(12) * 1.0, in_slices=EACH
    )
    assert len({shard.function for shard in edges.shards}) < 7


def test_two_stages_pass_what_the_second_needs():
    def fun(x, w):
        y = x @ w
        return jnp.exp(y - y.max(0)[None]).sum(0)

    made = check(fun, X, Y[:6], in_slices=({0: 4}, None), stages=2, shards=8)
    # The product is kept, not computed again: the second stage does not read x.
    assert made.stage_shards(1)[0].in_slices == (None, None)


def test_a_cheap_value_is_computed_again():
    made = check(
        lambda x: jnp.exp(x - x.max(0)[None]), X, in_slices=({0: 4},), stages=2
    )
    assert made.stage_shards(1)[0].in_slices == (slices((0, 2), (0, 6)),)


def test_shards_in_a_loop():
    made = plan(jnp.dot, X, Y.T.copy(), in_slices=({0: 2, 1: 2}, None))
    acc = None
    for shard in made.shards:
        acc = shard.reduce(shard.function(*shard.args(X, Y.T)), acc)
    np.testing.assert_allclose(acc, X @ Y.T, rtol=1e-5)


def test_shards_of_several_stages_in_a_loop():
    made = plan(jax.nn.softmax, X, in_slices=({1: 2},))
    acc = None
    for shard in made.shards:
        acc = shard.reduce(shard.function(*shard.args(X, values=acc)), acc)
    np.testing.assert_allclose(acc.result(), jax.nn.softmax(X), rtol=1e-5)
    with pytest.raises(ValueError, match=r"give args.*values=acc"):
        made.shards[-1].args(X)


def test_trees_scalars_and_repeated_outputs():
    def fun(tree, scale):
        x, y = tree["x"], tree["y"]
        return {"sum": x + y * scale, "x": x, "again": x, "three": 3, "row": y.sum(0)}

    args = ({"x": X, "y": Y}, 2.0)
    check(fun, *args, in_slices=({"x": {0: 2}, "y": {-1: 3}}, None))
    check(fun, *args, in_slices=({0: 4}, None))


def test_keys_come_out_as_keys():
    def fun(key):
        return jax.vmap(lambda k: jax.random.fold_in(k, 1))(key)

    keys = jax.random.split(jax.random.key(0), 6)
    made = plan(fun, keys, in_slices=({0: 3},))
    got = made.run(keys)
    assert got.dtype == keys.dtype
    assert (jax.random.key_data(got) == jax.random.key_data(fun(keys))).all()


def test_empty_arrays_and_axes_of_one():
    empty = np.zeros((0, 3), np.float32)
    check(lambda x: (x.sum(0), x * 2), empty, in_slices=({0: 4, 1: 3},))
    check(lambda x: x.sum() + 1, iota(1, 1), in_slices=EACH, shards=1)


def test_a_map_in_a_plan_and_a_shard_in_a_map():
    mapped = spmap(lambda x: x * 2 + jnp.arange(6.0))
    check(mapped, X, in_slices=({0: 2, 1: 2},), shards=4)
    summed = spmap(lambda x: x - jax.lax.psum(x, "i"), axis_name="i")
    check(summed, X, in_slices=({0: 2, 1: 2},), shards=2)

    [shard] = plan(jnp.tanh, X[0], in_slices=None).shards
    starts = shard.args(X[0])[-1]
    [out] = spmap(lambda x: shard.function(x, starts))(X)
    np.testing.assert_allclose(out, np.tanh(X), rtol=1e-6)


def test_what_has_a_shape_is_enough_to_plan():
    x = jax.ShapeDtypeStruct((10**6, 1000), np.float32)
    made = plan(lambda x: jnp.tanh(x).sum(0), x, in_slices=({0: 100_000},))
    assert made.num_shards == 100_000
    assert made.shards[-1].in_slices == (slices((999_990, 10**6), (0, 1000)),)
    assert made.peak_bytes == 10 * 1000 * 4 + 1000 * 4


def test_double_precision_arguments_are_taken_as_jax_takes_them():
    check(lambda x: x * 2, X.astype(np.float64), in_slices=({0: 2},))


def test_explain_and_str():
    def fun(x, w):
        return jnp.sort(x @ w, 0), x.sum(0)

    made = plan(fun, X, Y[:6], in_slices=({0: 2, 1: 3}, None))
    text = made.explain()
    for line in (
        "args[0]: float32[8, 6]",
        "axis 0: asked to be cut into 2 pieces of 4",
        "gives parts of result[1], combined by add",
        "reaches axis 0 of result[1]",
        "ends at sort",
        "test_plan.py",
        "(cut another axis)",
        "axis 0: whole, as asked",
    ):
        assert line in text
    assert f"ShardPlan: {made.num_shards} shards" in str(made)
    assert text == plan(fun, X, Y[:6], in_slices=({0: 2, 1: 3}, None)).explain()


@pytest.mark.parametrize(
    ("in_slices", "kind", "message"),
    [
        (({5: 2}, None), ValueError, r"args\[0\] of shape \(8, 6\), axis 5.*only 2"),
        (({0: 2.5}, None), TypeError, "must be an integer, got 2.5"),
        (({0: (3, 3)}, {0: 0}), ValueError, r"sum to 6(.|\n)*at least 1, got 0"),
        (({"a": 2}, None), TypeError, "an axis must be an int"),
        ((4, None), TypeError, r"in_slices\[0\] is 4"),
        (({0: 2},), ValueError, "a sequence of 2 of them"),
    ],
)
def test_bad_cuts_are_named(in_slices, kind, message):
    with pytest.raises(kind, match=message):
        plan(jnp.add, X, Y, in_slices=in_slices)


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="what has a shape and a dtype, got 'x'"):
        plan(lambda x: x, "x")
    made = plan(jnp.sin, X, in_slices=({0: 2},))
    with pytest.raises(ValueError, match=r"shape of \(8, 6\) in args\[0\]"):
        made.run(X[:4])
    with pytest.raises(ValueError, match="arguments of the structure"):
        made.run(X, X)


def test_effects_are_refused_by_name():
    def fun(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ValueError, match=r"debug_callback|debug_print"):
        plan(fun, X, in_slices=({0: 2},))


# Rules of users.


def new_primitive(name, shape_rule, function):
    from jax.interpreters import mlir

    primitive = jex_core.Primitive(name)
    primitive.def_abstract_eval(
        lambda *xs: jax.core.ShapedArray(shape_rule(*xs), xs[0].dtype)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    return primitive


def test_an_unknown_primitive_is_whole_until_it_has_a_rule():
    outer_p = new_primitive(
        "outer", lambda x, y: (*x.shape, *y.shape), lambda x, y: jnp.outer(x, y)
    )
    x, y = X[:, 0], Y[0]
    in_slices = ({0: 4}, {0: 2})
    made = check(outer_p.bind, x, y, in_slices=in_slices, shards=1)
    assert "there is no rule for outer (register_rule gives it one)" in made.explain()
    register_rule(outer_p, "i, j -> i j")
    check(outer_p.bind, x, y, in_slices=in_slices, shards=8)
    register_rule(outer_p, lambda node: "i, * -> i *")
    check(outer_p.bind, x, y, in_slices=in_slices, shards=4)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("i j", "has the form"),
        ("i j -> i; j plus", "must be an axis and one of"),
        ("i j -> i; i add", "'i' is not summed over"),
    ],
)
def test_bad_rules_are_refused_when_they_are_registered(rule, message):
    with pytest.raises(ValueError, match=message):
        register_rule(jex_core.Primitive("never"), rule)


def test_a_rule_is_text_or_a_function():
    with pytest.raises(TypeError, match="text or a function of an equation, got 3"):
        register_rule(jex_core.Primitive("never"), 3)


def test_a_rule_that_does_not_fit_is_named():
    one_p = new_primitive("one", lambda x: x.shape, lambda x: x)
    register_rule(one_p, "i -> i")
    with pytest.raises(ValueError, match="does not fit the shape"):
        plan(one_p.bind, X)
    register_rule(one_p, "i j, k -> i j")
    with pytest.raises(ValueError, match="has 2 operands, the equation 1"):
        plan(one_p.bind, X)
