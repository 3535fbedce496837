"""Why a collective is there, by what takes its result."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

LINE = sm.make_mesh({"i": 8})
SQUARE = sm.make_mesh({"data": 4, "model": 2})


def on(*names, shape=(64, 64), dtype=np.float32, mesh=LINE):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*names)))


def until_five(x):
    return lax.while_loop(lambda c: c < 5, lambda c: c * 1.5 + 1, x)


def smoothed(x):
    kernel = jnp.ones((1, 1, 3, 3), x.dtype)
    return lax.conv_general_dilated(x[None, None], kernel, (1, 1), "SAME")


def whole(x):
    return lax.with_sharding_constraint(x * 2, NamedSharding(LINE, P()))


def sorted_(x):
    return jnp.sort(x, axis=0)


def on_the_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def taken_and_whole(x):
    return x[2:5] * 2


def scatter(x, indices, updates):
    x = x * 2
    return x.at[indices].set(updates)  # Scatter.


def first_row(y):
    y = y + 1
    return y[0]  # First row.


def factors(x):
    x = x + 1
    return jnp.linalg.qr(x)[1]  # Factors.


def mean(x):
    x = jnp.sin(x)
    return x.mean(0)  # Mean.


def constrained(x, *names):
    return lax.with_sharding_constraint(x, NamedSharding(SQUARE, P(*names)))


def another_layout(x):
    y = constrained(x * 2, "model")
    return constrained(y.reshape(32, 8), None, "data")  # Another layout.


def same_layout(x):
    y = constrained(x * 2, "model")
    return constrained(y.reshape(32, 8), "model")


ROWS = NamedSharding(LINE, P("i"))
INDICES = on(None, shape=(1024,), dtype=np.int32)
WIDE = on("i", shape=(1024, 64))
CUT = on("model", shape=(16, 16), mesh=SQUARE)
# The program; its kind, cause, advice and line; the program with the advice applied.
CAUSES = {
    "a loop that waits for the slowest": (
        (jax.vmap(until_five), on("i", shape=(64,))),
        ("all-reduce", "whether one of them goes on", "Loop inside", None),
        (sm.spmap(until_five), on("i", shape=(64,))),
    ),
    "a transposition": (
        (jax.jit(lambda x: x.T * 2, out_shardings=ROWS), on("i")),
        ("all-to-all", "needed sharded along another", "the same dimensions", None),
        (jax.jit(lambda x: x.T * 2, out_shardings=ROWS), on(None, "i")),
    ),
    "neighbours": (
        (smoothed, on("i")),
        ("collective-permute", "on other devices, for conv_ge", "shard another", None),
        (lambda x: jax.vmap(smoothed)(x), on("i", shape=(8, 64, 64))),
    ),
    "a reversal": (
        (lambda x: x[::-1] * 2, on("i")),
        ("collective-permute", "on other devices, for rev", "shard another", None),
        (lambda x: x[::-1] * 2, on(None, "i")),
    ),
    "a layout that is asked for": (
        (whole, on("i")),
        (
            "all-gather",
            "the layout that this line asks",
            "same sharding as before",
            None,
        ),
        (lambda x: x * 2, on("i")),
    ),
    "a sort along a sharded dimension": (
        (jax.jit(sorted_, out_shardings=ROWS), on("i")),
        ("all-to-all", "for sort", "such as a sort, shard another", None),
        (sorted_, on(None, "i")),
    ),
    "a callback to the host": (
        (on_the_host, on("i")),
        ("all-gather", "pure_callback is a callback", "a batch dimension", None),
        (
            jax.shard_map(on_the_host, mesh=LINE, in_specs=P("i"), out_specs=P("i")),
            on("i"),
        ),
    ),
    "a layout of a result": (
        (
            jax.jit(taken_and_whole, out_shardings=NamedSharding(LINE, P())),
            on(None, "i"),
        ),
        (
            "all-gather",
            "the layout that this line asks",
            "same sharding as before",
            None,
        ),
        (taken_and_whole, on(None, "i")),
    ),
    "an all-gather for a scatter": (
        (
            jax.jit(scatter, out_shardings=ROWS),
            WIDE,
            on("i", shape=(1024,), dtype=np.int32),
            WIDE,
        ),
        ("all-gather", "a scatter into", "that the indices do not", "Scatter."),
        (scatter, *[on(None, "i"), INDICES, on(None, "i", shape=(1024, 64))]),
    ),
    "one row of a sharded array": (
        (first_row, WIDE),
        ("all-reduce", "takes a part along", "Shard another dimension", "First row."),
        (first_row, on(None, "i")),
    ),
    "an all-gather before a custom call": (
        (factors, on("i", shape=(64, 32))),
        ("all-gather", "calls a library", "over a batch dimension", "Factors."),
        (lambda x: sm.spmap(factors)(x), on("i", shape=(8, 64, 32))),
    ),
    "an all-reduce of a mean": (
        (mean, WIDE),
        ("all-reduce", "expected, as the results of reduce_sum", None, "Mean."),
        (mean, on(None, "i")),
    ),
    "an involuntary full rematerialisation": (
        (another_layout, CUT),
        ("all-gather", "involuntary full rem", "the same way", "Another layout."),
        (same_layout, CUT),
    ),
}


def line_with(comment):
    text = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(k for k, line in enumerate(text, 1) if line.endswith(f"# {comment}"))


@pytest.mark.parametrize("name", CAUSES)
def test_every_cause_is_said_and_its_advice_helps(name):
    (fun, *args), (kind, cause, advice, comment), (better, *others) = CAUSES[name]
    report = sm.explain(fun)(*args)
    collectives = report.collectives
    assert {each.kind for each in collectives} == {kind}
    for each in collectives:
        assert each.added_by_partitioner
        assert cause in each.cause
        assert (each.advice is None) if advice is None else advice in each.advice
        if comment is not None:
            assert f"{pathlib.Path(__file__).name}:{line_with(comment)} (" in (
                each.source
            )
    text = " ".join(str(report).split())
    for said in filter(
        None, (collectives[0].source, collectives[0].cause, collectives[0].advice)
    ):
        assert said in text
    assert sm.explain(better)(*others).collectives == ()


def test_a_rematerialisation_is_the_one_that_xla_warns_of(capfd):
    # A function of its own, as JAX does not compile again what it has.
    report = sm.explain(lambda x: another_layout(x))(CUT)
    warned = capfd.readouterr().err.count("Involuntary full rematerialization")
    (remark,) = [each for each in report.remarks if "involuntary" in each.text]
    assert warned == 1
    assert "1.0 KiB on each" in remark.text
    assert sm.explain(same_layout)(CUT).remarks == ()
    assert "Involuntary" not in capfd.readouterr().err


def test_a_slice_by_a_given_index_is_not_taken_for_one():
    def fun(x, k):
        return lax.dynamic_slice_in_dim(x, k, 4)

    report = sm.explain(fun)(WIDE, on(shape=(), dtype=np.int32))
    assert len(report.collectives) > 0
    assert not [each for each in report.remarks if "involuntary" in each.text]


def test_of_the_users_own_no_cause_is_said():
    mapped = sm.spmap(lambda x: lax.psum(x, "i"), "i")
    (sent,) = sm.explain(mapped)(np.ones((8, 4), np.float32)).collectives
    assert (sent.cause, sent.advice) == (None, None)


def test_an_argument_is_not_what_needs_more_of_it():
    """XLA of JAX 0.12 calls after an argument what it sends of it."""
    fun = jax.jit(lambda x: x + x.T)
    collectives = sm.explain(fun)(on("data", "model", mesh=SQUARE)).collectives
    causes = [
        each.cause.partition(" needs more of an operand")[0] for each in collectives
    ]
    assert [each for each in causes if "the layout" not in each] == ["add", "add"]


def test_mesh_axes_in_another_order():
    rows, columns = (
        NamedSharding(SQUARE, P(names))
        for names in (("data", "model"), ("model", "data"))
    )
    fun = jax.jit(lambda x: x * 2, in_shardings=rows, out_shardings=columns)
    (sent,) = sm.explain(fun)(jax.ShapeDtypeStruct((64, 4), np.float32)).collectives
    assert sent.kind == "collective-permute"
    assert "in the same order, before and after" in sent.advice
    assert (sent.before, sent.after) == ("f32[8,4]", "f32[8,4]")


def test_what_a_device_has_before_and_after_is_a_field():
    def fun(x):
        return lax.psum(x, "i"), lax.all_gather(x, "i")

    mapped = sm.spmap(fun, "i")
    struct = jax.ShapeDtypeStruct((8, 3), np.float32)
    report = sm.explain(mapped)(struct)
    types = {(each.before, each.after) for each in report.collectives}
    assert types == {("f32[3]", "f32[3]"), ("f32[1,3]", "f32[8,3]")}
    text = " ".join(str(report).split())
    assert "psum over 'i', f32[3] at" in text
    assert "all_gather over 'i', f32[1,3] -> f32[8,3] at" in text


def gradient(x, w):
    return jax.grad(lambda w: (x @ w).sum())(w)


def product(x, w):
    return x @ w


DATA = NamedSharding(sm.make_mesh({"data": 8}), P("data"))
COLUMNS = NamedSharding(sm.make_mesh({"data": 8}), P(None, "data"))


@pytest.mark.parametrize(
    ("fun", "args", "said"),
    [
        (gradient, (DATA, None), "the gradients of all shards are summed"),
        (product, (COLUMNS, DATA), "the partial products of dot_general"),
        (lambda x, _: x.sum(), (DATA, None), "on all shards are combined"),
    ],
    ids=["gradients", "partial products", "a loss"],
)
def test_what_is_expected_has_no_advice(fun, args, said):
    structs = [jax.ShapeDtypeStruct((64, 64), np.float32, sharding=s) for s in args]
    collectives = sm.explain(fun)(*structs).collectives
    assert {each.kind for each in collectives} == {"all-reduce"}
    for each in collectives:
        assert each.cause.startswith("expected")
        assert said in each.cause
    assert {each.advice for each in collectives} == {None}


def test_gradients_that_are_sent_as_one_have_a_line_each():
    """XLA says of all of them that they are of the first line."""

    def loss(weights, x):
        y = jnp.tanh(x @ weights[0])
        y = jnp.tanh(y @ weights[1])
        return (y @ weights[2]).mean()

    first = loss.__code__.co_firstlineno
    shapes = (64, 32), (32, 16), (16, 4)
    weights = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    collectives = sm.explain(jax.jit(jax.grad(loss)))(weights, on("i")).collectives
    assert {each.together for each in collectives} == {3}
    lines = {
        frozenset(map(int, re.findall(r"\d+", each.after)[1:])): int(
            each.source.split(" ")[0].rpartition(":")[2]
        )
        for each in collectives
    }
    assert lines == {frozenset(shape): first + k for k, shape in enumerate(shapes, 1)}


def test_what_is_added_beside_the_users_own_has_a_cause():
    """XLA calls the all-to-all after the `psum` that it lays out."""
    inner = sm.sharded_jit(lambda x: x @ x + lax.psum(x, ("i", "j")), (2, 1), (1, 2))
    report = sm.explain(sm.spmap(sm.spmap(inner, "j"), "i"))
    collectives = report(jax.ShapeDtypeStruct((2, 2, 4, 4), np.float32)).collectives
    added = [each for each in collectives if each.added_by_partitioner]
    assert "all-to-all" in {each.kind for each in added}
    assert all(each.cause for each in added)


def test_what_only_notes_a_sharding_asks_for_none():
    """Such as conversions, with one of another rank perhaps."""
    pieces = sm.chunked(lambda x: jnp.tanh(x @ x.T).sum(), {0: 2})
    assert sm.explain(jax.hessian(pieces))(jnp.ones((4, 2))).collectives == ()
