"""What is worth changing in a program: found, with numbers, and what to do instead."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import (
    all_gather_p,
    conv_general_dilated_p,
    dot_general_p,
    dynamic_slice_p,
    gather_p,
    slice_p,
    squeeze_p,
)

from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import ClosedJaxpr, Equation, Jaxpr, aval_of
from shardmap._jax.walk import equations, jaxprs, jaxprs_in
from shardmap.explain.read.collectives import nbytes
from shardmap.explain.read.source import source_of
from shardmap.explain.report import ArrayLayout, Axis, Remark
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.shardings import map_shardings
from shardmap.units import size

LARGE = 1 << 20
"""From how many bytes on a value is large."""

_PARTS = (slice_p, dynamic_slice_p, gather_p, squeeze_p)
"""What takes a part of an array."""

_CUT_INPUT = (
    "Where a device needs only a part, cut it: map it, or name a mesh axis for one "
    "of its dimensions."
)
_CUT_RESULT = (
    "Where a device needs only a part next, ask for it cut: out_axes= of a map, "
    "out_specs= or out_shardings=; gradients are cut as the weights that they are for."
)

_ON_DEVICES = ("spmap", "shard_map", "pmap")


def remarks_on(
    closed: ClosedJaxpr,
    axes: Sequence[Axis],
    arrays: Sequence[ArrayLayout],
    num_devices: int,
    available: int | None,
    idle_axes: Sequence[tuple[str, int]] = (),
) -> tuple[Remark, ...]:
    """The remarks on a program, those on idle devices first.

    Args:
      closed: the program, with its constants.
      axes: its axes.
      arrays: its inputs and outputs.
      num_devices: how many devices it runs on.
      available: how many there are; None if the mesh has no devices.
      idle_axes: the mesh axes along which nothing is cut, with their sizes.
    """
    jaxpr = closed.jaxpr
    return (
        *_idle_devices(axes, num_devices, available),
        *_uncut_batch(arrays, idle_axes),
        *_short_axes(axes, available),
        *_copies(arrays),
        *_constants(closed.consts, num_devices),
        *_made_whole(jaxpr, num_devices),
        *_sliced_gathers(jaxpr),
        *_outside(jaxpr, num_devices),
    )


def _idle_devices(
    axes: Sequence[Axis], num_devices: int, available: int | None
) -> list[Remark]:
    """Devices that are there and have nothing to do, or that could be there."""
    outer = [a for a in axes if a.kind in _ON_DEVICES or a.devices > 1]
    if available == 1 and outer:
        return [
            Remark(
                "JAX has 1 device, so that nothing runs in parallel",
                "JAX_NUM_CPU_DEVICES=8 in the environment makes eight of a CPU.",
                None,
            )
        ]
    if available is None or num_devices >= available or not outer:
        return []
    axis, idle = outer[0], available - num_devices
    advice = "A longer axis, or a second one inside, has work for the others."
    if axis.size is not None and axis.size > axis.devices:
        at_once = -(-axis.size // available)
        possible = -(-axis.size // at_once)
        if possible > axis.devices:
            advice = (
                f"devices= or mesh= leaves the others out: on {possible:,} devices, "
                f"each would have {at_once:,} of the {axis.size:,}."
            )
    return [
        Remark(
            f"{_name(axis)} of {axis.size:,} runs on {num_devices:,} of {available:,} "
            f"devices: {idle:,} {'is' if idle == 1 else 'are'} idle",
            advice,
            axis.source,
        )
    ]


def _uncut_batch(
    arrays: Sequence[ArrayLayout], idle_axes: Sequence[tuple[str, int]]
) -> list[Remark]:
    """A batch that could be cut along a mesh axis that nothing is cut along.

    It is an input that does not come back as a result, as parameters do.
    """
    results = {(each.shape, each.dtype) for each in arrays if each.role == "output"}
    batches = [
        each
        for each in arrays
        if each.role == "input" and each.shape and (each.num_devices or 1) > 1
        if each.shard_bytes == each.bytes and (each.shape, each.dtype) not in results
    ]
    batches.sort(key=lambda each: -each.bytes)
    for name, count in idle_axes:
        for batch in batches:
            if batch.shape[0] and batch.shape[0] % count == 0:
                return [
                    Remark(
                        f"nothing is cut along mesh axis {name!r}: its {count:,} "
                        "devices all do the same",
                        f"If {batch.path} is a batch, cut it: jax.device_put("
                        f"{batch.path}, NamedSharding(mesh, P({name!r}))) gives each "
                        f"{batch.shape[0] // count:,} of {batch.shape[0]:,}.",
                        batch.path,
                    )
                ]
    return []


def _name(axis: Axis) -> str:
    return "an axis" if axis.name is None else f"axis {axis.name!r}"


def _copies(arrays: Sequence[ArrayLayout]) -> list[Remark]:
    """A remark for all arrays of an argument, or of the result, that are not cut."""
    whole: dict[tuple[str, str, int], list[ArrayLayout]] = {}
    for array in arrays:
        count = array.num_devices
        if count is not None and count > 1 and array.shard_bytes == array.bytes:
            root = re.split(r"[\[.]", array.path, maxsplit=1)[0]
            whole.setdefault((array.role, root, count), []).append(array)
    found = []
    totals = {key: sum(array.bytes for array in those) for key, those in whole.items()}
    large = [key for key, total in totals.items() if total >= LARGE]
    for key in sorted(large, key=lambda key: -totals[key]):
        (role, root, count), total, those = key, totals[key], whole[key]
        is_input = role == "input"
        several = len(those) > 1
        path = root if several else those[0].path
        what = f"{len(those):,} arrays of {root}, together" if several else f"{path} of"
        how = "replicated on" if is_input else "given back whole on"
        found.append(
            Remark(
                f"{what} {size(total)}{',' * several} {'are' if several else 'is'} "
                f"{how} {count:,} devices: {size(total * count)} in all",
                _CUT_INPUT if is_input else _CUT_RESULT,
                path,
            )
        )
    return found


def _constants(constants: Sequence[Any], num_devices: int) -> list[Remark]:
    return [
        Remark(
            f"a constant of {size(constant.nbytes)} and shape "
            f"{tuple(constant.shape)} is part of the program, replicated on "
            f"{num_devices:,} devices",
            "Make it an argument: it is then laid out like one, and not compiled in.",
            None,
        )
        for constant in constants
        if num_devices > 1 and constant.nbytes >= LARGE
    ]


def _made_whole(jaxpr: Jaxpr, num_devices: int) -> list[Remark]:
    """Values that the program makes, and then gives a map whole."""
    found = []
    for scope in jaxprs(jaxpr) if num_devices > 1 else ():
        made = {var for equation in scope.eqns for var in equation.outvars}
        for equation in scope.eqns:
            for atom in _taken_whole(equation):
                is_made = not isinstance(atom, jex_core.Literal) and atom in made
                if is_made and nbytes(aval_of(atom)) >= LARGE:
                    found.append(
                        Remark(
                            f"a value of {size(nbytes(aval_of(atom)))} and shape "
                            f"{atom.aval.shape} is made outside the map, and given to "
                            "it whole, on each of its devices",
                            "If an element needs only a part of it, map it; if it is "
                            "quickly made, make it inside.",
                            source_of(equation),
                        )
                    )
    return found


def _taken_whole(equation: Equation) -> list[Any]:
    """The operands that each device of a map has whole."""
    params = equation.params
    if equation.primitive is spmap_p and params["mesh"] is not None:
        # A map inside may cut what this one does not.
        specs = [sharding.spec for sharding in map_shardings(params).operands]
    elif equation.primitive is SHARD_MAP:
        specs = params["in_specs"]
    else:
        return []
    return [
        atom
        for atom, spec in zip(equation.invars, specs, strict=True)
        if not spec.unreduced and not any(spec.partitions)
    ]


def _sliced_gathers(jaxpr: Jaxpr) -> list[Remark]:
    found = []
    for scope in jaxprs(jaxpr):
        uses: dict[Any, list[Any]] = {}
        for equation in scope.eqns:
            for atom in equation.invars:
                if not isinstance(atom, jex_core.Literal):
                    uses.setdefault(atom, []).append(equation)
        results = {v for v in scope.outvars if not isinstance(v, jex_core.Literal)}
        for equation in scope.eqns:
            if equation.primitive is not all_gather_p:
                continue
            (gathered,) = equation.outvars
            users = uses.get(gathered, [])
            if not users or gathered in results:
                continue
            if all(user.primitive in _PARTS for user in users):
                used = max(sum(nbytes(aval_of(v)) for v in u.outvars) for u in users)
                found.append(
                    Remark(
                        "all_gather gives every device "
                        f"{size(nbytes(aval_of(gathered)))}, "
                        f"of which at most {size(used)} at a time are used: its "
                        "result is only sliced",
                        "Slice before the collective, or send only that part: "
                        "ppermute to one device, all_to_all for a piece to each.",
                        source_of(equation),
                    )
                )
    return found


def _short_axes(axes: Sequence[Axis], available: int | None) -> list[Remark]:
    found = []
    for number, axis in enumerate(axes):
        if axis.kind not in _ON_DEVICES or axis.idle_places == 0:
            continue
        inside = [a for a in axes if a.inside == number and a.kind == "spmap"]
        found.append(
            Remark(
                f"{_name(axis)} of {axis.size:,} does not divide: {axis.layout} have "
                f"room for {axis.idle_places:,} more, which compute nothing of use, "
                "and its arrays are replicated on every device between calls",
                _grid(axis, inside, available)
                or f"Make it a multiple of {axis.devices:,}.",
                axis.source,
            )
        )
    found += [
        Remark(
            f"nothing is cut along mesh axis {axis.name!r}: its {axis.devices:,} "
            "devices all do the same",
            "Name it in in_specs=, for a dimension that they can share; or leave it "
            "out of the mesh.",
            axis.source,
        )
        for axis in axes
        if axis.is_repeated
    ]
    return found


def _grid(axis: Axis, inside: Sequence[Axis], available: int | None) -> str | None:
    """How two axes, the outer one short, share the devices; None: they do not."""
    outer = axis.size
    if outer is None or available is None:
        return None
    for inner in inside:
        if inner.devices > 1 or inner.size is None:
            continue
        counts = range(available // outer, 1, -1)
        count = next((n for n in counts if inner.size % n == 0), None)
        if count is not None:
            return (
                f"devices=jax.devices()[:{outer * count}] of the outer map gives "
                f"{outer:,} x {count:,}: the axis inside is then on devices, too."
            )
    return None


def _outside(jaxpr: Jaxpr, num_devices: int) -> list[Remark]:
    """Heavy operations before any map, on values that no map has cut."""
    found: list[Remark] = []
    if num_devices > 1 and _has_map(jaxpr):
        _search_outside(jaxpr, [False] * len(jaxpr.invars), found)
    return found


def _search_outside(
    jaxpr: Jaxpr, invars_cut: Sequence[bool], found: list[Remark]
) -> list[bool]:
    """Adds a remark for each; gives which results come from a map."""
    cut = dict(zip(jaxpr.invars, invars_cut, strict=True))
    for equation in jaxpr.eqns:
        if equation.primitive in (spmap_p, SHARD_MAP):
            for atom in equation.invars:
                if not isinstance(atom, jex_core.Literal):
                    cut.setdefault(atom, False)
            cut.update((var, True) for var in equation.outvars)
            continue
        from_map = [
            not isinstance(atom, jex_core.Literal) and cut.get(atom, False)
            for atom in equation.invars
        ]
        inner = jaxprs_in(equation.params)
        if len(inner) == 1 and len(inner[0].invars) == len(from_map):
            results = _search_outside(inner[0], from_map, found)
            if len(results) == len(equation.outvars):
                cut.update(zip(equation.outvars, results, strict=True))
                continue
        flops = _flops(equation)
        if flops >= LARGE and not any(from_map):
            found.append(
                Remark(
                    f"{equation.primitive} of {flops:,} flops is outside the map: "
                    "each device does all of it, or one does, unless the compiler "
                    "finds a way to cut it",
                    "Do it inside the map, on each element's part, or map it too.",
                    source_of(equation),
                )
            )
        cut.update((var, any(from_map)) for var in equation.outvars)
    return [
        not isinstance(atom, jex_core.Literal) and cut.get(atom, False)
        for atom in jaxpr.outvars
    ]


def _flops(equation: Equation) -> int:
    """Roughly, of products: two for each number read and each number written."""
    if equation.primitive is dot_general_p:
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = aval_of(equation.invars[0]).shape
        depth = math.prod(shape[dimension] for dimension in contracted)
    elif equation.primitive is conv_general_dilated_p:
        kernel = aval_of(equation.invars[1]).shape
        depth = math.prod(kernel) // max(kernel)
    else:
        return 0
    return 2 * depth * math.prod(aval_of(equation.outvars[0]).shape)


def _has_map(jaxpr: Jaxpr) -> bool:
    return any(e.primitive in (spmap_p, SHARD_MAP) for e in equations(jaxpr))
