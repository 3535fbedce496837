"""`explain`: what it takes, and that it runs nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

MESH = sm.make_mesh({"data": 4, "model": 2})


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def double(x):
    return x * 2


def center(x):
    return x - lax.pmean(x, "i")


class Named:
    """A key of a dict whose text would turn what a terminal shows."""

    def __repr__(self):
        return "\x1b[31mred\u202e"


def test_names_cannot_steer_a_terminal():
    def named(tree):
        return tree

    named.__name__ = "\x1b]0;title\x07"
    tree = {Named(): ones(4)}
    report, made = sm.explain(named)(tree), sm.plan(named, tree, in_slices={})
    for text in (str(report), repr(report), str(sm.explain(made))):
        assert text.replace("\n", "").isprintable()
    assert r"\x1b]0;title\x07: 1 cpu device" in str(report)
    for path in (r"tree[\x1b[31mred\u202e]:", r"result[\x1b[31mred\u202e]:"):
        assert f"\n      {path}" in str(report)


# Nothing runs


def test_nothing_runs():
    called = []

    def note(x):
        called.append(1)
        return x

    @sm.spmap
    def tapped(x):
        sm.tap(note, x)
        jax.debug.callback(note, x)
        return jax.pure_callback(note, x, x)

    array = jnp.ones((8, 3), np.float32)
    sm.explain(tapped)(array)
    tapped.explain(array)
    jax.effects_barrier()
    assert called == []


def test_donated_arrays_stay():
    array = jnp.ones((8, 3))
    sm.spmap(double, donate_argnums=0).explain(array)
    sm.explain(jax.jit(double, donate_argnums=0))(array)
    assert not array.is_deleted()


def test_memory_of_any_size_can_be_explained():
    """An array of these shapes would not fit anywhere."""
    huge = jax.ShapeDtypeStruct((8, 1 << 40), np.float32)
    report = sm.spmap(double).explain(huge)
    assert report.inputs[0].shard_bytes == 4 << 40
    assert report.cost.argument_bytes == 4 << 40


# What it takes


def test_the_method_and_the_function_are_the_same():
    x = jax.ShapeDtypeStruct((8, 3), np.float32)
    mapped = sm.spmap(center, "i")
    assert mapped.explain(x) == sm.explain(mapped)(x)
    blocks = sm.mesh_map(double, MESH, ({"data": 0},), {"data": 0})
    assert blocks.explain(x) == sm.explain(blocks)(x)


def test_arrays_of_numpy_and_jax_wherever_they_lie():
    x = jax.ShapeDtypeStruct((8, 3), np.float32)
    elsewhere = jax.device_put(ones(8, 3), jax.devices()[5])
    for fun in (
        sm.spmap(double),
        sm.mesh_map(double, MESH, ({"data": 0},), {"data": 0}),
    ):
        assert sm.explain(fun)(ones(8, 3)) == sm.explain(fun)(x)
        assert sm.explain(fun)(elsewhere) == sm.explain(fun)(x)


def test_a_plain_function_follows_its_arguments():
    x = jax.device_put(ones(8, 3), NamedSharding(MESH, P("data")))
    report = sm.explain(lambda x: x * 2)(x)
    assert report.inputs[0].shard_shape == (2, 3)
    assert report.outputs[0].shard_shape == (2, 3)
    assert report.mesh == (("data", 4), ("model", 2))


def test_static_arguments_and_keywords():
    def scaled(x, factor, text, *, shift):
        return x * factor + len(text) + shift["y"]

    x, y = jax.ShapeDtypeStruct((8,), "f4"), jax.ShapeDtypeStruct((8,), "f4")
    mapped = sm.spmap(scaled, static_broadcasted_argnums=(1, 2))
    report = sm.explain(mapped)(x, 3, "abc", shift={"y": y})
    assert [array.path for array in report.inputs] == ["x", "shift['y']"]
    jitted = jax.jit(scaled, static_argnums=(1, 2))
    report = sm.explain(jitted)(x, 3, "abc", shift={"y": y})
    assert [array.path for array in report.inputs] == ["x", "shift['y']"]


def test_none_is_no_argument():
    struct = jax.ShapeDtypeStruct((3,), np.float32)
    fun = jax.jit(lambda x, y, z: z["b"] * 2)
    report = sm.explain(fun)(struct, None, {"a": None, "b": struct})
    assert [(array.path, array.layout) for array in report.inputs] == [
        ("x", "not used by the program"),
        ("z['b']", "on one device"),
    ]


def test_methods():
    class Model:
        def plain(self, x):
            return jax.vmap(double)(x)

    report = sm.explain(Model().plain)(ones(4, 3))
    assert report.name == "plain"
    assert [array.path for array in report.inputs] == ["x"]
    assert [str(axis) for axis in report.axes] == [
        "an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]


def test_random_keys():
    keys = jax.random.split(jax.random.key(0), 8)
    report = sm.explain(sm.spmap(lambda k: jax.random.uniform(k, (3,))))(keys)
    assert report.inputs[0].dtype == "key<fry>"
    assert report.inputs[0].shard_bytes == report.cost.argument_bytes


def test_a_function_without_results_or_arguments():
    assert sm.explain(lambda: None)().arrays == ()


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="explain takes a function, got 3 of type int"):
        sm.explain(3)


def test_errors_are_those_of_a_call():
    mapped = sm.spmap(jnp.add)
    with pytest.raises(ValueError, match="spmap got inconsistent sizes"):
        mapped(ones(8), ones(4))
    with pytest.raises(ValueError, match="spmap got inconsistent sizes"):
        sm.explain(mapped)(ones(8), ones(4))


# Plans, and functions in pieces


def test_a_plan_is_explained_at_once(tmp_path):
    made = sm.plan(lambda x: (x * 2).sum(1), ones(6, 2), in_slices={0: 3})
    report = sm.explain(made)
    assert report == made.explain()
    assert str(report) == str(made)
    assert str(report).splitlines() == [
        report.title,
        *(f"  {line}" for line in report.pieces),
    ]
    report.save(tmp_path / "plan.html")
    for page in (report._repr_html_(), (tmp_path / "plan.html").read_text()):
        assert "3 shards" in page
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")


def test_a_function_in_pieces_says_what_became_of_its_cuts(tmp_path):
    fun = sm.chunked(lambda x: jnp.tanh(x).sum(1), {0: 4})
    report = sm.explain(fun)(ones(8, 3))
    assert [array.shape for array in report.outputs] == [(8,)]
    assert report.pieces == fun.explain(ones(8, 3)).pieces
    (stage,) = report.stages
    assert (stage.shards, report.to_dict()["stages"][0]["shards"]) == (4, 4)
    lines = str(report).splitlines()
    assert "    axis 0: cut into 4 pieces of 2" in lines
    report.save(tmp_path / "report.html")
    for page in (report._repr_html_(), (tmp_path / "report.html").read_text()):
        assert "stage 0: 4 shards make result" in page
        assert "cut into 4 pieces of 2" in page


@pytest.mark.parametrize("inside", [False, True])
def test_the_pieces_are_steps_of_a_loop(inside):
    pieces = sm.chunked(lambda x, w: jnp.tanh(x @ w).sum(0), ({0: 8}, None))
    fun = jax.jit(lambda x, w: pieces(x, w) * 2) if inside else pieces
    args = ones(64, 16), ones(16, 4)
    report = sm.explain(fun)(*args)
    steps = [axis.steps for axis in report.axes]
    assert [str(axis) for axis in report.axes][-1] == (
        "an axis of 8 = 1 device x 1 vectorised x 8 steps"
    )
    text = jax.jit(fun).lower(*args).compile().as_text()
    trips = re.findall(r'known_trip_count":\{"n":"(\d+)"', text)
    assert sorted(steps) == sorted(map(int, trips))
    assert report.axes[-1].kind == "chunked"
    assert bool(report.pieces) != inside
