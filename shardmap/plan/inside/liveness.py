"""How much a program holds at once: an upper bound, from its jaxpr.

What the compiler says of a program for CPU leaves out the scratch memory of its fused
operations. Here every intermediate value is there from where it is made to where it is
last used, unless it takes the place of an operand that is not used any more.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.extend import source_info_util
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import Atom, Equation, Jaxpr, Var
from shardmap._jax.walk import jaxprs_in
from shardmap.plan.engine.keys import itemsize

IN_PLACE = frozenset(
    {
        p.dynamic_update_slice_p,
        p.reshape_p,
        *(p.scatter_p, p.scatter_add_p, p.scatter_max_p, p.scatter_min_p),
    }
)

SCRATCH = {p.sort_p: 3}
"""How often operations take the memory of their operands once more, on CPU."""


class Peak(NamedTuple):
    """The most that a program holds at once.

    Attributes:
      bytes: how much, besides its arguments and results.
      largest: the bytes of the largest value among it.
      shape: that value, as jaxprs print it.
      source: where it is made.
    """

    bytes: int
    largest: int = 0
    shape: str = ""
    source: str = ""


def peak(jaxpr: Jaxpr) -> Peak:
    """An upper bound for the temporary memory of a program."""
    return _peak(jaxpr, (), _variables(jaxpr.outvars))


def nbytes(atom: Atom) -> int:
    """The bytes of a value, as it is stored."""
    aval: Any = atom.aval
    return aval.size * itemsize(aval) if hasattr(aval, "dtype") else 0


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def _peak(jaxpr: Jaxpr, owned: Collection[Var], given: Collection[Var]) -> Peak:
    """As `peak`, of a program that is part of another.

    Args:
      jaxpr: the program.
      owned: the arguments that it may write over.
      given: the results that have memory already.
    """
    last: dict[Var, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last.update((v, number) for v in _variables(equation.invars))
    last.update((v, len(jaxpr.eqns)) for v in _variables(jaxpr.outvars))
    place = _places(jaxpr, last, owned)
    elsewhere = {place.get(v, v) for v in (*owned, *given)}
    ends: dict[Var, int] = {}
    for v, number in last.items():
        root = place.get(v, v)
        ends[root] = max(ends.get(root, 0), number)

    live: dict[Var, int] = {}
    makers: dict[Var, Equation] = {}
    most = Peak(0)
    for number, equation in enumerate(jaxpr.eqns):
        for v in equation.outvars:
            root = place.get(v, v)
            if root not in live and root in ends:
                live[root] = 0 if root in elsewhere else nbytes(v)
                makers[root] = equation
        inner = _inside(equation)
        if (size := sum(live.values()) + inner.bytes) > most.bytes:
            most = _told(size, live, makers, inner)
        for root in [root for root in live if ends[root] <= number]:
            del live[root]
    return most


def _told(
    size: int, live: dict[Var, int], makers: dict[Var, Equation], inner: Peak
) -> Peak:
    largest = max(live, key=lambda v: live[v], default=None)
    if largest is None or inner.largest > live[largest]:
        return inner._replace(bytes=size)
    return Peak(
        size,
        live[largest],
        largest.aval.str_short(),
        source_info_util.summarize(makers[largest].source_info),
    )


def _places(
    jaxpr: Jaxpr, last: dict[Var, int], owned: Collection[Var]
) -> dict[Var, Var]:
    """For results that take the place of operands: the first value that was there."""
    place: dict[Var, Var] = {}
    made: set[Var] = set(owned)
    for number, equation in enumerate(jaxpr.eqns):
        taken: set[Var] = set()
        for operand, result in _in_place(equation):
            if (
                operand in made
                and operand not in taken
                and result not in place
                and last[operand] == number
                and nbytes(operand) == nbytes(result)
            ):
                taken.add(operand)
                place[result] = place.get(operand, operand)
        made.update(equation.outvars)
    return place


def _in_place(equation: Equation) -> Iterator[tuple[Var, Var]]:
    """Which result may take the place of which operand, if they are as large."""
    pairs: Iterable[tuple[Atom, Var]] = ()
    if equation.primitive is p.scan_p:
        first, carried = scan_counts(equation.params)
        pairs = zip(
            equation.invars[first : first + carried], equation.outvars, strict=False
        )
    elif equation.primitive is p.while_p:
        count = len(equation.outvars)
        pairs = zip(equation.invars[-count:], equation.outvars, strict=True)
    elif equation.primitive in IN_PLACE:
        pairs = itertools.product(equation.invars, equation.outvars)
    return ((v, w) for v, w in pairs if not isinstance(v, jex_core.Literal))


def _inside(equation: Equation) -> Peak:
    """What the jaxprs in an equation need, besides its operands and results."""
    times = SCRATCH.get(equation.primitive, 0)
    found = Peak(times * sum(map(nbytes, equation.invars)))
    is_loop = equation.primitive in (p.scan_p, p.while_p)
    for jaxpr in jaxprs_in(equation.params):
        # A loop writes over what it carries, and its body's results are copied there.
        peak = (
            _peak(jaxpr, jaxpr.invars, ())
            if is_loop
            else _peak(jaxpr, (), _variables(jaxpr.outvars))
        )
        found = max(found, peak, key=lambda each: each.bytes)
    return found
