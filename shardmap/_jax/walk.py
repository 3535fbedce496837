"""Reading and rewriting jaxprs, and those that their equations hold.

Jaxprs are shared: a jitted function that is called twice has one, in two equations. So
each jaxpr is visited once.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p

from shardmap._jax.types import (
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    Effect,
    Equation,
    Jaxpr,
    Params,
    Primitive,
)


def as_open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
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


def equations(
    jaxpr: AnyJaxpr, into: Callable[[Equation], bool] = lambda equation: True
) -> Iterator[Equation]:
    """All equations, those of each jaxpr once; an equation before those it holds.

    ``into`` tells whether to look into the jaxprs of an equation.
    """
    return _read(as_open_jaxpr(jaxpr).eqns, into, set())


def equations_of(
    equation: Equation, into: Callable[[Equation], bool] = lambda equation: True
) -> Iterator[Equation]:
    """An equation and those that it holds; see `equations`."""
    return _read([equation], into, set())


def _read(
    eqns: Iterable[Equation], into: Callable[[Equation], bool], seen: set[int]
) -> Iterator[Equation]:
    for equation in eqns:
        yield equation
        if not into(equation):
            continue
        for inner in jaxprs_in(equation.params):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from _read(inner.eqns, into, seen)


Make = TypeVar("Make", bound=Callable[..., Any])
_UNCHANGED = object()


def per_jaxpr(make: Make) -> Make:
    """Caches the results of ``make`` for a jaxpr as long as that jaxpr lives.

    ``make`` takes the jaxpr and hashable arguments. It may return the jaxpr itself, but
    nothing that refers to it, which would keep it alive.
    """
    by_jaxpr: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(make)
    def kept(jaxpr: Jaxpr, *key: Hashable) -> Any:
        values = by_jaxpr.setdefault(jaxpr, {})
        if key not in values:
            value = make(jaxpr, *key)
            values[key] = _UNCHANGED if value is jaxpr else value
        return jaxpr if values[key] is _UNCHANGED else values[key]

    return cast(Make, kept)


@per_jaxpr
def primitives_in(jaxpr: Jaxpr) -> frozenset[Primitive]:
    """The primitives of all equations of a jaxpr, and of the jaxprs in it."""
    return frozenset(equation.primitive for equation in equations(jaxpr))


@per_jaxpr
def without_constants(closed: ClosedJaxpr) -> Any:
    """The jaxpr with its constants as its first inputs."""
    jaxpr: Any = closed.jaxpr
    return jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def equations_with(jaxpr: Jaxpr, primitive: Primitive) -> list[Any]:
    """The equations of a primitive, in whatever other equations hold them."""
    if primitive not in primitives_in(jaxpr):
        return []
    return [e for e in equations(jaxpr) if e.primitive is primitive]


Change = Callable[[Any], Any]
"""Takes an equation; returns it, another one, or a list of equations."""


def rewrite_jaxpr(
    jaxpr: Any, change: Change, into: Callable[[Any], bool] = lambda equation: True
) -> Any:
    """The jaxpr with ``change`` applied to each equation, the innermost first.

    It is ``jaxpr`` itself if nothing has changed. ``change`` sets the effects of the
    equations that it makes; ``into`` tells whether to change the jaxprs of an equation.
    """
    return rewrite_in_context(
        jaxpr,
        True,
        lambda equation, _: change(equation),
        lambda equation, _: into(equation) or None,
    )


def rewrite_in_context(
    jaxpr: Any,
    context: Any,
    change: Callable[[Any, Any], Any],
    inside: Callable[[Any, Any], Any],
    finish: Callable[[Any, Any], Any] = lambda jaxpr, context: jaxpr,
) -> Any:
    """`rewrite_jaxpr` where a change depends on the equations around.

    Args:
      jaxpr: open or closed.
      context: that of the outermost equations, any hashable.
      change: takes an equation and its context.
      inside: gives the context of the equations that an equation holds; None: they
        stay as they are.
      finish: takes each jaxpr with its changed equations, and the context.
    """
    # Jaxprs are shared: a jitted function that is called twice has one.
    done: dict[Any, Any] = {}

    def rewritten(jaxpr: Jaxpr, context: Any) -> Any:
        new: list[Any] = []
        for equation in jaxpr.eqns:
            changed = change(with_params(equation, context), context)
            new += changed if isinstance(changed, list) else [changed]
        if not are_same(jaxpr.eqns, new):
            effects = effects_after(jaxpr, jaxpr.eqns, new)
            jaxpr = jaxpr.replace(eqns=new, effects=effects)
        return finish(jaxpr, context)

    def with_params(equation: Equation, context: Any) -> Any:
        """The equation, with the jaxprs that it holds rewritten."""
        params = equation.params
        if not (before := jaxprs_in(params)):
            return equation
        if (there := inside(equation, context)) is None:
            return equation
        new = map_jaxprs(params, lambda jaxpr: kept(jaxpr, there))
        if are_same(params.values(), new.values()):
            return equation
        effects = effects_after(equation, before, jaxprs_in(new))
        return equation.replace(params=new, effects=effects)

    def kept(jaxpr: Jaxpr, context: Any) -> Any:
        key = id(jaxpr), context
        if key not in done:
            done[key] = rewritten(jaxpr, context)
        return done[key]

    return map_jaxprs({"": jaxpr}, lambda jaxpr: kept(jaxpr, context))[""]


def map_jaxprs(params: Params, change: Callable[[Jaxpr], Any]) -> dict[str, Any]:
    """The parameters of an equation with ``change`` of each jaxpr among them."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            items = list(map(changed, value))
            if are_same(value, items):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, jex_core.Jaxpr):
            return change(value)
        if isinstance(value, jex_core.ClosedJaxpr):
            inner = change(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        return value

    return {key: changed(value) for key, value in params.items()}


def are_same(before: Iterable[Any], after: Iterable[Any]) -> bool:
    """Whether both have the same objects."""
    before, after = list(before), list(after)
    return len(before) == len(after) and all(map(operator.is_, before, after))


def effects_after(
    holder: Any, before: Iterable[Any], after: Iterable[Any]
) -> set[Effect]:
    """The effects of a holder of equations or jaxprs, some of which are replaced.

    Effects of its own, such as those on a reference, stay.
    """
    was, now = (
        {effect for item in items for effect in item.effects}
        for items in (before, after)
    )
    return set(holder.effects) - (was - now) | (now - was)


CALLS = {
    p.closed_call_p: "call_jaxpr",
    p.custom_jvp_call_p: "call_jaxpr",
    p.custom_vjp_call_p: "call_jaxpr",
    p.jit_p: "jaxpr",
    p.remat_p: "jaxpr",
}
"""Primitives that only call a jaxpr, and the parameter that has it."""


def inline_calls(
    jaxpr: Jaxpr, is_wanted: Callable[[Equation], bool] = lambda equation: True
) -> Any:
    """The jaxpr with its calls, or those that are wanted, inlined.

    Custom derivatives are lost: it is for programs that are about to run.
    """
    new: list[Any] = []

    def add(jaxpr: Jaxpr, values: dict[Any, Any], is_inside: bool) -> list[Any]:
        """Adds the equations of a jaxpr; gives its results."""

        def read(atom: Atom) -> Any:
            return atom if isinstance(atom, jex_core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            invars = list(map(read, equation.invars))
            if equation.primitive in CALLS and is_wanted(equation):
                called = equation.params[CALLS[equation.primitive]]
                inner = as_open_jaxpr(called)
                constants = [
                    jex_core.Literal(constant, var.aval)
                    for constant, var in zip(
                        constants_of(called), inner.constvars, strict=True
                    )
                ]
                inputs = [*inner.constvars, *inner.invars]
                given = dict(zip(inputs, [*constants, *invars], strict=True))
                outvars = add(inner, given, True)
            else:
                outvars = list(equation.outvars)
                if is_inside:  # What is called twice has variables of its own.
                    outvars = [jex_core.Var(var.aval) for var in outvars]
                new.append(equation.replace(invars=invars, outvars=outvars))
            values.update(zip(equation.outvars, outvars, strict=True))
        return list(map(read, jaxpr.outvars))

    inputs = [*jaxpr.constvars, *jaxpr.invars]
    outvars = add(jaxpr, dict(zip(inputs, inputs, strict=True)), False)
    return jaxpr.replace(eqns=new, outvars=outvars)


def equations_for(
    fun: Callable[..., Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    like: Equation,
) -> list[Any]:
    """The equations of ``fun``, on given variables, in the context of ``like``."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
    with like.ctx.manager:  # Also that of the equations in those.
        traced = jax.make_jaxpr(fun)(*structs).jaxpr
    names: dict[Any, Any] = dict(zip(traced.invars, invars, strict=True))
    names.update(zip(traced.outvars, outvars, strict=True))

    def renamed(atom: Atom) -> Any:
        return atom if isinstance(atom, jex_core.Literal) else names.get(atom, atom)

    return [
        equation.replace(
            invars=list(map(renamed, equation.invars)),
            outvars=list(map(renamed, equation.outvars)),
            ctx=like.ctx,
        )
        for equation in traced.eqns
    ]
