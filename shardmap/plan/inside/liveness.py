"""How much a program holds at once: an upper bound, from its jaxpr.

What the compiler says of a program for CPU leaves out the scratch memory of its fused
operations. Here every intermediate value is there from where it is made to where it is
last used, unless it takes the place of an operand that is not used any more. A program
runs in the order in which it is written, or breadth first, as XLA has it on CPU so that
much can run at once: whatever takes more.
"""

import itertools
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.extend import source_info_util
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import Atom, Equation, Jaxpr, Var, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.plan.inside.scratch import REDUCTIONS, nbytes, scratch
from shardmap.plan.lax import pointwise

IN_PLACE = frozenset(
    {
        p.dynamic_update_slice_p,
        p.reshape_p,
        *(p.scatter_p, p.scatter_add_p, p.scatter_max_p, p.scatter_min_p),
    }
)


def _is_pointwise(equation: Equation) -> bool:
    return equation.primitive in pointwise.RULES and not scratch(equation)


def _is_product(equation: Equation) -> bool:
    """Whether it is of two matrices, which may lie either way."""
    ranks = {len(aval_of(v).shape) for v in equation.invars}
    return equation.primitive is p.dot_general_p and ranks == {2}


CONTRACTIONS = frozenset({*REDUCTIONS, p.dot_general_p})

READ_THROUGH: Mapping[Any, Callable[[Equation], bool]] = {
    p.broadcast_in_dim_p: _is_pointwise,
    p.iota_p: _is_pointwise,
    p.transpose_p: _is_product,
}
"""What makes values that are not made if all that uses them is of this kind."""


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
    found = _peak(jaxpr, (), _variables(jaxpr.outvars))
    return found._replace(bytes=found.bytes + found.bytes // BETWEEN)


BETWEEN = 32
"""Which part of the memory is added for what kernels of one operation hand on."""


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def _peak(jaxpr: Jaxpr, owned: Collection[Var], given: Collection[Var]) -> Peak:
    """As `peak`, of a program that is part of another.

    Args:
      jaxpr: the program.
      owned: the arguments that it may write over.
      given: the results that have memory already.
    """
    orders = jaxpr.eqns, _breadth_first(jaxpr)
    found = [_peak_in(jaxpr.replace(eqns=list(eqns)), owned, given) for eqns in orders]
    return max(found, key=lambda each: each.bytes)


def _breadth_first(jaxpr: Jaxpr) -> list[Equation]:
    """The equations, each as soon as those are through that were ready before it."""
    users: dict[Var, list[int]] = {}
    missing = []
    made = {v for equation in jaxpr.eqns for v in equation.outvars}
    for number, equation in enumerate(jaxpr.eqns):
        needed = set(_variables(equation.invars)) & made
        missing.append(len(needed))
        for v in needed:
            users.setdefault(v, []).append(number)
    ready = deque(number for number, count in enumerate(missing) if not count)
    order = []
    while ready:
        equation = jaxpr.eqns[ready.popleft()]
        order.append(equation)
        for number in sorted(k for v in equation.outvars for k in users.get(v, ())):
            missing[number] -= 1
            if not missing[number]:
                ready.append(number)
    return order


def _peak_in(jaxpr: Jaxpr, owned: Collection[Var], given: Collection[Var]) -> Peak:
    """As `_peak`, in this order."""
    last = _last_uses(jaxpr)
    views = _views(jaxpr, owned)
    place = _places(jaxpr, last, owned, views)
    elsewhere = {place.get(v, v) for v in (*owned, *given)}
    elsewhere.update(jaxpr.invars, jaxpr.constvars, views)
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


def _users(jaxpr: Jaxpr) -> dict[Var, list[int]]:
    """The numbers of the equations that use a value."""
    users: dict[Var, list[int]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for v in set(_variables(equation.invars)):
            users.setdefault(v, []).append(number)
    return users


def _shared(jaxpr: Jaxpr) -> dict[int, set[Var]]:
    """For each pointwise equation, the operands that it does not write over.

    XLA may fuse it with what uses its result, and then has no kernel that writes over
    an operand that others read as well; unless these come before it in any order, and
    are pointwise, too, or it ends in reductions and products, so that the result is not
    made or is made there.
    """
    users = _users(jaxpr)
    results = set(_variables(jaxpr.outvars))
    makers = {v: k for k, each in enumerate(jaxpr.eqns) for v in each.outvars}
    before: list[int] = []  # The equations that one needs, as bits.
    for equation in jaxpr.eqns:
        needed = {makers[v] for v in _variables(equation.invars) if v in makers}
        before.append(sum(1 << k for k in needed))
        for k in needed:
            before[-1] |= before[k]

    contracted: set[Var] = set()
    for equation in reversed(jaxpr.eqns):
        for v in equation.outvars:
            if v not in results and all(
                user.primitive in CONTRACTIONS
                or (_is_pointwise(user) and user.outvars[0] in contracted)
                for user in (jaxpr.eqns[k] for k in users.get(v, ()))
            ):
                contracted.add(v)

    found = {}
    for number, equation in enumerate(jaxpr.eqns):
        if not _is_pointwise(equation):
            continue
        ends_there = equation.outvars[0] in contracted
        found[number] = {
            v
            for v in _variables(equation.invars)
            for k in users[v]
            if (k != number and not before[number] >> k & 1)
            or not (ends_there or _is_pointwise(jaxpr.eqns[k]))
        }
    return found


def _views(jaxpr: Jaxpr, owned: Collection[Var]) -> set[Var]:
    """The values that XLA never makes, but reads what they are made of instead."""
    users = _users(jaxpr)
    results = set(_variables(jaxpr.outvars))
    there = {*jaxpr.invars, *jaxpr.constvars} - {*owned}
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive is p.reshape_p:
            # An argument that nothing writes over, in another shape.
            given = set(_variables(equation.invars))
            if given and given <= there and equation.outvars[0] not in results:
                found.add(equation.outvars[0])
                there.add(equation.outvars[0])
            continue
        if equation.primitive not in READ_THROUGH:
            continue
        (result,) = equation.outvars
        through = READ_THROUGH[equation.primitive]
        if result not in results and all(
            through(jaxpr.eqns[k]) for k in users.get(result, ())
        ):
            found.add(result)
    return found


def _last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    last: dict[Var, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last.update((v, number) for v in _variables(equation.invars))
    last.update((v, len(jaxpr.eqns)) for v in _variables(jaxpr.outvars))
    return last


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
    jaxpr: Jaxpr, last: dict[Var, int], owned: Collection[Var], views: Collection[Var]
) -> dict[Var, Var]:
    """For results that take the place of operands: the first value that was there."""
    place: dict[Var, Var] = {}
    made: set[Var] = set(owned)
    shared = _shared(jaxpr)
    for number, equation in enumerate(jaxpr.eqns):
        keeps = shared.get(number, ())
        if equation.outvars and equation.outvars[0] in views:
            for operand in _variables(equation.invars[:1]):
                place[equation.outvars[0]] = place.get(operand, operand)
            continue
        taken: set[Var] = set()
        for operand, result in _in_place(equation):
            if (
                operand in made
                and operand not in taken
                and operand not in keeps
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
    elif equation.primitive is p.cond_p:
        pairs = _written_over(equation)
    elif equation.primitive in IN_PLACE:
        pairs = itertools.product(equation.invars, equation.outvars)
    elif _is_pointwise(equation):
        pairs = (
            (v, w)
            for v, w in itertools.product(equation.invars, equation.outvars)
            if aval_of(v).shape == aval_of(w).shape
            and aval_of(v).dtype == aval_of(w).dtype
        )
    return ((v, w) for v, w in pairs if not isinstance(v, jex_core.Literal))


def _written_over(equation: Equation) -> Iterator[tuple[Atom, Var]]:
    """The results of a branch for which each branch takes the place of one operand."""
    operands = equation.invars[1:]
    taken = []
    for jaxpr in jaxprs_in(equation.params):
        place = _places(jaxpr, _last_uses(jaxpr), jaxpr.invars, ())
        numbers = {v: k for k, v in enumerate(jaxpr.invars)}
        roots = [
            None if isinstance(v, jex_core.Literal) else place.get(v, v)
            for v in jaxpr.outvars
        ]
        taken.append([None if v is None else numbers.get(v) for v in roots])
    for k, result in enumerate(equation.outvars):
        first = taken[0][k]
        if first is not None and all(row[k] == first for row in taken):
            yield operands[first], result


def _inside(equation: Equation) -> Peak:
    """What the jaxprs in an equation need, besides its operands and results."""
    found = Peak(scratch(equation))
    is_loop = equation.primitive in (p.scan_p, p.while_p)
    for jaxpr in jaxprs_in(equation.params):
        # A loop writes over what it carries, and its body's results are copied there.
        peak = (
            _peak(jaxpr, jaxpr.invars, ())
            if is_loop
            else _peak(jaxpr, (), _variables(jaxpr.outvars))
        )
        if equation.primitive is p.scan_p:
            sliced = jaxpr.invars[sum(scan_counts(equation.params)) :]
            peak = peak._replace(bytes=peak.bytes + sum(map(nbytes, sliced)))
        found = max(found, peak, key=lambda each: each.bytes)
    return found
