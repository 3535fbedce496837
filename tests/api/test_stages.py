"""Lowering and compiling ahead of time, as `jax.jit` has them; and without jit."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.command_line import python
from tests.map_programs import both_lowerings

X = np.arange(8, dtype=np.float32)
MESH = sm.make_mesh({"a": 4})


def fun(w, y, *rest, scale=None, **more):
    result = {"a": (w * 2, y["hi"]), "b": [*rest, *more.values()]}
    return result if scale is None else (result, scale)


def kinds():
    return {
        "spmap": sm.spmap(fun, "i"),
        "spmd": sm.spmap(fun, "i", lowering="spmd"),
        "mesh_map": sm.mesh_map(fun, MESH, {"a": 0}, {"a": 0}),
        "sharded_jit": sm.sharded_jit(fun, (2,), (2,)),
    }


every_kind = pytest.mark.parametrize("kind", kinds())


def calls(kind):
    yield (X, {"hi": X}), {}
    yield (X, {"hi": X}, X, X), {}
    if kind != "mesh_map":
        yield (X, {"hi": X}), {"scale": {"s": X}, "other": X}
        yield (X,), {"y": {"hi": X}}


def names_in(lowered):
    """The names of arguments and results in the text."""
    text = lowered.as_text(debug_info=True)
    results = re.findall(r'jax.result_info = "([^"]*)"', text)
    head = next(line for line in text.splitlines() if "@main" in line)
    arguments = re.findall(r'%arg\d+: [^%]*?loc\("([^"]*)"\)', head)
    if not arguments:  # They stand at the end of the text.
        names = dict(re.findall(r'^(#loc\d*) = loc\("([^"]*)"\)', text, re.M))
        found = re.findall(r"%arg\d+: [^%]*?loc\((#loc\d+)\)", head)
        arguments = [names[number] for number in found]
    return arguments, results


@pytest.mark.few(1)
@every_kind
def test_names_in_the_text_are_those_of_jit(kind):
    for args, kwargs in calls(kind):
        lowered = kinds()[kind].lower(*args, **kwargs)
        expected = jax.jit(fun).lower(*args, **kwargs)
        assert names_in(lowered) == names_in(expected)
        assert names_in(lowered)[0][0] == "w"
        assert len(names_in(lowered)[1]) == len(jax.tree.leaves(expected.out_info))


def arguments_of(lowered):
    """What a program takes, without its shardings, which `jax.jit` has none of."""
    return jax.tree.map(
        lambda info: (info.shape, info.dtype, info._aval.weak_type, info.donated),
        lowered.args_info,
    )


@every_kind
def test_args_info_is_that_of_jit(kind):
    for args, kwargs in calls(kind):
        lowered = kinds()[kind].lower(*args, **kwargs)
        expected = jax.jit(fun).lower(*args, **kwargs)
        assert arguments_of(lowered) == arguments_of(expected)
        assert lowered.in_tree == jax.tree.structure((args, kwargs))


def test_args_info_with_static_and_donated_arguments():
    def scaled(n, x, y):
        return x * n + y

    mapped = sm.spmap(scaled, static_broadcasted_argnums=0, donate_argnums=2)
    expected = jax.jit(scaled, static_argnums=0, donate_argnums=2).lower(3, X, X)
    lowered = mapped.lower(3, X, X)
    assert arguments_of(lowered) == arguments_of(expected)
    assert names_in(mapped.lower(3, X, X)) == names_in(expected)
    np.testing.assert_array_equal(mapped(3, X, X + 0), 4 * X)


@every_kind
@pytest.mark.parametrize("weak_type", [False, True])
def test_abstract_values_are_arguments(kind, weak_type):
    abstract = jax.core.ShapedArray((8,), jnp.float32, weak_type=weak_type)
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, weak_type=weak_type)
    lowered = kinds()[kind].lower(abstract, {"hi": abstract})
    expected = kinds()[kind].lower(struct, {"hi": struct})
    assert arguments_of(lowered) == arguments_of(expected)
    assert lowered.as_text() == expected.as_text()
    assert (lowered.in_specs, lowered.out_specs) == (
        expected.in_specs,
        expected.out_specs,
    )
    traced = jax.jit(fun).lower(abstract, {"hi": abstract})
    assert arguments_of(lowered) == arguments_of(traced)


@every_kind
def test_a_compiled_map_names_the_argument_of_another_type(kind):
    compiled = kinds()[kind].lower(X, {"hi": X}).compile()
    integers = X.astype(np.int32)
    with pytest.raises(
        TypeError,
        match=r"'y\['hi'\]' compiled with float32\[8\] and called with int32\[8\]",
    ):
        compiled(X, {"hi": integers})
    with pytest.raises(TypeError, match=r"Argument 'w' compiled with"):
        compiled(integers, {"hi": X})


def test_a_function_without_a_signature():
    class Unknown:
        __signature__ = "none"

        def __call__(self, x):
            return x + 1

    mapped = sm.spmap(Unknown())
    np.testing.assert_array_equal(mapped.lower(X).compile()(X), X + 1)
    assert names_in(mapped.lower(X)) == names_in(jax.jit(Unknown()).lower(X))


@pytest.mark.usefixtures("young_heap")
def test_a_default_does_not_keep_the_function():
    class Held:
        pass

    def make():
        held = Held()

        def fun(x, y=held):
            return x

        sm.spmap(fun)(X)
        sm.spmap(fun).lower(X)
        return weakref.ref(held)

    held = make()
    gc.collect()
    assert held() is None


# Without jit


def passed(x, y):
    return x, y["k"], x.sum(), 3.0, np.float32(2)


@pytest.mark.few(1)
@both_lowerings
def test_results_without_jit_are_jax_arrays(spmap):
    with jax.disable_jit():
        results = [*spmap(passed)(X, {"k": X})]
        results += jax.jit(spmap(passed))(X, {"k": X})
        results += jax.vmap(spmap(passed))(X[None], {"k": X[None]})
        results += sm.mesh_map(lambda x: [x], MESH, {}, {})(X)
        results += sm.sharded_jit(passed, None, None, 2)(X, {"k": X})
    for result in results:
        assert isinstance(result, jax.Array)
        result.block_until_ready()
        assert result.sharding.device_set
    np.testing.assert_array_equal(results[0], X)
    np.testing.assert_array_equal(results[4], np.full(8, 2, np.float32))


@pytest.mark.deep
def test_import_without_jit():
    program = (
        "import numpy as np, shardmap as sm; print(sm.spmap(abs)(np.arange(3) - 1))"
    )
    run = python("-c", program, JAX_DISABLE_JIT="1")
    assert run.stdout == "[1 0 1]\n", run.stderr


@every_kind
def test_stages_without_jit(kind):
    args = X, {"hi": X}
    with jax.disable_jit():
        lowered = kinds()[kind].lower(*args)
        compiled = lowered.compile()
    result = compiled(*args)
    expected = kinds()[kind].lower(*args)
    assert arguments_of(lowered) == arguments_of(expected)
    np.testing.assert_array_equal(result["a"][0], 2 * X)
    assert result["a"][1].sharding == expected.compile()(*args)["a"][1].sharding
