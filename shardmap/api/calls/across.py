"""Calls of a map over several processes, with what one of them has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.types import Axes, PyTree, Value
from shardmap.api.calls.call import Arguments, Call
from shardmap.api.calls.refusals import NeedsAnotherProgram
from shardmap.arrays import placement
from shardmap.arrays.process_local import is_whole, to_own, to_whole
from shardmap.arrays.running import run_and_convert


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
        described = {True: "a global array", False: "rows of this process"}
        listed = "".join(
            f"\n  * {names()[k]} is {described[are_global[k]]}" for k in mapped
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


class AcrossProcesses:
    """A program of global arrays, called with what one process has of them.

    Args:
      program: a function of global arrays.
      call: a call that it is for, with process-local data.
      donated: which leaves are donated.
      takes_statics: whether it is called with the static arguments.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        call: Call,
        donated: Sequence[bool],
        takes_statics: bool,
    ) -> None:
        self._program = program
        self._in_tree = call.arguments.in_tree
        self._statics = call.arguments.statics if takes_statics else ()
        assert call.process_local is not None
        assert call.shardings is not None
        operands, are_global, self._results = call.process_local
        self._operands = list(
            zip(operands, call.shardings.operands, are_global, donated, strict=True)
        )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        arguments = Arguments.of(args, kwargs)
        if (arguments.in_tree, arguments.statics) != (self._in_tree, self._statics):
            raise NeedsAnotherProgram
        leaves: list[Value] = []
        for leaf, (rows, sharding, is_global, donate) in zip(
            arguments.leaves, self._operands, strict=True
        ):
            if is_global is not None and is_whole(leaf) is not is_global:
                raise NeedsAnotherProgram
            if rows is None:
                leaves += placement.place([leaf], [sharding], True, [donate])
            else:
                leaves.append(to_whole(leaf, rows, donate))
        whole_args, kwargs = arguments.with_leaves(leaves)
        return run_and_convert(self._program, self._convert, whole_args, kwargs)

    def _convert(self, results: PyTree) -> PyTree:
        if not any(self._results):
            return results
        leaves, tree = jax.tree.flatten(results)
        own = [
            leaf if rows is None else to_own(leaf, rows)
            for leaf, rows in zip(leaves, self._results, strict=True)
        ]
        return jax.tree.unflatten(tree, own)
