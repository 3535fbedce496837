"""Calls of a map over several processes, with what one of them has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap.api.calls.call import Call
from shardmap.arrays.process_local import is_whole, to_own, to_whole
from shardmap.arrays.running import run_and_convert


def are_rows(
    are_whole: Sequence[bool],
    in_axes: Sequence[int | None],
    names: Callable[[], list[str]],
) -> bool:
    """Whether the call is with this process's rows, and not with global arrays.

    What is mapped decides. What is not is equal on all processes, in either case.

    Raises:
      ValueError: names mapped arguments of both kinds.
    """
    mapped = [k for k, axis in enumerate(in_axes) if axis is not None]
    kinds = [are_whole[k] for k in mapped or range(len(in_axes))]
    if mapped and len(set(kinds)) > 1:
        described = {True: "a global array", False: "rows of this process"}
        listed = "".join(
            f"\n  * {names()[k]} is {described[are_whole[k]]}" for k in mapped
        )
        raise ValueError(
            "spmap takes either global arrays, which are spread over all processes, or "
            f"this process's own rows, but these are mapped together:{listed}\n"
            "jax.make_array_from_process_local_data makes a global array of rows."
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
            f"spmap of {name} over {parts} processes needs at least one row on each."
        )
    if wanted is not None and own * parts != wanted:
        raise ValueError(
            f"spmap got axis_size {wanted}, which counts the elements on all "
            f"processes, but {own} on each of {parts} are {own * parts}. Pass each "
            "process's rows only, all processes equally many."
        )
    if own * parts % divisor:
        raise ValueError(
            f"spmap of {name}: {own} rows on each of {parts} processes do not divide "
            f"among the {divisor} devices of the mesh that share them. Pass a "
            "multiple, or global arrays."
        )
    return own * parts


class NeedsAnotherProgramError(ValueError):
    """A call is refused by a program that is not for calls of its kind."""


class AcrossProcesses:
    """A program over the devices of several processes, called with what one has.

    Args:
      program: a function of global arrays.
      call: a call that it is for.
      donated: which leaves are donated.
      statics: the static arguments that it is for, by position.
    """

    def __init__(
        self,
        program: Any,
        call: Call,
        donated: Sequence[bool],
        statics: dict[int, Any],
    ) -> None:
        self._program = program
        self._in_tree = call.in_tree
        operands, results = call.rows()
        own = operands[len(call.body.constants) :]
        self._operands = list(zip(own, donated, strict=True))
        self._results = results
        self._is_rows = call.is_rows
        self._statics = statics

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        statics = self._statics
        given = args
        if statics:
            given = tuple(arg for k, arg in enumerate(args) if k not in statics)
        leaves, in_tree = jax.tree.flatten((given, kwargs))
        if in_tree != self._in_tree or any(
            args[k] != value for k, value in statics.items()
        ):
            raise NeedsAnotherProgramError
        whole = []
        for leaf, (rows, donate) in zip(leaves, self._operands, strict=True):
            if rows.factors is not None and is_whole(leaf) is self._is_rows:
                raise NeedsAnotherProgramError
            whole.append(to_whole(leaf, rows, donate))
        given, kwargs = jax.tree.unflatten(in_tree, whole)
        if statics:
            rest = iter(given)
            given = tuple(
                statics[k] if k in statics else next(rest) for k in range(len(args))
            )
        convert = self._to_own if self._is_rows else lambda results: results
        return run_and_convert(self._program, convert, given, kwargs)

    def _to_own(self, results: Any) -> Any:
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(to_own, leaves, self._results))
