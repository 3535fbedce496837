"""Calls of `spmap` over several processes: process-local data, or global arrays."""

from collections.abc import Callable, Sequence

from shardmap._jax.types import Axes


def are_process_local(
    are_global: Sequence[bool], in_axes: Axes, names: Callable[[], list[str]]
) -> bool:
    """Whether the call is with process-local data, and not with global arrays.

    What is mapped decides. What is not is equal on all processes, in either case.

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
