"""Checks of the collectives of a traced function, for all lowerings.

JAX makes some of these checks when it lowers a collective, and some never. The same
pass gives collectives the one form that rules take.
"""

import collections
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import ppermute_p

from shardmap._jax.effects import axes_used
from shardmap._jax.primitives import PBROADCAST, axis_names, named_axes
from shardmap._jax.types import DType, Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs_in, rewrite_in_context
from shardmap.map.collectives.rewrites import tiled
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.axis import axis_text
from shardmap.map.primitives.map_primitive import binds, is_no_map


def checked_collectives(jaxpr: Jaxpr, axis_name: Hashable, axis_size: int) -> Any:
    """Checks the axes, groups, indices and dtypes of collectives, and makes them tiled.

    Other axes than the map's are bound in the trace around.
    """

    def change(equation: Equation, place: tuple[bool, bool]) -> Any:
        is_our_axis, in_map = place
        if is_our_axis:
            _check_known(equation, axis_name, axis_size)
        # Maps inside were checked when they were traced.
        if in_map:
            return equation
        collective = COLLECTIVES.get(equation.primitive)
        if collective is None:
            return equation
        params = equation.params
        names = [name for name in axis_names(params) if not isinstance(name, int)]
        try:
            sizes = [
                axis_size if name == axis_name else jax.lax.axis_size(name)
                for name in names
            ]
        except NameError:
            return equation  # An axis of devices, of a program that is lowered.
        total = math.prod(sizes)
        listed = " and ".join(map(repr, names))
        axes = axis_text(names[0]) if len(names) == 1 else f"axes {listed} together"
        where = f"{collective.name} over {axes} of size {total}"
        if len(set(names)) < len(names):
            name = collections.Counter(names).most_common(1)[0][0]
            raise ValueError(f"{where} names {axis_text(name)} more than once.")
        if collective.is_reduction:
            _check_is_of_one_array(where, equation)
        if collective.combiner == "add" and equation.primitive is not PBROADCAST:
            for atom in equation.invars:
                _check_adds(where, aval_of(atom).dtype)
        groups = params.get("axis_index_groups")
        if groups is not None:
            _check_groups(where, groups, total, collective.of_equal_groups)
        if equation.primitive is PBROADCAST:
            _check_index(where, "source", params["source"], 0, total)
        if equation.primitive is not ppermute_p:
            return tiled(equation)
        pairs = _from_the_front(where, params["perm"], total)
        if pairs == tuple(params["perm"]):
            return equation
        return equation.replace(params=params | {"perm": pairs})

    def inside(equation: Equation, place: tuple[bool, bool]) -> tuple[bool, bool]:
        is_our_axis, in_map = place
        is_in_map = in_map or not is_no_map(equation)
        return is_our_axis and not binds(equation, axis_name), is_in_map

    return rewrite_in_context(jaxpr, (True, False), change, inside)


def _check_known(equation: Equation, axis_name: Hashable, axis_size: int) -> None:
    """Refuses one that is not in the table: elements of a device would not combine."""
    if equation.primitive in COLLECTIVES or binds(equation, axis_name):
        return
    # Not every collective has the effect, and what holds one has it too.
    if axis_name in named_axes(equation) or (
        axis_name in axes_used(equation.effects)
        and not any(
            axis_name in axes_used(inner.effects)
            for inner in jaxprs_in(equation.params)
        )
    ):
        raise NotImplementedError(
            f"{equation.primitive} over {axis_text(axis_name)} of size "
            f"{axis_size}: maps do not know this collective. If it is yours, call "
            "register_collective; else use one of jax.lax, such as all_gather."
        )


def _check_adds(where: str, dtype: DType) -> None:
    if any(jnp.issubdtype(dtype, kind) for kind in (bool, jax.dtypes.extended)):
        raise TypeError(
            f"{where} adds, which values of dtype {dtype} cannot. Numbers can; "
            "jax.lax.all_gather gives each element all values."
        )


def _check_is_of_one_array(where: str, equation: Equation) -> None:
    other = equation.params.keys() - {"axes", "axis_name", "axis_index_groups"}
    if other or len(equation.invars) != 1:
        raise ValueError(
            f"{where} is a reduction by a combiner, which is of one array and knows "
            f"its axes, but it has {len(equation.invars)} arrays and the parameters "
            f"{sorted(equation.params)}. Register it without combiner=."
        )


def _check_groups(
    where: str, groups: Sequence[Sequence[int]], total: int, even: bool
) -> None:
    # JAX has checked that they have each index up to some number once.
    given = sum(map(len, groups))
    if given != total:
        raise ValueError(
            f"{where}: its axis_index_groups {_listed(groups)} have {given} indices. "
            f"Each index from 0 to {total - 1} must be in one group."
        )
    sizes = sorted({len(group) for group in groups})
    if even and len(sizes) > 1:
        raise ValueError(
            f"{where}: its axis_index_groups must all be of one size, but "
            f"{_listed(groups)} have {sizes[0]} and {sizes[-1]} indices. Only psum, "
            "pmax and pmin take groups that differ."
        )


def _listed(groups: Sequence[Sequence[int]]) -> str:
    text = str([list(map(int, group)) for group in groups])
    return text if len(text) < 200 else f"{text[:200]} ..."


def _check_index(where: str, what: str, index: int, lowest: int, total: int) -> None:
    if not lowest <= index < total:
        raise ValueError(
            f"{where} has no element {index}, which its {what} names. Its elements "
            f"are 0 to {total - 1}."
        )


def _from_the_front(
    where: str, perm: Sequence[tuple[int, int]], total: int
) -> tuple[tuple[int, int], ...]:
    for pair in perm:
        for index in pair:
            _check_index(where, f"perm {pair}", index, -total, total)
    pairs = tuple((start % total, end % total) for start, end in perm)
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends):
            raise ValueError(
                "ppermute sources and destinations must be unique, got "
                f"{tuple(perm)} over {where.partition(' over ')[2]}."
            )
    return pairs
