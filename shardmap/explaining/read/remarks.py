"""Remarks: what to change in a program, with numbers and the remedy."""

import collections
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from shardmap._jax.types import AnyJaxpr, aval_of
from shardmap._jax.walk import equations, equations_of, jaxprs_in
from shardmap.explaining.read.hlo.causes import AGAIN, CUT, REMATERIALISED
from shardmap.explaining.report import (
    MAPS,
    ArrayLayout,
    Axis,
    Collective,
    Remark,
    argument_of,
)
from shardmap.sharding.mesh import virtual_devices
from shardmap.source import call_of, source_of
from shardmap.units import size

LARGE = 1 << 20
"""The least bytes of a large array."""

PART = 0.01
"""The least part of a device's memory for a remark on arrays that are replicated."""

UNROLLED = 3
"""The least steps of a Python loop for a remark that they could be one operation."""

_PRODUCTS = dot_general_p, conv_general_dilated_p

_SENT_MORE = {
    AGAIN: (
        "for a sum that jax.checkpoint computes again in the gradient",
        "Keep it: name it with jax.ad_checkpoint.checkpoint_name, and give "
        "jax.checkpoint policy=jax.checkpoint_policies.save_only_these_names.",
    ),
    CUT: (
        "for a sum of which each device keeps a part",
        "A reduce-scatter sends half: ask for the sharded layout where the sum is "
        "made, with jax.lax.with_sharding_constraint, as of the gradient of a layer.",
    ),
}
"""What is sent, and the advice, by what the cause of a collective has."""

_CUT_INPUT = (
    "If each device needs only a part, shard it: map it, or name a mesh axis for one "
    "of its dimensions."
)
_CUT_STATE = (
    "Most have the shapes of arrays that are sharded: shard them alike, as the state "
    "of an optimizer like its weights."
)
_CUT_RESULT = (
    "If each device needs only a part next, ask for a sharded result with out_axes= of "
    "a map, out_specs= or out_shardings=. Shard gradients like their weights."
)


def too_large(
    needed: int | None, capacity: int | None, arrays: Sequence[ArrayLayout]
) -> list[Remark]:
    """A remark on a program that the compiler refuses, by the bytes that it needs."""
    if needed is None:
        return []
    inputs = [each for each in arrays if each.role == "input"]
    held = sum(each.shard_bytes or each.bytes for each in inputs)
    advice = (
        "Compute less at once with batch_size=, or recompute values with "
        "jax.checkpoint."
    )
    if 2 * held > min(needed, capacity or needed):
        advice = "Shard the largest arguments over more devices, or donate them."
    text = (
        f"the compiler refuses the program: it needs {size(needed)} of memory on a "
        f"device, {size(min(held, needed))} of it for arguments"
    )
    return [Remark(text, advice, None)]


def idle_devices(
    axes: Sequence[Axis], num_devices: int, available: int | None
) -> list[Remark]:
    """Remarks on devices without work, or on too few devices."""
    outer = [a for a in axes if a.kind in MAPS or a.devices > 1]
    if available == 1 and outer:
        return [
            Remark(
                "JAX has 1 device, so that nothing runs in parallel",
                f"For 8 virtual ones on CPU, call {virtual_devices(8)} before any "
                "other use of JAX.",
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
            f"{axis.title} of {axis.size:,} runs on {num_devices:,} of {available:,} "
            f"devices: {idle:,} {'is' if idle == 1 else 'are'} idle",
            advice,
            axis.source,
        )
    ]


def unsharded_batch(
    arrays: Sequence[ArrayLayout], idle_axes: Sequence[tuple[str, int]]
) -> list[Remark]:
    """A remark on a batch that is not sharded while a mesh axis is unused.

    A batch is an input that does not come back as a result, unlike parameters.
    """
    results = {(each.shape, each.dtype) for each in arrays if each.role == "output"}
    batches = [
        each
        for each in arrays
        if each.role == "input" and each.shape and each.is_replicated
        if (each.shape, each.dtype) not in results
    ]
    batches.sort(key=lambda each: -each.bytes)
    for name, count in idle_axes:
        for batch in batches:
            if batch.shape[0] and batch.shape[0] % count == 0:
                advice = (
                    f"If {batch.path} is a batch, shard it: jax.device_put("
                    f"{batch.path}, NamedSharding(mesh, P({name!r}))) gives each "
                    f"{batch.shape[0] // count:,} of {batch.shape[0]:,}."
                )
                return [Remark(_nothing_sharded(name, count), advice, batch.path)]
    return []


def _nothing_sharded(name: str | None, count: int) -> str:
    return (
        f"nothing is sharded along mesh axis {name!r}: its {count:,} devices all do "
        "the same"
    )


def short_axes(axes: Sequence[Axis]) -> list[Remark]:
    """Remarks on axes that do not fill their devices."""
    remarks = []
    for axis in axes:
        if axis.kind not in MAPS or axis.idle_places == 0:
            continue
        remarks.append(
            Remark(
                f"{axis.title} of {axis.size:,} does not divide: {axis.layout} have "
                f"room for {axis.idle_places:,} more, which compute nothing of use, "
                "and its arrays are replicated on every device between calls",
                f"Make it a multiple of {axis.devices:,}.",
                axis.source,
            )
        )
    remarks += [
        Remark(
            _nothing_sharded(axis.name, axis.devices),
            "Name it for a dimension that they can share, in in_specs= of "
            "jax.shard_map or in_axes= of mesh_map; or leave it out of the mesh.",
            axis.source,
        )
        for axis in axes
        if axis.is_repeated
    ]
    return remarks


def copies(arrays: Sequence[ArrayLayout], peak_bytes: int | None) -> list[Remark]:
    """A remark for all arrays of an argument, or of the result, that are not sharded.

    Results with the layout of such an argument, such as new weights, are left out, and
    what takes little of the memory.
    """
    least = max(LARGE, (peak_bytes or 0) * PART)
    uncut = [each for each in arrays if each.is_replicated]
    sharded = {
        (each.shape, each.dtype)
        for each in arrays
        if each.role == "input" and each.shard_bytes not in (None, each.bytes)
    }
    given = {(each.shape, each.dtype) for each in uncut if each.role == "input"}
    whole: dict[str, list[ArrayLayout]] = {}
    for array in uncut:
        if array.role == "input" or (array.shape, array.dtype) not in given:
            whole.setdefault(argument_of(array.path), []).append(array)
    remarks = []
    for argument, those in whole.items():
        total, count = sum(each.bytes for each in those), those[0].num_devices or 1
        is_input, is_one = those[0].role == "input", len(those) == 1
        what = f"{len(those):,} arrays of {argument}, together {size(total)}, are"
        if is_one:
            what = f"{those[0].path} of {size(total)} is"
        how = "replicated on" if is_input else "given back whole on"
        alike = [each for each in those if (each.shape, each.dtype) in sharded]
        advice = _CUT_INPUT if is_input else _CUT_RESULT
        if is_input and 2 * sum(each.bytes for each in alike) > total:
            advice = _CUT_STATE
        if total >= least:
            text = f"{what} {how} {count:,} devices: {size(total * count)} in all"
            path = those[0].path if is_one else argument
            remarks.append((total, Remark(text, advice, path)))
    return [remark for _, remark in sorted(remarks, key=lambda each: -each[0])]


def constants(values: Sequence[Any], num_devices: int) -> list[Remark]:
    """Remarks on large arrays that a function closes over."""
    return [
        Remark(
            f"a constant of {size(value.nbytes)} and shape {tuple(value.shape)} is "
            f"part of the program, replicated on {num_devices:,} devices",
            "Make it an argument, which can be sharded and is not compiled in.",
            None,
        )
        for value in values
        if num_devices > 1 and value.nbytes >= LARGE
    ]


def unrolled(jaxpr: AnyJaxpr) -> list[Remark]:
    """Remarks on equal products of a Python loop, in steps that need no other."""
    products = [
        equation for equation in equations(jaxpr) if equation.primitive in _PRODUCTS
    ]
    counts = collections.Counter(map(call_of, products))
    long = {call for call, count in counts.items() if count >= UNROLLED}
    # The long loops that each value comes from.
    loops: dict[Any, frozenset[Any]] = {}
    alone: dict[Any, list[str | None]] = {}
    for equation in equations(jaxpr) if long else ():
        atoms = [x for x in equation.invars if not isinstance(x, Literal)]
        before = frozenset().union(*(loops.get(x, ()) for x in atoms))
        call = call_of(equation)
        if call in long and equation.primitive in _PRODUCTS and call not in before:
            avals = (aval_of(x).str_short() for x in equation.invars)
            key = call, str(equation.params), *avals
            alone.setdefault(key, []).append(source_of(equation))
        for inner in jaxprs_in(equation.params):
            loops.update(dict.fromkeys(inner.invars, before))
        before |= long & {call_of(each) for each in equations_of(equation)}
        loops.update(dict.fromkeys(equation.outvars, before))
    remarks = [
        Remark(
            f"{len(sources)} equal products, one after another",
            "jax.vmap makes one operation of them.",
            sources[0],
        )
        for sources in alone.values()
        if len(sources) >= UNROLLED
    ]
    return list(dict.fromkeys(remarks))


def of_collectives(collectives: Sequence[Collective], platform: str) -> list[Remark]:
    """A remark for each line that sends what it need not.

    XLA for CPU has no reduce-scatter.
    """
    remarks: dict[Any, Remark] = {}
    sent: dict[Any, int] = collections.Counter()
    for each in collectives:
        cause, source = each.cause or "", each.source
        if cause.startswith(REMATERIALISED) and each.advice:
            text = f"{cause}, {size(each.bytes_out)} on each"
            remarks.setdefault(source, Remark(text, each.advice, source))
            continue
        for sign, (what, advice) in _SENT_MORE.items():
            if sign in cause and (sign != CUT or platform != "cpu"):
                sent[sign, source] += each.link_bytes or 0
                text = f"{size(sent[sign, source])} a step are sent {what}"
                remarks[sign, source] = Remark(text, advice, source)
    small = {key for key, total in sent.items() if total < LARGE}
    return [remark for key, remark in remarks.items() if key not in small]
