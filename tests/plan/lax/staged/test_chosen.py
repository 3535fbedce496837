"""Which equations are written as stages, and which way of several is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.engine.nodes import flatten
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import UNCUT, Cut
from shardmap.plan.lax.staged.chosen import Chosen, layered
from shardmap.plan.lax.table import CALLS, TABLE
from tests.plan.plan_programs import reals

CUT = Cut((100, 200, 300), False, frozenset({(0, 0)}))
KINDS = ("running", "largest", "sorted", "tall", "recut", "selected", "once", "scans")


def analysed(fun, axis=0):
    x = jax.ShapeDtypeStruct((400, 16), np.float32)
    graph = flatten(jax.make_jaxpr(fun)(x), CALLS)
    row = [CUT if k == axis else UNCUT for k in range(2)]
    return Analysis(graph, TABLE, [row], True)


@pytest.mark.parametrize(
    ("fun", "kinds"),
    [
        (jnp.sin, set()),
        (lambda x: x.sum(0), set()),
        (lambda x: jnp.cumsum(x, 0), {"running"}),
        (lambda x: jnp.sort(x, 0), {"sorted"}),
        (lambda x: jnp.median(x, 0), {"selected"}),
        (lambda x: jax.lax.top_k(x.T, 3)[0], {"largest"}),
        (jnp.linalg.qr, {"tall"}),
        (lambda x: jnp.linalg.qr(x.T), set()),
        (lambda x: jax.nn.logsumexp(x, 0), {"once"}),
        (lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x), {"scans"}),
        (
            lambda x: jnp.fft.fft(jnp.sin(jnp.tanh(x) @ reals(16, 16)), axis=0),
            {"recut"},
        ),
    ],
)
def test_equations_at_which_cuts_end_are_written_in_stages(fun, kinds):
    chosen = Chosen()
    assert chosen.more(analysed(fun)) == bool(kinds)
    assert {kind for kind in KINDS if getattr(chosen, kind)} == kinds
    # Nothing is written where no cut ends.
    assert not Chosen().more(analysed(jnp.sin, axis=1))


def test_what_was_chosen_is_not_chosen_again():
    found = analysed(lambda x: jnp.sort(x, 0))
    chosen = Chosen()
    assert chosen.more(found)
    assert not chosen.more(found)
    assert len(chosen.sorted) == 1


def test_the_last_table_goes_first_and_may_leave_an_equation_to_others():
    calls = []

    def writer(name, result):
        def write(*args):
            calls.append((name, args))
            return result

        return write

    table = layered(
        [
            {"a": writer("first a", 1), "b": writer("first b", 2)},
            {"a": writer("last a", None)},
            {"b": writer("last b", 3)},
        ]
    )
    assert (table["a"]("graph"), table["b"]("graph")) == (1, 3)
    assert calls == [
        ("last a", ("graph",)),
        ("first a", ("graph",)),
        ("last b", ("graph",)),
    ]
