"""`pmap` as `jax.pmap` was: its parameters, and its results without a mapped axis."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap import compat

X = np.arange(1, 9, dtype=np.float32)


def test_it_is_spmap():
    f = compat.pmap(lambda x: x / jax.lax.psum(x, "i"), axis_name="i")
    np.testing.assert_allclose(f(np.ones(8)), np.full(8, 1 / 8))
    assert type(f) is type(sm.spmap(abs))


def test_global_arg_shapes_are_those_of_one_process(monkeypatch):
    f = compat.pmap(abs, global_arg_shapes=((8,),))
    np.testing.assert_array_equal(f(-X), X)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = r"pmap takes no global_arg_shapes over 2 processes\. Leave it out, and make"
    with pytest.raises(ValueError, match=text):
        compat.pmap(jnp.sin, global_arg_shapes=((8,),))


def test_a_map_is_of_the_devices_that_are_here_whatever_a_test_says(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda *_: 1)
    np.testing.assert_array_equal(compat.pmap(jnp.abs)(-X), X)


RESULTS = {
    "numbers": lambda x: 3 * x,
    "bools": lambda x: x < 2,
    "trees": lambda x: {"a": (x, jnp.full(2, x)), "b": jnp.int32(x)},
    "not finite": lambda x: x / (x - 2),
    "agreed": lambda x: (jax.lax.psum(x, "i"), -x),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_result_without_an_axis_is_that_of_the_first_element(name, around):
    fun = RESULTS[name]
    f = around(compat.pmap(fun, "i", out_axes=None))
    first = jax.tree.map(lambda y: y[0], jax.vmap(fun, axis_name="i")(X))
    with pytest.warns(UserWarning, match="The result is that of element 0"):
        result = f(X)
    jax.tree.map(np.testing.assert_array_equal, result, first)
    assert jax.tree.map(jnp.result_type, result) == jax.tree.map(jnp.result_type, first)


def test_results_with_an_axis_keep_it():
    f = compat.pmap(lambda x: (x, {"a": -x}), out_axes=(0, None))
    with pytest.warns(UserWarning, match=r"result\[1\]\['a'\] of"):
        rows, first = f(X)
    np.testing.assert_array_equal(rows, X)
    assert first == {"a": -1}


def test_one_warning_names_the_line_and_the_edit():
    program = "import jax\nf = pmap(lambda x: 2 * x,\n         out_axes=None)\n"
    space = {"pmap": compat.pmap}
    exec(compile(program, "program.py", "exec"), space)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [space["f"](X) for _ in range(3)] == [2, 2, 2]
    [warning] = caught
    assert (warning.filename, warning.lineno) in [("program.py", 2), ("program.py", 3)]
    text = "out_axes=0 instead of None, and shardmap.unreplicate(result)."
    assert str(warning.message).endswith(f"The edit: {text}")
    np.testing.assert_array_equal(
        sm.unreplicate(sm.spmap(lambda x: 2 * x, out_axes=0)(X)), space["f"](X)
    )


def test_results_that_agree_are_not_warned_of():
    f = compat.pmap(lambda x: jax.lax.pmean(x, "i"), "i", out_axes=None)
    assert f(X) == 4.5
    assert f.lower(X).out_specs == sm.ShardingSpec((), (sm.Replicated(8),))


def test_spmap_inside_refuses_as_ever():
    inner = sm.spmap(lambda x: x, out_axes=None)
    f = compat.pmap(lambda x: inner(x).sum(), out_axes=None)
    with pytest.raises(ValueError, match="mapped output but out_axes is None"):
        f(np.ones((2, 4), np.float32))


def test_it_is_lowered_traced_and_differentiated():
    f = compat.pmap(lambda x: x**2, out_axes=None)
    with pytest.warns(UserWarning, match="that of element 0"):
        assert f.lower(X).compile()(X) == 1
    assert f.trace(X).jaxpr.out_avals[0].shape == ()
    np.testing.assert_array_equal(jax.grad(f)(X), [2, 0, 0, 0, 0, 0, 0, 0])


def test_methods_and_static_arguments():
    class Scaled:
        by = 3

        @functools.partial(
            compat.pmap, static_broadcasted_argnums=0, in_axes=(None, 0), out_axes=None
        )
        def scale(self, x):
            """Scales."""
            return self.by * x

    with pytest.warns(UserWarning, match="result of .*scale can differ"):
        assert Scaled().scale(X) == 3
    assert (Scaled.scale.__name__, Scaled.scale.__doc__) == ("scale", "Scales.")


def test_sharded_jit_takes_global_arrays():
    def double(x):
        return 2 * x

    x = np.arange(8.0, dtype=np.float32)
    local = {"local_in_parts": (4,), "local_out_parts": (2, 2)}
    with pytest.raises(
        ValueError,
        match=r"sharded_jit local_out_parts is \(2, 2\), but out_parts is \(4,\): .* "
        r"pass global arrays, which jax\.make_array_from_process_local_data makes",
    ):
        compat.sharded_jit(double, (4,), (4,), **local)
    same = {"local_in_parts": (4,), "local_num_partitions": 4}
    halves = compat.sharded_jit(double, (4,), None, 4, **same)
    np.testing.assert_array_equal(halves(x), 2 * x)
    with pytest.raises(ValueError, match="local_num_partitions is 2, but num_part"):
        compat.sharded_jit(double, (4,), None, 4, local_num_partitions=2)
