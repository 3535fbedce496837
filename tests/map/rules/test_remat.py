"""`jax.checkpoint` of a map: policies look inside, as they do inside `jax.jit`."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import shardmap as sm
from tests.map_programs import both_lowerings

POLICIES = {
    "default": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "name": jax.checkpoint_policies.save_only_these_names("middle"),
    "other names": jax.checkpoint_policies.save_any_names_but_these("middle"),
    "sin": lambda primitive, *_, **__: str(primitive) == "sin",
}
X = np.linspace(0.1, 1, 24, dtype=np.float32).reshape(8, 3)
W = np.full((3, 3), 0.3, np.float32)


def layer(x, w):
    return jnp.sin(checkpoint_name(jnp.cos(x @ w), "middle")) @ w


def scanned(x, w):
    def step(carry, _):
        return jnp.sin(carry @ w), jnp.cos(carry)

    return lax.scan(step, x, None, length=3)[1].sum(0)


def branched(x, w):
    return lax.cond(
        x.sum() > 1, lambda x: jnp.sin(x @ w), lambda x: layer(jnp.cos(x), w), x
    )


FUNCTIONS = {
    "layer": layer,
    "scan": scanned,
    "cond": branched,
    "jit": lambda x, w: jax.jit(layer)(x, w) * x,
    "operands are residuals": lambda x, w: x * w[0] * w[1],
    "several results": lambda x, w: (jnp.sin(x), layer(x, w), x.sum()),
    "checkpoint": lambda x, w: jnp.cos(jax.checkpoint(layer)(x, w)),
}


def computed_backward(fun, *args):
    """How often each operation stands in the backward pass."""
    text = ""

    def trace(*args):
        nonlocal text
        results, backward = jax.vjp(fun, *args)
        text = str(jax.make_jaxpr(backward)(results))
        return results

    jax.make_jaxpr(trace)(*args)
    return {
        name: len(re.findall(rf" {name}[ \[]", text))
        for name in ("sin", "cos", "dot_general", "mul")
    }


def loss(fun, *args):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(fun(*args)))


def gradients(fun, *args):
    by_all = tuple(range(len(args)))
    return jax.grad(functools.partial(loss, fun), by_all)(*args)


def assert_trees_close(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), one, other)


@pytest.mark.few(1)
@pytest.mark.one_in(5)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_computed_again_is_what_jit_computes_again(fun, policy):
    mapped = jax.checkpoint(sm.spmap(fun, in_axes=(0, None)), policy=policy)
    element = jax.checkpoint(jax.jit(fun), policy=policy)
    # JAX 0.10's type checker refuses what its own vmap makes of a scan in parts.
    checks = jax.enable_checks(False) if fun is scanned else contextlib.nullcontext()
    with checks:
        assert computed_backward(mapped, X, W) == computed_backward(element, X[0], W)


SOME_POLICIES = pytest.mark.parametrize("policy", ["nothing", "everything", "name"])


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@both_lowerings
@SOME_POLICIES
@pytest.mark.parametrize("elements", [8, 5, 12])
def test_gradients(spmap, policy, elements):
    x = np.resize(X, (elements, 3))
    fun = FUNCTIONS["several results"]
    expected = gradients(jax.vmap(fun, (0, None)), x, W)
    mapped = jax.checkpoint(spmap(fun, in_axes=(0, None)), policy=POLICIES[policy])
    assert_trees_close(gradients(mapped, x, W), expected)
    jitted = jax.jit(functools.partial(gradients, mapped))
    assert_trees_close(jitted(x, W), expected)


@pytest.mark.deep
@pytest.mark.one_in(2)
@both_lowerings
@SOME_POLICIES
def test_nested_maps(spmap, policy):
    def program(mapping):
        def row(x, w):
            total = lax.psum(jnp.sin(x), ("i", "j"))
            return jnp.sin(checkpoint_name(jnp.cos(total * x), "middle") * w.sum())

        inner = mapping(row, axis_name="j", in_axes=(0, None))
        return mapping(inner, axis_name="i", in_axes=(0, None))

    x = X[:6, :2]
    mapped, expected = program(spmap), program(jax.vmap)
    remat = functools.partial(jax.checkpoint, policy=POLICIES[policy])
    assert_trees_close(gradients(remat(mapped), x, W), gradients(expected, x, W))
    # In a batch of `vmap` what does not differ is computed once, and counted alike.
    for name in ("sin", "cos"):
        counts = [computed_backward(remat(f), x, W)[name] for f in (mapped, expected)]
        assert counts[0] == counts[1]


def test_saved_arrays_are_mapped():
    x = jnp.asarray(X)
    shapes = {}
    for name in ("nothing", "name"):
        mapped = sm.spmap(layer, in_axes=(0, None))
        mapped = jax.checkpoint(mapped, policy=POLICIES[name])
        _, backward = jax.vjp(mapped, x, W)
        shapes[name] = sorted(leaf.shape for leaf in jax.tree.leaves(backward))
    assert shapes["nothing"] == [(3, 3), (8, 3)]
    assert shapes["name"] == [(3, 3), (8, 3), (8, 3)]


def test_a_map_is_traced_once_however_often_it_is_differentiated():
    traced = []

    def fun(x):
        traced.append(x)
        return jnp.sin(jnp.sin(x))

    mapped = jax.checkpoint(sm.spmap(fun), policy=POLICIES["sin"])
    for _ in range(3):
        gradients(mapped, X)
    assert len(traced) == 1


def test_taps_happen_once():
    seen = []

    def fun(x):
        return jnp.sin(sm.tap(lambda v: seen.append(float(v)), jnp.sin(x)))

    x = X[:, 0]
    mapped = sm.spmap(fun)
    for policy in (POLICIES["nothing"], POLICIES["everything"]):
        seen.clear()
        got = gradients(jax.checkpoint(mapped, policy=policy), x)
        sm.taps_barrier()
        np.testing.assert_allclose(sorted(seen), np.sort(np.sin(x)), rtol=1e-6)
        assert_trees_close(got, gradients(jax.vmap(lambda x: jnp.sin(jnp.sin(x))), x))


OFFLOADS = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["middle"],
    offload_src="device",
    offload_dst="pinned_host",
)


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("size", [8, 12])
def test_what_a_policy_offloads_is_saved_on_the_host(spmap, size):
    x = np.resize(X, (size, *X.shape[1:]))
    mapped = spmap(layer, in_axes=(0, None))
    inside = spmap(jax.checkpoint(layer, policy=OFFLOADS), in_axes=(0, None))
    expected = gradients(jax.vmap(layer, (0, None)), x, W)
    for fun in (jax.checkpoint(mapped, policy=OFFLOADS), inside):
        both = functools.partial(gradients, fun)
        assert_trees_close(jax.jit(both)(x, W), expected)
        on_host = [
            var.aval.shape
            for equation in jax.make_jaxpr(both)(x, W).eqns
            for var in equation.outvars
            if var.aval.memory_space == jax.memory.Space.Host
        ]
        assert on_host == [(size, 3)]
    outside = jax.checkpoint(mapped, policy=OFFLOADS)
    saves = jax.checkpoint(jax.jit(layer), policy=POLICIES["name"])
    assert computed_backward(outside, x, W) == computed_backward(saves, x[0], W)


@pytest.mark.few(1)
@both_lowerings
def test_results_and_arguments_on_the_host(spmap):
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    to_host = spmap(lambda x: jax.device_put(x, host))
    to_device = spmap(lambda x: jax.device_put(x, device) + 1)
    x = X[:, 0]
    for call in (lambda f: f, jax.jit):
        there = call(to_host)(x)
        assert there.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(there, x)
        back = call(to_device)(there)
        assert back.sharding.memory_kind == "device"
        np.testing.assert_array_equal(back, x + 1)


def test_a_policy_is_asked_for_what_is_in_the_map():
    asked = []

    def policy(primitive, *_, **__):
        asked.append(str(primitive))
        return False

    gradients(jax.checkpoint(sm.spmap(jnp.sin), policy=policy), X)
    assert "sin" in asked or "cos" in asked
    assert "spmap" not in asked
