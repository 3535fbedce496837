"""One call of a mapped function: its arguments, avals and shardings.

`shardmap.api.calls.programs` makes programs of them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardmap._jax.types import AnyMesh, Aval, PyTree, TreeDef, Value
from shardmap.api.calls.statics import Static
from shardmap.arrays import processes
from shardmap.arrays.process_local import ProcessShardings, is_global_array
from shardmap.map.shardings import MapShardings


class Arguments(NamedTuple):
    """The arguments of a call, the static ones set apart.

    Attributes:
      leaves: the values, flat.
      in_tree: the structure of (positional arguments, keyword arguments).
      statics: the static arguments, by position.
      all_global: whether no leaf is process-local data.
    """

    leaves: Sequence[Value]
    in_tree: TreeDef
    statics: tuple[tuple[int, Static], ...]
    all_global: bool = False

    @classmethod
    def of(cls, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> "Arguments":
        """Those of a call whose static arguments are each a `Static`."""
        if any(type(arg) is Static for arg in args):
            statics = tuple((k, a) for k, a in enumerate(args) if type(a) is Static)
            args = [arg for arg in args if type(arg) is not Static]
        else:
            statics = ()
        leaves, in_tree = jax.tree.flatten((tuple(args), kwargs))
        return cls(leaves, in_tree, statics)

    def kind(self) -> Hashable:
        """A cache key: equal for calls with the same program."""
        kinds = tuple(
            (
                leaf.shape,
                leaf.dtype,
                getattr(leaf, "weak_type", False),
                is_global_array(leaf),
            )
            if hasattr(leaf, "dtype")
            else type(leaf)
            for leaf in self.leaves
        )
        return self.in_tree, kinds, self.statics

    def with_leaves(
        self, leaves: Sequence[Any]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Arguments of these leaves, positional and by keyword."""
        given, kwargs = jax.tree.unflatten(self.in_tree, leaves)
        return self.positional(given), kwargs

    def positional(self, given: Iterable[PyTree]) -> list[PyTree]:
        """The positional arguments: those given, and the static ones."""
        args = list(given)
        for argnum, static in self.statics:
            args.insert(argnum, static)
        return args

    def given(self, prefix: PyTree) -> PyTree:
        """A pytree prefix of the arguments, without the entries of static ones.

        Static arguments may have entries or not.
        """
        if isinstance(prefix, tuple) and len(prefix) == self.num_positional:
            return tuple(prefix[k] for k in self.argnums)
        return prefix

    @property
    def num_positional(self) -> int:
        """The number of positional arguments."""
        return len(self.in_tree.children()[0].children()) + len(self.statics)

    @property
    def static_argnums(self) -> tuple[int, ...]:
        """The positions of the static arguments."""
        return tuple(argnum for argnum, _ in self.statics)

    @property
    def argnums(self) -> list[int]:
        """The positions of those that are not static."""
        static = self.static_argnums
        return [argnum for argnum in range(self.num_positional) if argnum not in static]

    def donated(self, argnums: Sequence[int], names: Sequence[str]) -> list[bool]:
        """Which leaves are of the arguments at these positions, or of these names."""
        if not argnums:
            return [False] * self.in_tree.num_leaves
        positional, by_name = self.in_tree.children()
        given = [
            (argnum in argnums, tree)
            for argnum, tree in zip(self.argnums, positional.children(), strict=True)
        ] + [
            (name in names, tree)
            for name, tree in zip(
                by_name.node_data()[1], by_name.children(), strict=True
            )
        ]
        return [donated for donated, tree in given for _ in range(tree.num_leaves)]


@dataclasses.dataclass(frozen=True, eq=False)
class Call(abc.ABC):
    """One call, with all that is needed to run or to bind it.

    Attributes:
      arguments: its arguments.
      in_avals: the avals of the leaves, as this process passes them.
      out_tree: the structure of the result.
      out_avals: the avals of the results, as global arrays.
      mesh: where it runs; None inside another map.
    """

    arguments: Arguments
    in_avals: Sequence[Aval]
    out_tree: TreeDef
    out_avals: Sequence[Aval]
    mesh: AnyMesh | None

    @property
    @abc.abstractmethod
    def shardings(self) -> MapShardings | None:
        """The shardings of leaves and results; None inside another map."""

    @property
    @abc.abstractmethod
    def described(self) -> str:
        """The description of the program in the log."""

    @property
    def global_avals(self) -> tuple[Sequence[Aval], Sequence[Aval]]:
        """The avals of leaves and results, as global arrays."""
        return self.in_avals, self.out_avals

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of its mesh; none of an abstract one."""
        return devices_of(self.mesh)

    @functools.cached_property
    def process_local(self) -> "ProcessLocal | None":
        """How arrays are passed over several processes; None in one process."""
        if not self.devices or not processes.several(self.devices):
            return None
        count = len(self.in_avals)
        return ProcessLocal(
            [None] * count, [None] * count, [None] * len(self.out_avals)
        )

    @property
    def has_process_local(self) -> bool:
        """Whether arguments or results are process-local data, not global arrays."""
        local = self.process_local
        return local is not None and (False in local.are_global or any(local.results))

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The global arrays that the program takes."""
        assert self.shardings is not None
        avals, _ = self.global_avals
        return [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )
            for aval, sharding in zip(avals, self.shardings.operands, strict=True)
        ]


def devices_of(mesh: AnyMesh | None) -> list[jax.Device]:
    """The devices of a mesh; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


class ProcessLocal(NamedTuple):
    """Which arrays of a call are process-local data.

    Attributes:
      operands: for each leaf, how this process's data is a part of the global array;
        None: it is a global array.
      are_global: for each leaf whether it has to be a global array; None: it is equal
        on all processes, in either case.
      results: as ``operands``, of the results.
    """

    operands: Sequence[ProcessShardings | None]
    are_global: Sequence[bool | None]
    results: Sequence[ProcessShardings | None]


def without_statics(args: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The positional arguments that are not static."""
    return tuple(arg for arg in args if type(arg) is not Static)


def with_statics(
    statics: Sequence[tuple[int, Static]], program: Callable[..., Any]
) -> Callable[..., Any]:
    """A compiled program that takes its static arguments, too.

    Args:
      statics: their values, by position; a call with others raises TypeError.
      program: takes the other arguments.
    """
    if not statics:
        return program

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if any(args[k] != static for k, static in statics):
            raise TypeError("compiled for other static arguments")
        return program(*without_statics(args), **kwargs)

    return run
