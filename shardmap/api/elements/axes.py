"""Checks of the mapped axes of a call of `spmap`.

Errors name each bad leaf by its key path, as ``params['w']`` or ``x``, with its shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardmap._jax.types import Axes, PyTree
from shardmap.arrays.trees import advice_on_lists, bullets
from shardmap.map import tracing


def normalize_in_axes(
    axes: Sequence[int | None],
    avals: Sequence[Any],
    names: Callable[[], list[str]],
    args: PyTree,
) -> tuple[int | None, ...]:
    """Axes counted from the front.

    Raises:
      ValueError: an axis that its argument does not have.
    """
    bad = [
        k
        for k, (axis, aval) in enumerate(zip(axes, avals, strict=True))
        if axis is not None and not -aval.ndim <= axis < aval.ndim
    ]
    if bad:
        paths = names()
        listed = bullets(
            [
                f"{paths[k]} is {avals[k].str_short()} (rank {avals[k].ndim}), "
                f"in_axes asks for axis {axes[k]}"
                for k in bad
            ]
        )
        raise ValueError(
            "spmap was requested to map its argument along an axis that it does not "
            f"have:{listed}\nGive None in in_axes for what every element should get "
            "whole. Arguments passed by keyword are always mapped along axis 0."
            + advice_on_lists(paths, args)
        )
    return tuple(
        None if axis is None else axis % aval.ndim
        for axis, aval in zip(axes, avals, strict=True)
    )


def normalize_out_axes(
    axes: Sequence[int | None], avals: Sequence[Any]
) -> tuple[int | None, ...]:
    """Negative axes counted from the front of the result with the mapped axis in it.

    Raises:
      ValueError: an axis beyond the result's rank.
    """
    for axis, aval in zip(axes, avals, strict=True):
        if axis is not None and not -aval.ndim - 1 <= axis <= aval.ndim:
            raise ValueError(
                f"spmap out_axes puts the mapped axis at {axis}, but the result is "
                f"{aval.str_short()}: with the mapped axis it has rank "
                f"{aval.ndim + 1}. Give an axis from {-aval.ndim - 1} to {aval.ndim}."
            )
    return tuple(
        None if axis is None else axis % (aval.ndim + 1)
        for axis, aval in zip(axes, avals, strict=True)
    )


def mapped_size(
    axes: Sequence[int | None],
    avals: Sequence[Any],
    names: Callable[[], list[str]],
    axis_size: int | None,
) -> int:
    """The size of the mapped axis, which all mapped arguments share.

    Raises:
      ValueError: sizes that differ, a size that is a symbol of `jax.export`, or no
        mapped argument and no ``axis_size``.
    """
    sizes = [
        (k, aval.shape[axis])
        for k, (axis, aval) in enumerate(zip(axes, avals, strict=True))
        if axis is not None
    ]
    distinct = {size for _, size in sizes}
    if len(distinct) > 1:
        paths = names()
        listed = bullets(
            [
                f"{paths[k]} is {avals[k].str_short()}, axis {axes[k]} has size {size}"
                for k, size in sizes
            ]
        )
        raise ValueError(
            f"spmap got inconsistent sizes for array axes to be mapped:{listed}\n"
            "Give all of them the same size, or None in in_axes for what every "
            "element should get whole."
        )
    if not distinct:
        if axis_size is None:
            raise ValueError(
                "spmap wrapped function must be passed at least one argument "
                f"containing an array to map, but got {len(avals)} "
                f"array{'' if len(avals) == 1 else 's'}, none mapped. "
                "Give axis_size=n to map over n elements all the same."
            )
        return axis_size
    (size,) = distinct
    if not isinstance(size, int):
        raise ValueError(
            f"spmap maps {names()[sizes[0][0]]} along an axis of the symbolic size "
            f"{size}, but the number of elements decides where each one runs. Export "
            "the program for a number of them; other axes may have symbols."
        )
    if axis_size is not None and size != axis_size:
        raise ValueError(
            f"Specified axis_size {axis_size} doesn't match received axis_size {size} "
            f"of {names()[sizes[0][0]]}. Leave axis_size out, or give {size}."
        )
    return size


# Results without the axis


class UnmappedResultsDiffer(ValueError):
    """A result differs between elements, though its ``out_axes`` is None."""


def unmapped_that_differ(
    out_axes: Axes,
    body: tracing.Body,
    in_axes: Axes,
    batch: tracing.Batch,
) -> list[int]:
    """Which results differ between elements, though ``out_axes`` is None for them.

    Args:
      out_axes: where each result has the mapped axis.
      body: what one element computes.
      in_axes: the mapped axes of the operands after the constants.
      batch: the mapped axis.
    """
    dims = (None,) * len(body.constants) + tuple(
        None if axis is None else 0 for axis in in_axes
    )
    differs = tracing.batched_results(body.jaxpr, batch, dims)
    return [
        k
        for k, (axis, differ) in enumerate(zip(out_axes, differs, strict=True))
        if axis is None and differ
    ]


def unmapped(name: str, results: Sequence[str]) -> UnmappedResultsDiffer:
    """The error for results that differ, by their key paths."""
    return UnmappedResultsDiffer(
        "spmap has mapped output but out_axes is None: these results of "
        f"{name} can differ between the elements of the axis:{bullets(results)}"
        "\nCombine them with a collective over the axis, such as jax.lax.pmean, or "
        "give out_axes a position for the mapped axis."
    )


# Calls over several processes


def are_process_local(
    are_global: Sequence[bool], in_axes: Axes, names: Callable[[], list[str]]
) -> bool:
    """Whether the call is with process-local data, and not with global arrays.

    Only mapped arguments count; others are equal in all processes.

    Raises:
      ValueError: names mapped arguments of both kinds.
    """
    mapped = [k for k, axis in enumerate(in_axes) if axis is not None]
    kinds = [are_global[k] for k in mapped or range(len(in_axes))]
    if mapped and len(set(kinds)) > 1:
        described = {True: "a global array", False: "process-local data"}
        listed = "".join(
            f"\n  * {names()[k]} is {described[are_global[k]]}" for k in mapped
        )
        raise ValueError(
            "spmap takes either global arrays, which are spread over all processes, or "
            f"process-local data, but these are mapped together:{listed}\n"
            "jax.make_array_from_process_local_data makes a global array of the latter."
        )
    return not any(kinds)


def check_elements(
    name: str, own: int, parts: int, wanted: int | None, divisor: int
) -> int:
    """The number of elements on all processes.

    Args:
      name: the mapped function's, for errors.
      own: how many this process passes.
      parts: how many processes pass different ones.
      wanted: the ``axis_size`` that was asked for, if any.
      divisor: what the number has to be a multiple of.

    Raises:
      ValueError: there are none, or not as many as wanted, or no multiple.
    """
    if own == 0:
        raise ValueError(
            f"spmap of {name} over {parts} processes needs at least one element on "
            "each."
        )
    if wanted is not None and own * parts != wanted:
        raise ValueError(
            f"spmap got axis_size {wanted}, which counts the elements on all "
            f"processes, but {own} on each of {parts} are {own * parts}. Pass the "
            "elements of each process only, all processes equally many."
        )
    if own * parts % divisor:
        raise ValueError(
            f"spmap of {name}: {own} elements on each of {parts} processes do not "
            f"divide among the {divisor} devices of the mesh that share them. Pass a "
            "multiple, or global arrays."
        )
    return own * parts
