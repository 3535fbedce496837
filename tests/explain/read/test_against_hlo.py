"""What is said of a compiled program agrees with its text, which is read anew."""

import collections
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.command_line import python
from tests.explain.hlo_text import moved

LINE = sm.make_mesh({"i": 8})
EXPLICIT = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
RING = [(k, (k + 1) % 8) for k in range(8)]


def ones(*shape):
    return np.ones(shape, np.float32)


def lines_with(*comments):
    """The numbers of the lines of this file that end in a comment."""
    text = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    return [
        next(k for k, line in enumerate(text, 1) if line.endswith(f"# {comment}"))
        for comment in comments
    ]


def line_of(collective):
    assert collective.source.startswith(("tests/explain/read/test_against_hlo.py", "/"))
    return int(collective.source.split(" ")[0].rpartition(":")[2])


def said(report):
    counts = collections.Counter()
    for each in report.collectives:
        counts[each.kind, each.bytes_out] += each.count
    return counts


def there(text):
    counts = collections.Counter()
    for each, times in moved(text).items():
        counts[each.kind, each.bytes_out] += times
    return counts


# Programs whose axes are explicit


def total(x):
    return lax.psum(x, "i")


def test_an_explicit_mesh_that_is_set_is_a_mesh_of_devices():
    with jax.set_mesh(EXPLICIT):
        fun = jax.jit(jax.shard_map(total, in_specs=P("i"), out_specs=P()))
        x = jax.device_put(ones(8, 4), P("i"))
        report = sm.explain(fun)(x)
        text = fun.lower(x).compile().as_text()
    assert report.notes == ()
    assert report.device_kind == "cpu"
    assert report.cost is not None
    assert len(report.collectives) == 1
    assert said(report) == there(text)


def test_reduced_and_unreduced_values():
    with jax.set_mesh(EXPLICIT):
        spec = P(None, reduced={"i"})
        fun = jax.shard_map(jnp.sin, in_specs=spec, out_specs=spec)
        x = jax.device_put(ones(8), NamedSharding(EXPLICIT, spec))
        report = sm.explain(lambda x: fun(jnp.cos(x)))(x)
    assert report.outputs[0].shard_shape == (8,)


@pytest.mark.deep
def test_the_package_is_imported_under_any_mesh():
    program = """
import jax
from jax.sharding import AxisType
explicit = (AxisType.Explicit,) * 2
with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=explicit)):
    import shardmap as sm
    sm.spmap, sm.explain, sm.plan, sm.chunked, sm.compat
"""
    result = python("-c", program, without=())
    assert result.returncode == 0, result.stderr


# Which is which


def test_a_dead_collective_is_not_listed():
    def fun(x):
        lax.ppermute(x, "i", RING)  # Dead.

        def step(x, _):
            return lax.ppermute(x, "i", RING) * 2, None  # Live.

        return lax.scan(step, x, None, length=4)[0]

    mapped = jax.shard_map(fun, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    report = sm.explain(mapped)(ones(8, 4))
    (live,) = report.collectives
    assert [live.count, line_of(live)] == [4, *lines_with("Live.")]


def test_values_sent_together_under_names_with_colons():
    def fun(x):
        with jax.named_scope("a:b"):
            one = lax.psum(x, "i")
        with jax.named_scope("c:d"):
            return one * lax.psum(x.sum(), "i")

    mapped = jax.shard_map(fun, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    report = sm.explain(mapped)(ones(8, 4))
    assert {each.operation for each in report.collectives} == {"psum"}
    assert [each.bytes_in for each in report.collectives] == [16, 4]


# Lines


def first_loop(x):
    return lax.map(jnp.sin, x)  # First loop.


def second_loop(x):
    return lax.map(jnp.sin, x + 1)  # Second loop.


def both_loops(x):
    return first_loop(x), second_loop(x)


def test_the_slices_of_a_loop_are_of_its_own_line():
    """JAX traces them while it lowers, once for all programs of the process."""
    x = jax.ShapeDtypeStruct((16, 64), np.float32, sharding=NamedSharding(LINE, P("i")))
    first, second = lines_with("First loop.", "Second loop.")
    for fun, lines in (
        (first_loop, {first}),
        (second_loop, {second}),
        (both_loops, {first, second}),
    ):
        sent = sm.explain(fun)(x).collectives
        assert {each.kind for each in sent} == {"all-gather"}
        assert {line_of(each) for each in sent} == lines


def explicit_loop(x):
    def body(at):
        k, total = at
        row = lax.dynamic_index_in_dim(x, k, 0, keepdims=False)  # Index in a loop.
        return k + 1, total + row

    return lax.while_loop(lambda at: at[0] < 16, body, (0, jnp.zeros(64)))


def explicit_loop_in_a_line(x):
    def row(k):
        return lax.dynamic_index_in_dim(x, k[0], 0, keepdims=False)  # Index of a row.

    def more(k):
        return k[0] < 16

    start = 0, jnp.zeros(64)
    return lax.while_loop(more, lambda k: (k[0] + 1, k[1] + row(k)), start)


@pytest.mark.parametrize(
    ("fun", "comment"),
    [
        (explicit_loop, "Index in a loop."),
        (explicit_loop_in_a_line, "Index of a row."),
    ],
)
def test_an_index_in_a_while_loop_is_of_its_own_line(fun, comment):
    x = jax.ShapeDtypeStruct((16, 64), np.float32, sharding=NamedSharding(LINE, P("i")))
    sm.explain(first_loop)(x)  # Whose slices JAX keeps.
    (sent,) = sm.explain(fun)(x).collectives
    assert [line_of(sent)] == lines_with(comment)
