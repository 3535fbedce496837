"""Calls of a map with process-local data."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.stages import Mismatch
from shardmap._jax.types import PyTree, Value
from shardmap.api.calls.call import Arguments, Call
from shardmap.arrays import placement
from shardmap.arrays.process_local import is_global_array, to_global, to_local


class AcrossProcesses:
    """A program of global arrays that takes and returns process-local data.

    Args:
      program: a function of global arrays.
      call: a call with process-local data.
      donated: which leaves are donated.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        call: Call,
        donated: Sequence[bool],
    ) -> None:
        self._program = program
        self._in_tree = call.arguments.in_tree
        assert call.process_local is not None
        assert call.shardings is not None
        operands, are_global, self._results = call.process_local
        self._operands = list(
            zip(operands, call.shardings.operands, are_global, donated, strict=True)
        )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        arguments = Arguments.of(args, kwargs)
        if arguments.in_tree != self._in_tree:
            raise Mismatch("compiled for arguments of another structure")
        leaves: list[Value] = []
        for leaf, (local, sharding, is_global, donate) in zip(
            arguments.leaves, self._operands, strict=True
        ):
            if is_global is not None and is_global_array(leaf) is not is_global:
                raise Mismatch(
                    "compiled for global arrays where these are process-local data, or "
                    "the other way round"
                )
            if local is None:
                leaves += placement.place([leaf], [sharding], True, [donate])
            else:
                leaves.append(to_global(leaf, local, donate))
        global_args, kwargs = arguments.with_leaves(leaves)
        return self._convert(self._program(*global_args, **kwargs))

    def _convert(self, results: PyTree) -> PyTree:
        if not any(self._results):
            return results
        leaves, tree = jax.tree.flatten(results)
        leaves = [
            leaf if local is None else to_local(leaf, local)
            for leaf, local in zip(leaves, self._results, strict=True)
        ]
        return jax.tree.unflatten(tree, leaves)
