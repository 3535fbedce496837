"""What jaxprs that compute the same way have in common.

Functions that were traced apart have variables of their own, and places in the user's
program; equation by equation they may be the same all the same, as the steps of a loop
that is written out are.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.types import AnyJaxpr
from shardmap._jax.walk import constants_of, opened

COMPARED = 2**20
"""The most bytes of constants that are compared; a larger one equals itself only."""


class Itself:
    """A key that equals itself only. It holds the thing, so that its id is unique."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


def likeness(jaxpr: AnyJaxpr) -> Hashable:
    """Equal for two jaxprs only if they compute the same of the same arguments."""
    return description(jaxpr, _thing)


def description(jaxpr: AnyJaxpr, told: Callable[[Any], Hashable]) -> Hashable:
    """A jaxpr as a tuple, with numbers for its variables.

    Args:
      jaxpr: the jaxpr.
      told: what stands for a constant, or for the parameters of an equation.
    """
    inner = opened(jaxpr)
    numbers: dict[Any, int] = {}

    def of(atom: Any) -> Hashable:
        if isinstance(atom, jex_core.Literal):
            return atom.aval, told(atom.val)
        return numbers.setdefault(atom, len(numbers)), atom.aval

    equations = []
    arguments = tuple(map(of, (*inner.constvars, *inner.invars)))
    for equation in inner.eqns:
        ins = tuple(map(of, equation.invars))
        outs = tuple(map(of, equation.outvars))
        effects = tuple(sorted(map(repr, equation.effects)))
        params = told(equation.params)
        # Where it runs, and how, may stand beside its parameters.
        around = equation.ctx
        equations.append((equation.primitive, params, around, effects, ins, outs))
    results = tuple(map(of, inner.outvars))
    consts = tuple(map(told, constants_of(jaxpr)))
    return arguments, consts, tuple(equations), results


def _thing(thing: Any) -> Hashable:
    """A parameter or a constant; what may differ where it does not show is itself."""
    kind = type(thing)
    if isinstance(thing, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        return kind, likeness(thing)
    if isinstance(thing, tuple | list):
        return kind, tuple(map(_thing, thing))
    if isinstance(thing, Mapping):
        keys = sorted(thing, key=repr)
        return kind, tuple((key, _thing(thing[key])) for key in keys)
    if isinstance(thing, np.ndarray | np.generic) and thing.nbytes <= COMPARED:
        if thing.dtype != object:
            return kind, str(thing.dtype), thing.shape, thing.tobytes()
    if isinstance(thing, float | complex):
        return kind, repr(thing)  # 0.0 and -0.0 are equal.
    if isinstance(thing, jax.Array):
        return Itself(thing)
    try:
        hash(thing)
    except TypeError:
        return Itself(thing)
    return kind, thing
