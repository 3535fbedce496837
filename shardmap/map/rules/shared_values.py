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

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import (
    closed_call_p,
    custom_lin_p,
    custom_vjp_call_p,
    jit_p,
    psum_p,
)
from jax.interpreters import ad

from shardmap._jax.effects import NO_AXIS
from shardmap._jax.marks import is_mark, shared_along, with_marks
from shardmap._jax.references import discharged
from shardmap._jax.types import Atom, Equation, Jaxpr, Primitive, Value, Var, aval_of
from shardmap._jax.walk import (
    equations_of,
    inline_calls,
    map_jaxprs,
    primitives_in,
    rewrite_in_context,
    rewrite_jaxpr,
)
from shardmap.map.collectives.rewrites import over_other_axes, without_sums_of_shared
from shardmap.map.collectives.split import collectives_of, combines_all
from shardmap.map.differing import differing, is_in
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

    A copy that nothing needs has no cotangent, and is not transposed.

    Args:
      jaxpr: the function.
      axis_name, axis_size, in_axes, out_axes: of the map.
      linear: which operands are to have a cotangent.
    """

    def is_inlined(equation: Equation) -> bool:
        is_call = equation.primitive in (jit_p, closed_call_p)
        held = collectives_of(equation, axis_name)
        return is_call and bool(held or _has_custom(equation))

    # Calls in loops and branches too, so that each has variables of its own.
    jaxpr = rewrite_in_context(
        discharged(jaxpr),
        True,
        lambda equation, _: equation,
        lambda equation, _: True,
        lambda jaxpr, _: inline_calls(jaxpr, is_inlined),
    )
    differ = differing(jaxpr, axis_name, tuple(axis is not None for axis in in_axes))
    jaxpr = without_sums_of_shared(jaxpr, axis_name, axis_size, differ)
    depend = differing(jaxpr, NO_AXIS, tuple(linear))
    alike = depend - differ
    # The copies of variables, where they are not the variable itself.
    shared: dict[Any, Any] = {}
    each: dict[Any, Any] = {}
    new: list[Any] = []

    def marked(marker: Primitive, var: Any) -> Var:
        result = jex_core.Var(aval_of(var))
        new.append(_marking(marker, axis_name, var, result))
        return result

    each.update((v, marked(share_p, v)) for v in jaxpr.invars if v in alike)
    for equation in jaxpr.eqns:
        outvars = [v for v in equation.outvars if v in alike]
        of_all, of_each = (
            [_renamed(atom, copies) for atom in equation.invars]
            for copies in (shared, each)
        )
        if not any(is_in(atom, depend) for atom in equation.invars):
            new.append(equation)
        elif not _is_shared(equation, axis_name, differ):
            whole = _with_whole_cotangents(equation, axis_name, differ)
            new.append(whole.replace(invars=of_each))
            if is_mark(equation, shared_along(axis_name)):
                shared.update((v, marked(total_p, v)) for v in outvars)
            elif equation.primitive is psum_p and combines_all(equation, axis_name):
                shared[outvars[0]] = result = jex_core.Var(aval_of(outvars[0]))
                total, rest = over_other_axes(
                    equation.replace(outvars=[result]), axis_name
                )
                new += [_marking(total_p, axis_name, of_each[0], total), *rest]
            else:
                shared.update((v, marked(known_equal_p, v)) for v in outvars)
        else:
            new.append(equation.replace(invars=of_all))
            if _has_custom(equation):
                each.update((v, marked(share_p, v)) for v in outvars)
            else:
                copies = [jex_core.Var(aval_of(var)) for var in equation.outvars]
                each.update(zip(equation.outvars, copies, strict=True))
                new.append(equation.replace(invars=of_each, outvars=copies))
    results = [
        _renamed(atom, each)
        if axis is not None
        else marked(known_equal_p, atom)
        if is_in(atom, differ & depend)
        else _renamed(atom, shared)
        for atom, axis in zip(jaxpr.outvars, out_axes, strict=True)
    ]
    return jaxpr.replace(eqns=new, outvars=results)


def with_shared_results_marked(
    jaxpr: Jaxpr, axis_name: Hashable, in_axes: Sequence[int | None]
) -> Any:
    """``jaxpr``, before its derivative, with marks on shared results of `custom_vjp`.

    What is differentiated does not tell that a backward function is for one of them:
    each element's gets the whole cotangent, such as that of a sum over the axis.
    """
    if custom_vjp_call_p not in primitives_in(jaxpr):
        return jaxpr
    differ = differing(jaxpr, axis_name, tuple(axis is not None for axis in in_axes))

    def change(equation: Equation) -> Any:
        takes_differing = any(is_in(atom, differ) for atom in equation.invars)
        if equation.primitive is not custom_vjp_call_p or not takes_differing:
            return equation
        shared = [v for v in equation.outvars if v not in differ]
        return with_marks(equation, shared, shared_along(axis_name))

    def into(equation: Equation) -> bool:
        is_custom = equation.primitive is custom_vjp_call_p
        return not (is_custom or binds(equation, axis_name))

    return rewrite_jaxpr(jaxpr, change, into)


def _has_custom(equation: Equation) -> bool:
    """Whether an equation is, or holds, a backward function that a user has written."""
    return any(each.primitive is custom_lin_p for each in equations_of(equation))


def _is_shared(
    equation: Equation, axis_name: Hashable, differ: Collection[Var]
) -> bool:
    """Whether all elements compute it alike, each for itself."""
    atoms = (*equation.invars, *equation.outvars)
    has_differing = any(is_in(atom, differ) for atom in atoms)
    return not (has_differing or collectives_of(equation, axis_name))


def _renamed(atom: Atom, copies: Mapping[Any, Any]) -> Any:
    return copies.get(atom, atom) if isinstance(atom, jex_core.Var) else atom


def _marking(marker: Primitive, axis_name: Hashable, var: Any, result: Any) -> Any:
    """The equation of a marker."""
    params = {"axis_name": axis_name}
    return jex_core.new_jaxpr_eqn([var], [result], marker, params, jex_core.no_effects)


def _with_whole_cotangents(
    equation: Equation, axis_name: Hashable, differ: Collection[Var]
) -> Any:
    """An equation of each element, in which users' backward functions run on sums.

    That is so where the value in the loop, branch or map is one that all share.
    """

    def change(each: Equation) -> Any:
        if is_mark(each, shared_along(axis_name)) and is_in(each.invars[0], differ):
            total = jex_core.Var(aval_of(each.outvars[0]))
            return [
                _marking(total_p, axis_name, each.invars[0], total),
                _share(total, each.outvars[0]),
            ]
        is_custom = each.primitive is custom_lin_p
        if not (is_custom and _is_shared(each, axis_name, differ)):
            return each
        count = each.params["num_res"]
        operands = [jex_core.Var(aval_of(atom)) for atom in each.invars[count:]]
        results = [jex_core.Var(aval_of(var)) for var in each.outvars]
        return [
            *map(_known_equal, each.invars[count:], operands),
            each.replace(invars=[*each.invars[:count], *operands], outvars=results),
            *map(_share, results, each.outvars),
        ]

    _known_equal = functools.partial(_marking, known_equal_p, axis_name)
    _share = functools.partial(_marking, share_p, axis_name)
    if binds(equation, axis_name) or not _has_custom(equation):
        return equation

    def changed(jaxpr: Jaxpr) -> Any:
        return rewrite_jaxpr(jaxpr, change, lambda each: not binds(each, axis_name))

    return equation.replace(params=map_jaxprs(equation.params, changed))
