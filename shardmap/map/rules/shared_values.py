"""Values that all elements share, in the transpose of a map.

What is added up over the elements in a transpose depends on who has a value: all of
them one together, or each one its own that is equal. So a linear function gets two
copies of a shared value where it needs both: one that leads to shared results, whose
cotangent there is once, and one that leads to what differs, with a cotangent for each
element. They meet at markers, which transpose to the sums, and are gone after that:

* `share_p`, from the shared copy to that of each element: the cotangents are added up.
* `total_p`, the sum over the elements as a shared value: each gets the cotangent.
* `known_equal_p`, from equal values of the elements to the shared copy: the first
  element gets the cotangent.

A backward function of `jax.custom_vjp` need not be linear. It is never copied: it runs
once on the whole cotangent of a shared value.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import closed_call_p, custom_lin_p, jit_p, psum_p
from jax.interpreters import ad

from shardmap._jax.effects import NO_AXIS, has_external_effect
from shardmap._jax.references import discharged
from shardmap._jax.types import Atom, Equation, Jaxpr, Primitive, Value, Var, aval_of
from shardmap._jax.walk import (
    equations_of,
    inline_calls,
    map_jaxprs,
    with_same_constants,
)
from shardmap.map.collectives.rewrites import in_two_sums, without_sums_of_shared
from shardmap.map.collectives.split import collectives_of, combines_all
from shardmap.map.differing import Differs, differing, is_in, of_equation
from shardmap.map.primitives.axis import axis_text
from shardmap.map.primitives.map_primitive import binds


def _marker(name: str, transpose: Callable[[Any, Hashable], Any]) -> Primitive:
    """An identity between copies, with a transpose that takes the axis."""

    def rule(cotangent: Any, _: object, *, axis_name: Hashable) -> list[Any]:
        is_zero = isinstance(cotangent, ad.Zero)
        return [cotangent if is_zero else transpose(cotangent, axis_name)]

    primitive = jex_core.Primitive(name)
    primitive.def_abstract_eval(lambda value, *, axis_name: value)
    ad.deflinear2(primitive, rule)
    return primitive


def _of_first(cotangent: Value, axis_name: Hashable) -> Any:
    is_first = jax.lax.axis_index(axis_name) == 0
    return jnp.where(is_first, cotangent, jnp.zeros((), cotangent.dtype))


share_p = _marker("share", jax.lax.psum)
total_p = _marker("total", lambda cotangent, axis_name: cotangent)
known_equal_p = _marker("known_equal", _of_first)


def with_two_copies(
    jaxpr: Jaxpr,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    linear: Sequence[bool],
) -> Any:
    """A linear function of one element, to be transposed as it is.

    Args:
      jaxpr: the function.
      axis_name, axis_size, in_axes, out_axes: of the map.
      linear: which operands are to have a cotangent.
    """

    def is_inlined(equation: Equation) -> bool:
        is_call = equation.primitive in (jit_p, closed_call_p)
        held = collectives_of(equation, axis_name)
        return is_call and bool(held or _has_custom(equation))

    jaxpr = inline_calls(discharged(jaxpr), is_inlined)
    differs = tuple(axis is not None for axis in in_axes)
    differ = differing(jaxpr, axis_name, differs)
    jaxpr = without_sums_of_shared(jaxpr, axis_name, axis_size, differ)
    depend = differing(jaxpr, NO_AXIS, tuple(linear))
    return _Copies(axis_name, differ, depend).made(jaxpr, out_axes)


def _has_custom(equation: Equation) -> bool:
    """Whether an equation is, or holds, a backward function that a user has written."""
    return any(each.primitive is custom_lin_p for each in equations_of(equation))


class _Copies:
    """The copies of linear values.

    Attributes:
      axis_name: the axis.
      differ: the variables that differ along it.
      linear: those that depend on linear operands.
      shared, each: the copy for all elements, and that of each one, of variables where
        it is not the variable itself.
    """

    def __init__(
        self, axis_name: Hashable, differ: frozenset[Var], linear: frozenset[Var]
    ) -> None:
        self.axis_name, self.differ, self.linear = axis_name, differ, linear
        self.shared: dict[Var, Var] = {}
        self.each: dict[Var, Var] = {}
        self.equations: list[Any] = []

    def made(self, jaxpr: Jaxpr, out_axes: Sequence[int | None]) -> Any:
        """The jaxpr with the copies."""
        results = list(zip(jaxpr.outvars, out_axes, strict=True))
        needs_shared, needs_each = self._needed(jaxpr, results)
        for var in jaxpr.invars:
            if var in self.differ and var in needs_shared:
                self.shared[var] = self._marked(known_equal_p, var)
            elif var not in self.differ and var in needs_each:
                self.each[var] = self._marked(share_p, var)
        for equation in jaxpr.eqns:
            of_all = [v for v in equation.outvars if v in needs_shared]
            of_each = [v for v in equation.outvars if v in needs_each]
            if not self._linear_in(equation.invars):
                self.equations.append(equation)
            elif not (of_all or of_each or self._has_known(equation)):
                continue
            elif self._is_shared(equation):
                self._add_shared(equation, of_all, of_each)
            else:
                self._add_each(equation, of_all, of_each)
        return jaxpr.replace(
            eqns=self.equations,
            outvars=[
                _renamed(atom, self.shared if axis is None else self.each)
                for atom, axis in results
            ],
        )

    def _linear_in(self, atoms: Iterable[Atom]) -> set[Any]:
        return {atom for atom in atoms if is_in(atom, self.linear)}

    def _has_known(self, equation: Equation) -> bool:
        """Whether a result does not depend on linear operands."""
        return len(self._linear_in(equation.outvars)) < len(equation.outvars)

    def _is_shared(self, equation: Equation) -> bool:
        atoms = (*equation.invars, *equation.outvars)
        return not (
            any(is_in(atom, self.differ) for atom in atoms)
            or collectives_of(equation, self.axis_name)
        )

    def _is_copied(self, equation: Equation) -> bool:
        has_effect = any(map(has_external_effect, equation.effects))
        return not (has_effect or _has_custom(equation))

    def _needed(
        self, jaxpr: Jaxpr, results: Sequence[tuple[Atom, int | None]]
    ) -> tuple[set[Any], set[Any]]:
        """The variables that need the shared copy, and one of each element."""
        shared = self._linear_in(atom for atom, axis in results if axis is None)
        each = self._linear_in(atom for atom, axis in results if axis is not None)
        for equation in reversed(jaxpr.eqns):
            operands = self._linear_in(equation.invars)
            is_known = self._has_known(equation)
            for_all = is_known or not shared.isdisjoint(equation.outvars)
            for_each = not each.isdisjoint(equation.outvars)
            if not self._is_shared(equation):
                each |= operands if for_all or for_each else set()
            elif self._is_copied(equation):
                shared |= operands if for_all else set()
                each |= operands if for_each else set()
            elif for_all or for_each:
                shared |= operands
        return shared, each

    def _add_shared(
        self, equation: Equation, of_all: Sequence[Var], of_each: Sequence[Var]
    ) -> None:
        """Adds what all elements compute alike, of which each may need its own."""
        is_copied = self._is_copied(equation)
        if of_all or not is_copied or self._has_known(equation):
            invars = [_renamed(atom, self.shared) for atom in equation.invars]
            self.equations.append(equation.replace(invars=invars))
        if is_copied and of_each:
            invars = [_renamed(atom, self.each) for atom in equation.invars]
            outvars = [jex_core.Var(aval_of(var)) for var in equation.outvars]
            self.each.update(zip(equation.outvars, outvars, strict=True))
            self.equations.append(equation.replace(invars=invars, outvars=outvars))
        elif of_each:
            self.each.update((v, self._marked(share_p, v)) for v in of_each)

    def _add_each(
        self, equation: Equation, of_all: Sequence[Var], of_each: Sequence[Var]
    ) -> None:
        """Adds what each element computes, and perhaps all have the result of."""
        invars = [_renamed(atom, self.each) for atom in equation.invars]
        is_sum = equation.primitive is psum_p and combines_all(equation, self.axis_name)
        if of_each or not is_sum:
            new = _with_whole_cotangents(
                equation, self.axis_name, self.differ, self.linear
            )
            self.equations.append(new.replace(invars=invars))
        for var in of_all:
            if is_sum:
                result = self.shared[var] = jex_core.Var(aval_of(var))
                self.equations += in_two_sums(
                    equation.replace(outvars=[result]),
                    self.axis_name,
                    lambda total: [_marking(total_p, self.axis_name, invars[0], total)],
                )
            else:
                self.shared[var] = self._marked(known_equal_p, var)

    def _marked(self, marker: Primitive, var: Var) -> Var:
        result = jex_core.Var(aval_of(var))
        self.equations.append(_marking(marker, self.axis_name, var, result))
        return result


def _renamed(atom: Atom, copies: dict[Var, Var]) -> Any:
    return copies.get(atom, atom) if isinstance(atom, jex_core.Var) else atom


def _marking(marker: Primitive, axis_name: Hashable, var: Any, result: Any) -> Any:
    """The equation of a marker."""
    params = {"axis_name": axis_name}
    return jex_core.new_jaxpr_eqn([var], [result], marker, params, jex_core.no_effects)


def _with_whole_cotangents(
    equation: Equation,
    axis_name: Hashable,
    differ: frozenset[Var],
    linear: frozenset[Var],
) -> Any:
    """An equation of each element, in which users' backward functions run on sums.

    That is so where the value in the loop, branch or map is one that all share.
    """
    if equation.primitive is custom_lin_p or not _has_custom(equation):
        return equation
    differs = of_equation(equation, axis_name, differ).held
    depends = of_equation(equation, NO_AXIS, linear).held

    def changed(jaxpr: Jaxpr, differs: Differs, depends: Differs) -> Any:
        differ = differing(jaxpr, axis_name, differs)
        linear = differing(jaxpr, NO_AXIS, depends)
        new: list[Any] = []
        for each in jaxpr.eqns:
            atoms = (*each.invars, *each.outvars)
            if each.primitive is not custom_lin_p or any(
                is_in(atom, differ) for atom in atoms
            ):
                new.append(_with_whole_cotangents(each, axis_name, differ, linear))
                continue
            if binds(equation, axis_name):
                raise NotImplementedError(
                    f"the gradient of a map over {axis_text(axis_name)} in another of "
                    "that name: jax.custom_vjp of values that the elements of the "
                    "outer one share. Give the inner map another axis_name."
                )
            invars = [
                jex_core.Var(aval_of(atom)) if is_in(atom, linear) else atom
                for atom in each.invars
            ]
            outvars = [jex_core.Var(aval_of(var)) for var in each.outvars]
            new += [
                _marking(known_equal_p, axis_name, old, var)
                for old, var in zip(each.invars, invars, strict=True)
                if var is not old
            ]
            new.append(each.replace(invars=invars, outvars=outvars))
            new += [
                _marking(share_p, axis_name, var, old)
                for var, old in zip(outvars, each.outvars, strict=True)
            ]
        return with_same_constants(jaxpr, eqns=new)

    held = {
        id(jaxpr): changed(jaxpr, given, of_linear)
        for (jaxpr, given), (_, of_linear) in zip(differs, depends, strict=True)
    }
    return equation.replace(
        params=map_jaxprs(equation.params, lambda jaxpr: held.get(id(jaxpr), jaxpr))
    )
