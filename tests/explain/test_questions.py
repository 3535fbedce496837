"""What JAX's users ask of collectives that they did not write: which line, why, and how
to be rid of them. Each answer is tried: with the advice applied nothing is sent.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

LINE = sm.make_mesh({"i": 8})
MESH = sm.make_mesh({"data": 4, "model": 2})
ROWS = NamedSharding(LINE, P("i"))
COLUMNS = NamedSharding(LINE, P(None, "i"))


def on(sharding, *shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def line_with(comment):
    text = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(k for k, line in enumerate(text, 1) if line.endswith(f"# {comment}"))


def constrained(x, *names):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*names)))


def scatter(x, indices, updates):
    x = x * 2
    return x.at[indices].set(updates)  # Scatter.


def first_row(y):
    y = y + 1
    return y[0]  # First row.


def factors(x):
    x = x + 1
    return jnp.linalg.qr(x)[1]  # Factors.


def each_its_own(x):
    return sm.spmap(factors)(x)


def mean(x):
    x = jnp.sin(x)
    return x.mean(0)  # Mean.


def another_layout(x):
    y = constrained(x * 2, "model")
    return constrained(y.reshape(32, 8), None, "data")  # Another layout.


def same_layout(x):
    y = constrained(x * 2, "model")
    return constrained(y.reshape(32, 8), "model")


SCATTERED = (on(ROWS, 1024, dtype=np.int32), on(ROWS, 1024, 64))
INDICES = on(NamedSharding(LINE, P()), 1024, dtype=np.int32)
CUT = on(NamedSharding(MESH, P("model")), 16, 16)

# The program, its kind, comment, cause and advice; the program with the advice applied.
QUESTIONS = {
    "an all-gather for a scatter": (
        (jax.jit(scatter, out_shardings=ROWS), on(ROWS, 1024, 64), *SCATTERED),
        ("all-gather", "Scatter.", "for a scatter", "Cut a dimension that the indices"),
        (scatter, on(COLUMNS, 1024, 64), INDICES, on(COLUMNS, 1024, 64)),
    ),
    "one row of a sharded array": (
        (first_row, on(ROWS, 1024, 64)),
        ("all-reduce", "First row.", "a part is taken", "Cut another dimension"),
        (first_row, on(COLUMNS, 1024, 64)),
    ),
    "an all-gather before a custom call": (
        (factors, on(ROWS, 64, 32)),
        ("all-gather", "Factors.", "a call into a library", "over a batch dimension"),
        (each_its_own, on(ROWS, 8, 64, 32)),
    ),
    "an all-reduce of a mean": (
        (mean, on(ROWS, 1024, 64)),
        ("all-reduce", "Mean.", "goes over a dimension", None),
        (mean, on(COLUMNS, 1024, 64)),
    ),
    "an involuntary full rematerialisation": (
        (another_layout, CUT),
        (
            "all-gather",
            "Another layout.",
            "involuntary full rem",
            "the same way before",
        ),
        (same_layout, CUT),
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_line_the_cause_and_the_advice_are_said(name):
    (fun, *args), (kind, comment, cause, advice), _ = QUESTIONS[name]
    report = sm.explain(fun)(*args)
    assert {each.kind for each in report.collectives} == {kind}
    for each in report.collectives:
        assert each.added_by_partitioner
        assert f"{pathlib.Path(__file__).name}:{line_with(comment)} (" in each.source
        assert cause in each.cause
        assert (each.advice is None) if advice is None else advice in each.advice
    text = " ".join(str(report).split())
    first = report.collectives[0]
    for said in filter(None, (first.source, first.cause, first.advice)):
        assert said in text


@pytest.mark.parametrize("name", QUESTIONS)
def test_with_the_advice_applied_nothing_is_sent(name):
    _, _, (fun, *args) = QUESTIONS[name]
    assert sm.explain(fun)(*args).collectives == ()


def test_what_a_device_has_before_and_after_is_said():
    (gathered,) = sm.explain(factors)(on(ROWS, 64, 32)).collectives
    assert "f32[8,32] on a device becomes f32[64,32]" in gathered.cause


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

    whole = on(NamedSharding(LINE, P()), dtype=np.int32)
    report = sm.explain(fun)(on(ROWS, 1024, 64), whole)
    assert len(report.collectives) > 0
    assert not [each for each in report.remarks if "involuntary" in each.text]


def test_of_the_users_own_no_cause_is_said():
    mapped = sm.spmap(lambda x: lax.psum(x, "i"), "i")
    (sent,) = sm.explain(mapped)(np.ones((8, 4), np.float32)).collectives
    assert (sent.cause, sent.advice) == (None, None)
