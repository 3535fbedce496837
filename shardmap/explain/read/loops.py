"""Loops: their dependences, and the arrays that they go over."""

import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import slice_p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import Atom, Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs_in


def is_in_turn(scan: Equation) -> bool:
    """Whether a step of a `jax.lax.scan` depends on the one before.

    A counter does not count: what it is in a step is known before.
    """
    body: Jaxpr = scan.params["jaxpr"]
    first, count = scan_counts(scan.params)
    carried = body.invars[first : first + count]
    made = {var: equation for equation in body.eqns for var in equation.outvars}
    counters = {
        var
        for var, new in zip(carried, body.outvars[:count], strict=True)
        if new is var or _counts(var, new, made)
    }
    return _needs(body, {*carried} - counters)


def _counts(var: Any, new: Atom, made: dict[Any, Equation]) -> bool:
    """Whether ``new`` is an integer made of ``var`` and of constants alone."""
    if aval_of(var).shape or not jnp.issubdtype(aval_of(var).dtype, jnp.integer):
        return False
    waiting = [new]
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, jex_core.Literal) or atom is var:
            continue
        if atom not in made:
            return False
        waiting += made[atom].invars
    return True


def _needs(jaxpr: Jaxpr, carried: set[Any]) -> bool:
    """Whether an equation uses one of these variables."""
    return any(
        not isinstance(atom, jex_core.Literal) and atom in carried
        for equation in jaxpr.eqns
        for atom in equation.invars
    )


def goes_over(scan: Equation) -> Sequence[Atom]:
    """The operands whose first dimension a `jax.lax.scan` goes over."""
    first, count = scan_counts(scan.params)
    return scan.invars[first + count :]


class Origins:
    """The arguments that values come from, along their first dimension."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._found = {var: frozenset([k]) for k, var in enumerate(jaxpr.invars)}

    def of(self, *atoms: Atom) -> frozenset[int]:
        """The numbers of the arguments."""
        known = [a for a in atoms if not isinstance(a, jex_core.Literal)]
        return frozenset().union(*(self._found.get(a, frozenset()) for a in known))

    def note(self, equation: Equation) -> None:
        """Follows arguments through an equation and into its jaxprs."""
        for var in equation.outvars:
            made_of = [
                atom
                for atom in equation.invars
                if _has_same_rows(aval_of(atom).shape, aval_of(var).shape)
                or (equation.primitive is slice_p and aval_of(var).shape)
            ]
            self._found[var] = self.of(*made_of)
        for inner in jaxprs_in(equation.params):
            if len(inner.invars) == len(equation.invars):
                for var, atom in zip(inner.invars, equation.invars, strict=True):
                    self._found[var] = self.of(atom)


def _has_same_rows(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether the first dimension stays, or is cut into steps and batches."""
    return before[:1] in (after[:1], (math.prod(after[:2]),)) and bool(before)


def in_steps(steps: int, width: int, last: int) -> str:
    """Such as ``4 steps of 3 vectorised and one of 1, one after another``."""
    full = steps if last == width else steps - 1
    text = f"{full:,} step{'s' * (full != 1)} of {width:,}"
    text += " vectorised" * (width > 1)
    if last != width:
        text += f" and one of {last:,}"
    return f"{text}, one after another"
