"""One call of a function that `sharded_jit` cuts: what it is made of, how it lies."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from shardmap.api.calls import arguments
from shardmap.api.parts import Counts, is_leaf
from shardmap.arrays import placement
from shardmap.arrays.process_local import Rows, convert_p, pieces_for, to_own, to_whole
from shardmap.map.constraint import alone, partition_mesh
from shardmap.sharding.partitions import partition_sharding

WHAT = "sharded_jit"


class Call(NamedTuple):
    """How one call is cut, but not its arrays.

    Attributes:
      in_tree, out_tree: the structures of the arguments and of the result.
      statics: the static arguments, by position.
      in_parts, out_parts: how each leaf is cut.
      total: how many partitions there are, if anybody says.
      in_avals, out_avals: the leaves' kinds, as global arrays.
      in_pieces, out_pieces: for each leaf whether this process has its pieces of it.
      jaxpr: what the function computes.
      program: what other processes have to run as well, where there are such.
      is_alone: whether it is a program of its own, and no part of another.
    """

    in_tree: Any
    statics: tuple[tuple[int, arguments.Static | None], ...]
    in_parts: list[Counts]
    out_tree: Any
    out_parts: list[Counts]
    total: int | None
    in_avals: list[Any]
    out_avals: list[Any]
    in_pieces: list[bool]
    out_pieces: list[bool]
    jaxpr: Any
    program: str
    is_alone: bool = False

    def positional(self, given: Iterable[Any]) -> list[Any]:
        """The positional arguments: those given, and the static ones."""
        args = list(given)
        for k, static in self.statics:
            args.insert(k, static)
        return args

    def alone(self) -> "Call":
        """The call outside of maps, which has devices."""
        closed = self.jaxpr.replace(jaxpr=alone(self.jaxpr.jaxpr))
        return self._replace(total=self.total or 1, jaxpr=closed, is_alone=True)

    @property
    def devices(self) -> list[jax.Device]:
        """Where it runs."""
        return list(partition_mesh((), self.total or 1, WHAT).devices.flat)

    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """How arguments and results lie."""

        def sharding(aval: Any, parts: Counts) -> NamedSharding:
            if parts is None or placement.has_no_bytes(aval):
                parts = (1,) * aval.ndim
            mesh = partition_mesh(parts, self.total or 1, WHAT)
            return partition_sharding(parts, mesh)

        return (
            list(map(sharding, self.in_avals, self.in_parts)),
            list(map(sharding, self.out_avals, self.out_parts)),
        )

    def pieces(self) -> tuple[list[Rows | None], list[Rows | None]]:
        """How this process's pieces of arguments and results lie, where it has own."""

        def rows(sharding: NamedSharding, has_own: bool) -> Rows | None:
            if not has_own or sharding.is_fully_addressable:
                return None
            return pieces_for(sharding)

        operands, results = self.shardings()
        return (
            list(map(rows, operands, self.in_pieces)),
            list(map(rows, results, self.out_pieces)),
        )


class Options(NamedTuple):
    """The arguments of `sharded_jit` but the function."""

    in_parts: Any
    out_parts: Any
    num_partitions: int | None
    local_in_parts: Any
    local_out_parts: Any
    local_num_partitions: int | None
    static_argnums: tuple[int, ...]

    def key(self) -> Hashable:
        """Hashable, equal for equal options."""

        def hashable(parts: Any) -> Hashable:
            leaves, tree = jax.tree.flatten(parts, is_leaf=is_leaf)
            return tuple(leaves), tree

        return self._replace(
            in_parts=hashable(self.in_parts),
            out_parts=hashable(self.out_parts),
            local_in_parts=hashable(self.local_in_parts),
            local_out_parts=hashable(self.local_out_parts),
        )


def lay_out_and_convert(
    call: Call,
) -> tuple[Callable[[Sequence[Any]], list[Any]], Callable[[Sequence[Any]], Any]]:
    """From leaves to what a program takes, and from what it gives to the result."""
    shardings, _ = call.shardings()
    operands, results = call.pieces()

    def lay_out(leaves: Sequence[Any]) -> list[Any]:
        whole = [
            leaf if rows is None else to_whole(leaf, rows)
            for leaf, rows in zip(leaves, operands, strict=True)
        ]
        return placement.place(whole, shardings)

    def convert(leaves: Sequence[Any]) -> Any:
        own = [
            leaf if rows is None else to_own(leaf, rows)
            for leaf, rows in zip(leaves, results, strict=True)
        ]
        return jax.tree.unflatten(call.out_tree, own)

    return lay_out, convert


def converted(
    values: Sequence[Any], pieces: Sequence[Rows | None], to: str
) -> list[Any]:
    """Values that JAX traces, as global arrays or as this process's pieces."""
    return [
        value if rows is None else convert_p.bind(value, rows=rows, to=to)
        for value, rows in zip(values, pieces, strict=True)
    ]


def across(call: Call, compiled: Any) -> Callable[..., Any]:
    """A compiled function, to be called with what one process has."""
    lay_out, convert = lay_out_and_convert(call)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree == call.in_tree:
            args, kwargs = jax.tree.unflatten(tree, lay_out(leaves))
        return convert(jax.tree.leaves(compiled(*args, **kwargs)))

    return run
