"""The mapped axes of arguments and results of `spmap`.

Errors name each bad leaf by its key path, with its shape.
"""

from collections.abc import Callable, Sequence
from typing import Any


def in_axes_from_front(
    axes: Sequence[int | None],
    avals: Sequence[Any],
    names: Callable[[], list[str]],
) -> tuple[int | None, ...]:
    """Axes counted from the front.

    Raises:
      ValueError: an axis that its argument does not have.
    """
    for k, (axis, aval) in enumerate(zip(axes, avals, strict=True)):
        if axis is not None and not -aval.ndim <= axis < aval.ndim:
            raise ValueError(
                f"spmap was requested to map {names()[k]}, {aval.str_short()} of rank "
                f"{aval.ndim}, along axis {axis}, which it does not have. Give None in "
                "in_axes for what every element should get whole; of a list, map "
                "numpy.stack(list)."
            )
    return tuple(
        None if axis is None else axis % aval.ndim
        for axis, aval in zip(axes, avals, strict=True)
    )


def out_axes_from_front(
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
        by_size = {size: k for k, size in reversed(sizes)}  # The first of each.
        (first, one), (second, other), *_ = sorted((k, n) for n, k in by_size.items())
        paths = names()
        raise ValueError(
            "spmap got inconsistent sizes for array axes to be mapped: "
            f"{paths[first]}, {avals[first].str_short()}, has {one} at axis "
            f"{axes[first]}, {paths[second]}, {avals[second].str_short()}, has {other} "
            f"at axis {axes[second]}. Give None in in_axes for what is not mapped."
        )
    if not distinct:
        if axis_size is None:
            raise ValueError(
                "spmap wrapped function must be passed at least one argument "
                f"containing an array to map, but {len(avals)} are not mapped. Give "
                "axis_size=n to map over n elements all the same."
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
