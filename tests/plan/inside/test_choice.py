"""Into how many pieces: as few as fit, found with few tries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap import AUTO
from shardmap.plan.inside import choice
from shardmap.plan.inside.choice import asked_of, cut_jaxpr, in_memory, resolved
from shardmap.plan.inside.liveness import Peak

ROWS, COLUMNS = 1000, 64


def jaxpr_of(fun, *shapes):
    return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes))


def measured(tried, of_piece=lambda rows: 100 * rows, least=0):
    """What measures a function that holds so much of a piece, and notes what it is."""

    def measure(made):
        pieces = len(made.cuts[0][0].at) + 1
        tried.append(pieces)
        return Peak(least + of_piece(-(-ROWS // pieces)), 1, "f32[1]", "here")

    return measure


@pytest.mark.parametrize(
    ("memory", "of_piece"),
    [
        (10_000, lambda rows: 100 * rows),
        (7_777, lambda rows: 40 * rows + 3000),
        (50_000, lambda rows: rows**2),
        (99_999, lambda rows: 100 * rows),
    ],
)
def test_few_more_pieces_than_it_takes_and_few_tries(memory, of_piece):
    tried = []
    jaxpr = jaxpr_of(jnp.sin, (ROWS, COLUMNS))
    measure = measured(tried, of_piece)
    found, _ = resolved(jaxpr, ((AUTO, ()),), False, memory, measure)
    pieces = len(found[0][0]) + 1
    least = next(n for n in range(1, ROWS) if of_piece(-(-ROWS // n)) <= memory)
    assert least <= pieces <= least + max(1, least // 16)
    assert len(set(tried)) <= 12


def test_what_fits_as_it_is_is_one_piece():
    jaxpr = jaxpr_of(jnp.sin, (ROWS, COLUMNS))
    found, _ = resolved(jaxpr, ((AUTO, ()),), False, 10**6, measured([]))
    assert found == (((), ()),)


def test_given_cuts_stay():
    jaxpr = jaxpr_of(jnp.add, (ROWS, COLUMNS), (ROWS, COLUMNS))
    asked = ((AUTO, (32,)), ((), (32,)))
    found, _ = resolved(jaxpr, asked, False, 10_000, measured([]))
    assert (found[0][1], found[1]) == ((32,), ((), (32,)))
    assert len(found[0][0]) + 1 >= 10


@pytest.mark.parametrize("cheaper", [True, False])
def test_what_is_summed_over_is_cut_where_that_takes_less(cheaper):
    jaxpr = jaxpr_of(lambda x: x.sum(0), (ROWS, COLUMNS))

    def measure(made):
        pieces = len(made.cuts[0][0].at) + 1
        return Peak((1 if made.analysis.partial is cheaper else 3) * (ROWS // pieces))

    found, partial = resolved(jaxpr, ((AUTO, ()),), True, 100, measure)
    assert (len(found[0][0]) + 1, partial) == (10, cheaper)


def test_what_never_fits_says_what_it_takes():
    jaxpr = jaxpr_of(jnp.sin, (ROWS, COLUMNS))

    def choose(keeps):
        return resolved(
            jaxpr, ((AUTO, ()),), False, 1000, measured([], least=5000), keeps
        )

    with pytest.raises(
        ValueError,
        match=r"memory=1000 B is too little: in 1,000 pieces the function still holds "
        r"5.0 KiB at once, of it 1 B in f32\[1\] made at here. Give as much, or cut",
    ):
        in_memory(choose)


def test_what_fits_without_keeping_is_asked_for_then():
    asked = []

    def choose(keeps):
        asked.append(keeps)
        if keeps:
            raise choice._TooLittle("too little")
        return "fits"

    assert in_memory(choose) == "fits"
    assert asked == [True, False]


def test_the_axis_that_saves_the_most_is_chosen():
    jaxpr = jaxpr_of(lambda x, y: jnp.sin(x).sum(1), (64, 4096), (64, 4096))
    asked = asked_of("plan", jaxpr, None, False, 50_000, choice.loops_peak)
    assert asked == ((AUTO, ()), ((), ()))
    assert asked_of("plan", jaxpr, None, False, None) == (((), ()), ((), ()))
    with pytest.raises(ValueError, match="plan: a cut that is AUTO needs memory="):
        asked_of("plan", jaxpr, asked, False, None)


def test_a_jaxpr_is_cut_at_its_operands():
    made = cut_jaxpr(jaxpr_of(jnp.add, (6, 2), (6, 2)), (((2, 4), ()), ((), ())), True)
    assert made.names == ["operand 0", "operand 1"]
    assert made.num_shards == 3
