"""Which values differ between the elements of a mapped axis.

It is decided here for all: loops, transposition, residuals, branches, and results
without the axis. It is read off the jaxpr; nothing is traced.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, repeat

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import cond_p, scan_p, while_p

from shardmap._jax.effects import NO_AXIS, has_external_effect
from shardmap._jax.marks import READ, is_mark, shared_along
from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import Atom, Equation, Jaxpr, Var
from shardmap._jax.walk import (
    as_open_jaxpr,
    equations,
    equations_of,
    jaxprs_in,
    per_jaxpr,
)
from shardmap.map.collectives.split import (
    collectives_of,
    gives_all_the_same,
    is_collective,
)
from shardmap.map.primitives.map_primitive import MapPrimitive, binds, is_no_map

_REFERENCE = jax.ref.AbstractRef

Differs = tuple[bool, ...]
"""Which operands, inputs or results differ."""


@per_jaxpr
def differing(jaxpr: Jaxpr, name: Hashable, differs: Differs) -> frozenset[Var]:
    """The variables whose values may differ along an axis.

    Those of the jaxprs that equations hold are among them, if they differ wherever it
    is that the jaxpr is used.

    Args:
      jaxpr: the function of one element.
      name: of the axis. With `NO_AXIS`, what depends on some inputs is found.
      differs: which inputs differ.
    """
    known = {*compress(jaxpr.invars, differs)}
    for equation in jaxpr.eqns:
        operands = tuple(is_in(atom, known) for atom in equation.invars)
        results, held = _of_equation(equation, name, operands)
        known.update(compress(equation.outvars, results))
        known.update(*(differing(inner, name, given) for inner, given in held))
    return frozenset(known)


def differing_results(jaxpr: Jaxpr, name: Hashable, differs: Differs) -> Differs:
    """Which results differ along an axis; see `differing`."""
    known = differing(jaxpr, name, differs)
    return tuple(is_in(atom, known) for atom in jaxpr.outvars)


def predicates_differ(jaxpr: Jaxpr, name: Hashable, differs: Differs) -> bool:
    """Whether what a branch or a loop asks differs, outside of nested maps."""
    known = differing(jaxpr, name, differs)
    return any(
        is_in(equation.invars[0], known)
        if equation.primitive is cond_p
        else is_in(as_open_jaxpr(equation.params["cond_jaxpr"]).outvars[0], known)
        for equation in equations(jaxpr, is_no_map)
        if equation.primitive in (cond_p, while_p)
    )


def is_in(atom: Atom, variables: Iterable[Var]) -> bool:
    """Whether an atom is one of the variables; a literal is none."""
    return not isinstance(atom, jex_core.Literal) and atom in variables


_Inside = tuple[Sequence[bool], list[tuple[Jaxpr, Differs]]]
"""Which results differ, and each jaxpr that runs with which inputs differ."""


def _of_equation(equation: Equation, name: Hashable, differs: Differs) -> _Inside:
    every = [True] * len(equation.outvars)
    if any(isinstance(v.aval, _REFERENCE) for v in equation.outvars):
        return every, []
    if name != NO_AXIS and is_mark(equation, READ):
        return every, []
    if name != NO_AXIS and is_mark(equation, shared_along(name)):
        return [False for _ in every], []
    if is_collective(equation, name):
        is_shared = gives_all_the_same(equation)
        return [not is_shared for _ in every], []
    inner = [as_open_jaxpr(jaxpr) for jaxpr in jaxprs_in(equation.params)]
    if isinstance(equation.primitive, MapPrimitive):
        inner = [as_open_jaxpr(equation.params["call_jaxpr"])]
    is_same = not (
        any(differs) or collectives_of(equation, name) or _has_reference(equation, name)
    )
    if is_same or not inner:
        differ = any(differs) or any(map(has_external_effect, equation.effects))
        held = [(jaxpr, (False,) * len(jaxpr.invars)) for jaxpr in inner]
        return [differ for _ in every], held if is_same else []
    if binds(equation, name):
        name = NO_AXIS
    if equation.primitive is cond_p:
        return _of_cond(inner, name, differs)
    if equation.primitive is scan_p:
        consts, carries = scan_counts(equation.params)
        return _of_loop(inner[0], name, differs, consts, carries)
    if equation.primitive is while_p:
        return _of_while(equation, name, differs)
    [jaxpr, *others] = inner
    is_call = len(jaxpr.invars) == len(differs) and len(jaxpr.outvars) == len(every)
    # A rule of a custom_vmap may have results differ as it likes.
    if others or not is_call or equation.primitive.name == "custom_vmap_call":
        return every, [(each, (True,) * len(each.invars)) for each in inner]
    return differing_results(jaxpr, name, differs), [(jaxpr, differs)]


def _has_reference(equation: Equation, name: Hashable) -> bool:
    """Whether it holds a reference, or what was one, which has a value of each."""
    return name != NO_AXIS and any(
        is_mark(each, READ) or any(isinstance(v.aval, _REFERENCE) for v in each.outvars)
        for each in equations_of(equation)
    )


def _of_cond(branches: Sequence[Jaxpr], name: Hashable, differs: Differs) -> _Inside:
    predicate, *operands = differs
    # Of elements that disagree, all compute all branches, each its own.
    given = tuple(predicate or differ for differ in operands)
    each = [differing_results(branch, name, given) for branch in branches]
    results = [predicate or any(of_one) for of_one in zip(*each, strict=True)]
    return results, [(branch, given) for branch in branches]


def _of_loop(
    body: Jaxpr, name: Hashable, differs: Differs, consts: int, carries: int
) -> _Inside:
    """A loop's, once no further carry differs."""
    while True:
        results = differing_results(body, name, differs)
        carry = differs[consts : consts + carries]
        after = tuple(old or new for old, new in zip(carry, results, strict=False))
        if after == carry:  # The first carry is the last of a loop without steps.
            return [*carry, *results[carries:]], [(body, differs)]
        differs = (*differs[:consts], *after, *differs[consts + carries :])


def _of_while(equation: Equation, name: Hashable, differs: Differs) -> _Inside:
    params = equation.params
    condition, body = map(as_open_jaxpr, (params["cond_jaxpr"], params["body_jaxpr"]))
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    carry = differs[last:]
    while True:
        held = [
            (condition, differs[:first] + carry),
            (body, differs[first:last] + carry),
        ]
        [ends_apart], results = (
            differing_results(jaxpr, name, given) for jaxpr, given in held
        )
        # What each element has depends on how long it has run.
        after = tuple(map(any, zip(carry, results, repeat(ends_apart), strict=False)))
        if after == carry:
            return carry, held
        carry = after
