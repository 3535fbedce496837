"""Walking through jaxprs, and through those that their equations hold.

Jaxprs are shared: a jitted function that is called twice has one, in two equations. A
walk that does not remember where it has been takes as long as all paths together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax.extend.core as jex_core

from shardmap._jax.types import AnyJaxpr, Equation, Jaxpr

State = TypeVar("State")


def opened(jaxpr: AnyJaxpr) -> Jaxpr:
    """A jaxpr, closed or not, as one whose constants are variables."""
    # From JAX 0.12 on there is one class, and each is its own.
    inner: Any = jaxpr
    return cast(Jaxpr, getattr(inner, "jaxpr", inner))


def constants_of(jaxpr: AnyJaxpr) -> Sequence[Any]:
    """The constants that a jaxpr is closed with; none if it is not."""
    # Before JAX 0.12 one that is not closed has no such attribute.
    return cast(Sequence[Any], getattr(jaxpr, "consts", ()))


def with_same_constants(jaxpr: Jaxpr, **changes: object) -> Jaxpr:
    """The jaxpr with other equations or variables, closed with what it was."""
    # From JAX 0.12 on it lets its constants go with their variables.
    if constants := constants_of(jaxpr):
        changes["consts"] = constants
    changed: Any = jaxpr.replace(**changes)
    return cast(Jaxpr, changed)


def jaxprs_in(params: Mapping[str, Any]) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation, without their constants."""
    return list(jex_core.jaxprs_in_params(dict(params)))


def walk(
    jaxpr: AnyJaxpr,
    state: State,
    enter: Callable[[Equation, State], State | None],
) -> Iterator[tuple[Equation, State]]:
    """All equations, each before those that it holds, with what is around them.

    Args:
      jaxpr: where to begin.
      state: what is around it, hashable. A jaxpr is walked once for each state.
      enter: gives the state inside an equation; None: what it holds is left out.
    """
    seen = set()

    def inside(jaxpr: AnyJaxpr, state: State) -> Iterator[tuple[Equation, State]]:
        if (id(jaxpr), state) in seen:
            return
        seen.add((id(jaxpr), state))
        for equation in opened(jaxpr).eqns:
            yield equation, state
            within = enter(equation, state)
            if within is not None:
                for inner in jaxprs_in(equation.params):
                    yield from inside(inner, within)

    return inside(jaxpr, state)


def equations(
    jaxpr: AnyJaxpr, into: Callable[[Equation], bool] = lambda equation: True
) -> Iterator[Equation]:
    """All equations, those of each jaxpr once; an equation before those it holds.

    Args:
      jaxpr: where to begin.
      into: tells whether to look into what an equation holds.
    """
    found = walk(jaxpr, True, lambda equation, _: into(equation) or None)
    return (equation for equation, _ in found)


def jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """The jaxpr and all that are in it, each once, the outer before the inner."""
    found, seen = [jaxpr], {id(jaxpr)}
    for each in found:  # It grows meanwhile.
        yield each
        for equation in each.eqns:
            for inner in jaxprs_in(equation.params):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    found.append(inner)
