"""One call of a mapped function: what it is made of, read, and made ready.

These are values; `shardmap.api.calls.programs` makes them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from shardmap.api.calls import arguments, kept
from shardmap.arrays import array_likes
from shardmap.arrays.process_local import Rows, parts_along, rows_for
from shardmap.map import tracing
from shardmap.map.shardings import MapShardings, map_shardings


class Element:
    """The function of one element over flat leaves, to be traced.

    JAX finds a trace again by this object, so there is one for each function, options,
    argument structure and static arguments.
    """

    def __init__(
        self,
        fun: kept.WeakFunction,
        in_tree: Any,
        statics: tuple[tuple[int, arguments.Static], ...],
    ) -> None:
        self._fun = fun
        self._in_tree = in_tree
        self._statics = statics

    def __call__(self, *leaves: Any) -> tracing.Flattened:
        args, kwargs = jax.tree.unflatten(self._in_tree, leaves)
        args = list(args)
        for argnum, static in self._statics:
            args.insert(argnum, static.value)
        return tracing.Flattened(*jax.tree.flatten(self._fun()(*args, **kwargs)))


class Call(NamedTuple):
    """One call, read and traced: all that is needed to run or bind it.

    Attributes:
      leaves: the arrays, without static arguments.
      in_tree: the structure of (positional arguments, keyword arguments).
      body: what one element computes.
      params: of the map's equation. Its operands are the body's constants, then the
        leaves.
      is_across_processes: whether it is run now, on devices of several processes.
      is_rows: whether the leaves are this process's rows of longer global arrays.
    """

    leaves: list[Any]
    in_tree: Any
    body: tracing.Body
    params: dict[str, Any]
    is_across_processes: bool = False
    is_rows: bool = False

    @property
    def shardings(self) -> MapShardings | None:
        """How leaves and results lie; None inside another map."""
        if self.params["mesh"] is None:
            return None
        operands, results = map_shardings(self.params)
        return MapShardings(operands[len(self.body.constants) :], results)

    def rows(self) -> tuple[list[Rows], list[Rows]]:
        """How this process's parts of the operands and of the results lie."""
        operands, results = map_shardings(self.params)
        parts = parts_along(self.params["mesh"], self.params["mesh_axes"])
        return (
            [
                rows_for(s, axis, parts)
                for s, axis in zip(operands, self.params["in_axes"], strict=True)
            ],
            [
                rows_for(s, axis, parts)
                for s, axis in zip(results, self.params["out_axes"], strict=True)
            ],
        )


class Probe(NamedTuple):
    """Where to look whether a call has as many elements as another.

    Attributes:
      argnum: the position of a mapped argument.
      leaf: the number of the leaf in it, or None if it is an array itself.
      axis: where the leaf is mapped.
      axis_size: how many elements there were.
      is_whole: whether it was a global array.
    """

    argnum: int
    leaf: int | None
    axis: int
    axis_size: int
    is_whole: bool = False

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a call with these arguments has ``axis_size`` elements."""
        argnum, leaf, axis, axis_size, is_whole = self
        arg = args[argnum]
        if leaf is not None:
            arg = jax.tree.leaves(arg)[leaf]
        shape = getattr(arg, "shape", ())
        if is_whole and getattr(arg, "is_fully_addressable", True):
            return False
        return len(shape) > axis and shape[axis] == axis_size


class Prepared(NamedTuple):
    """A call ready to run.

    Attributes:
      program: a `jax.jit`.
      args: the positional arguments, laid out.
      kwargs: the keyword arguments, laid out.
      moved: whether any of them lay otherwise.
      must_lie: for a leaf that is donated, its number and how it has to lie for its
        memory to be used.
      probe: tells whether another call has as many elements; None if all have.
    """

    program: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    moved: bool
    must_lie: tuple[tuple[int, Sharding], ...]
    probe: Probe | None


def probe_of(call: Call, argnums: Sequence[int]) -> Probe | None:
    """A probe of the first mapped positional argument; None if there is none."""
    in_axes = iter(call.params["in_axes"][len(call.body.constants) :])
    arguments_tree, _ = call.in_tree.children()
    for argnum, tree in zip(argnums, arguments_tree.children(), strict=True):
        for leaf in range(tree.num_leaves):
            axis = next(in_axes)
            if axis is not None:
                is_array = tree.num_nodes == 1
                return Probe(
                    argnum,
                    None if is_array else leaf,
                    axis,
                    call.params["axis_size"],
                    call.is_across_processes,
                )
    return None


def as_arrays(call: Call) -> list[Any]:
    """The leaves as what JAX can bind: array-likes are read."""
    if not any(map(array_likes.is_array_like, call.leaves)):
        return call.leaves
    here = SingleDeviceSharding(jax.local_devices()[0])
    shardings: Sequence[Sharding] = [here] * len(call.leaves)
    if call.is_rows:
        operands, _ = call.rows()
        shardings = [rows.own for rows in operands[len(call.body.constants) :]]
    elif call.shardings:
        shardings = call.shardings.operands
    with jax.ensure_compile_time_eval():
        return [
            array_likes.lay_out(leaf, sharding)
            if array_likes.is_array_like(leaf)
            else leaf
            for leaf, sharding in zip(call.leaves, shardings, strict=True)
        ]
