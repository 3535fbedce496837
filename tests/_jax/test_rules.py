"""JAX's tables of rules call ours with what they expect, on both ends."""

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax import rules

X = np.ones((2, 3), np.float32)


def identity(name):
    primitive = jex_core.Primitive(name)
    primitive.def_abstract_eval(lambda aval: aval)
    return primitive


def test_a_rule_is_told_of_the_vmap_where_nothing_is_batched_too():
    seen = []
    probe = identity("probe")

    def rule(vmap, args, dims, **params):
        seen.append((vmap, dims, params))
        return args[0], dims[0]

    rules.def_batching(probe, rule)
    mapped = jax.vmap(
        lambda x: (probe.bind(x, k=1), probe.bind(np.float32(1))),
        in_axes=1,
        out_axes=(0, None),
        axis_name="i",
        spmd_axis_name="mesh",
    )
    jax.make_jaxpr(mapped)(X)
    vmap = rules.Vmap("i", 3, ("mesh",))
    assert seen == [(vmap, (1,), {"k": 1}), (vmap, (None,), {})]


def test_dead_code_is_left_to_a_rule():
    asked = []
    probe = jex_core.Primitive("probe_of_two")
    probe.multiple_results = True
    probe.def_abstract_eval(lambda *avals: list(avals))

    def rule(used, equation):
        asked.append((list(used), equation.primitive))
        kept = [k for k, is_used in enumerate(used) if is_used]
        return list(used), equation.replace(
            invars=[equation.invars[k] for k in kept],
            outvars=[equation.outvars[k] for k in kept],
        )

    rules.def_dce(probe, rule)
    jaxpr = jax.make_jaxpr(lambda x, y: probe.bind(x, y))(1.0, 2.0).jaxpr
    pruned, used = rules.without_dead_code(jaxpr, [False, True])
    assert asked == [([False, True], probe)]
    assert used == [False, True]
    assert [len(e.invars) for e in pruned.eqns] == [1]
    assert pruned is not jaxpr


def test_a_checkpoint_splits_by_a_rule():
    asked = []
    probe = identity("probe_of_policies")

    def rule(policy, unknown, available, equation):
        asked.append((list(unknown), policy(equation.primitive)))
        return rules.Split(equation, None, [False], [False], equation.outvars)

    rules.def_partial_eval_custom(probe, rule)
    checkpoint = jax.checkpoint(lambda x: probe.bind(x) * x)
    equation = jax.make_jaxpr(checkpoint)(2.0).jaxpr.eqns[0]

    def saves(primitive, *_, **__):
        return primitive is probe

    split = rules.split_checkpoint(saves, [False], [False], equation)
    assert asked == [([False], True)]
    forward, backward = (
        [e.primitive.name for e in each.params["jaxpr"].eqns] for each in split[:2]
    )
    assert (forward, backward) == (["probe_of_policies", "mul"], ["mul"])
    assert split.saved
