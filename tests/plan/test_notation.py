"""Rules of users, as text."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

from shardmap.planning.notation import register_rule, rules_of
from shardmap.planning.plan import plan
from tests.plan.checks import check
from tests.plan.plan_programs import X, Y


def new_primitive(name, shape_rule, function):

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
    shard_plan = check(outer_p.bind, x, y, in_slices=in_slices, shards=1)
    assert "there is no rule for outer (register_rule gives it one; " in str(
        shard_plan.explain()
    )
    register_rule(outer_p, "i, j -> i j")
    check(outer_p.bind, x, y, in_slices=in_slices, shards=8)
    register_rule(outer_p, lambda node: "i, * -> i *")
    check(outer_p.bind, x, y, in_slices=in_slices, shards=4)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("i j", "has the form"),
        ("i -> -> j", "has the form"),
        ("i j -> i; j plus", "must be an axis and one of"),
        ("i j -> i; i add", "'i' is not summed over"),
        ("a -> b", r"have the axis 'b' in the rule 'a -> b', .* write \* for an axis"),
        ("* -> ...", r"the results have the axis '...' in the rule"),
        ("~a -> a", r"'~a' in the rule '~a -> a' is no axis: give a name, \* or ..."),
        ("i j -> i; j add; j max", "combines 'j' both by add and by max: give one"),
    ],
)
def test_bad_rules_are_refused_when_they_are_registered(rule, message):
    with pytest.raises(ValueError, match=message):
        register_rule(jex_core.Primitive("never"), rule)


def test_a_rule_is_text_or_a_function():
    with pytest.raises(TypeError, match="text or a function of an equation, got 3"):
        register_rule(jex_core.Primitive("never"), 3)


def test_a_rule_that_contradicts_the_primitive_is_refused():
    same_p = new_primitive("same", lambda x: x.shape, lambda x: x)
    register_rule(same_p, "i j -> j i")
    with pytest.raises(ValueError, match=r"'i j -> j i' of same does not fit: axis '"):
        plan(same_p.bind, X)
    shard_plan = plan(same_p.bind, X[:6], in_slices={0: 2})
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"the rule 'i j -> j i' of same says that a piece of its result has the "
        r"shape \(6, 3\), but the primitive gives \(3, 6\): correct the rule",
    ):
        shard_plan.run(X[:6])
    register_rule(same_p, lambda node: 3)
    with pytest.raises(TypeError, match="is the rule of same must return text such as"):
        plan(same_p.bind, X)


def test_a_rule_that_fails_is_named():
    failing_p = new_primitive("failing", lambda x: x.shape, lambda x: x)
    register_rule(failing_p, lambda node: node.params["axis"])
    with pytest.raises(
        ValueError,
        match=r"registered for failing failed for .* \[\(8, 6\)\]: KeyError: 'axis'",
    ):
        plan(failing_p.bind, X, in_slices={0: 2})


def test_a_rule_that_does_not_fit_is_named():
    one_p = new_primitive("one", lambda x: x.shape, lambda x: x)
    register_rule(one_p, "i -> i")
    with pytest.raises(ValueError, match="does not fit the shape"):
        plan(one_p.bind, X)
    register_rule(one_p, "i j, k -> i j")
    with pytest.raises(ValueError, match="has 2 operands, the equation 1"):
        plan(one_p.bind, X)


def test_the_rules_of_a_function_as_text():
    def fun(x, w):
        return jnp.sort(x[1:] @ w + 1, 0)

    assert rules_of(fun, X, Y[:6]).splitlines() == [
        "slice: a~ b -> a b",
        "dot_general: a b, b c -> a c; b add",
        "add: a b,  -> a b",
        "sort: * a -> * a",
    ]
