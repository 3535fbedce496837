"""One call of a mapped function: what it is made of, read, and made ready.

These are values; `shardmap.api.calls.programs` makes programs of them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from shardmap._jax.types import Aval, PyTree, TreeDef, Value
from shardmap.api.calls.refusals import repeated
from shardmap.api.calls.statics import Static
from shardmap.arrays import array_likes
from shardmap.arrays.process_local import ProcessShardings
from shardmap.map.shardings import MapShardings


class Arguments(NamedTuple):
    """The arguments of a call, the static ones set apart.

    Attributes:
      leaves: the values, flat.
      in_tree: the structure of (positional arguments, keyword arguments).
      statics: the static arguments, by position.
    """

    leaves: Sequence[Value]
    in_tree: TreeDef
    statics: tuple[tuple[int, Static], ...]

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
        """Equal for calls that read the same in one configuration of JAX."""
        kinds = tuple(
            (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)
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
    """One call, read: all that is needed to run it, or to bind it.

    Attributes:
      arguments: its arguments.
      in_avals: the leaves' kinds, as this process passes them.
      out_tree: the structure of the result.
    """

    arguments: Arguments
    in_avals: Sequence[Aval]
    out_tree: TreeDef

    @property
    @abc.abstractmethod
    def global_avals(self) -> tuple[Sequence[Aval], Sequence[Aval]]:
        """The kinds of leaves and results, as global arrays."""

    @property
    @abc.abstractmethod
    def shardings(self) -> MapShardings | None:
        """The shardings of leaves and results; None inside another map."""

    @property
    @abc.abstractmethod
    def devices(self) -> list[jax.Device]:
        """Where it runs, if it has shardings."""

    @property
    @abc.abstractmethod
    def communicates(self) -> bool:
        """Whether anything goes between devices."""

    @property
    @abc.abstractmethod
    def described(self) -> str:
        """What is compiled, for the log."""

    @functools.cached_property
    def process_local(self) -> "ProcessLocal | None":
        """How a call over several processes passes its arrays; None: of one process."""
        return None

    @property
    def has_process_local(self) -> bool:
        """Whether arguments or results are process-local data, not global arrays."""
        local = self.process_local
        return local is not None and (False in local.are_global or any(local.results))

    def probe(self) -> "Probe | None":
        """What tells whether another call can have the same program."""
        return None

    def is_equal_to(self, arguments: Arguments) -> bool:
        """Whether a call with these arguments reads the same."""
        return (
            not self.has_process_local
            and arguments.in_tree == self.arguments.in_tree
            and arguments.statics == self.arguments.statics
            and all(
                (mine.shape, mine.dtype, mine.weak_type)
                == (its.shape, its.dtype, its.weak_type)
                for mine, its in zip(
                    self.in_avals,
                    map(array_likes.leaf_aval, arguments.leaves),
                    strict=True,
                )
            )
        )


class ProcessLocal(NamedTuple):
    """Which arrays of a call are process-local data, and how.

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


class Probe(NamedTuple):
    """Where to look whether a call has as many elements as another.

    Attributes:
      argnum: the position of a mapped argument.
      leaf: the number of the leaf in it, or None if it is an array itself.
      axis: where the leaf is mapped.
      axis_size: how many elements there were.
      is_global: whether it was a global array.
    """

    argnum: int
    leaf: int | None
    axis: int
    axis_size: int
    is_global: bool = False

    def fits(self) -> "Fits":
        """What tells whether a call with some arguments has ``axis_size`` elements."""
        argnum, leaf, axis, axis_size, is_global = self

        # Most calls have arrays. This is asked in every call, and is to be quick.
        def array_fits(args: Sequence[PyTree]) -> bool:
            shape = getattr(args[argnum], "shape", ())
            return len(shape) > axis and shape[axis] == axis_size

        def leaf_fits(args: Sequence[PyTree]) -> bool:
            arg = args[argnum]
            if leaf is not None:
                arg = jax.tree.leaves(arg)[leaf]
            if is_global and getattr(arg, "is_fully_addressable", True):
                return False
            shape = getattr(arg, "shape", ())
            return len(shape) > axis and shape[axis] == axis_size

        return array_fits if leaf is None and not is_global else leaf_fits


Fits = Callable[[Sequence[PyTree]], bool]


def with_statics(
    statics: Sequence[tuple[int, Static]], others_fit: Fits | None
) -> Fits | None:
    """Whether positional arguments have these constants, and the others fit.

    Args:
      statics: the static arguments, by position.
      others_fit: what tells of the other arguments; None: any may.
    """
    if not statics:
        return others_fit

    def fits(args: Sequence[PyTree]) -> bool:
        if any(args[k] != static for k, static in statics):
            return False
        return others_fit is None or others_fit(args)

    return fits


class SameShapes(NamedTuple):
    """The shapes of all leaves, where another call's errors have to speak of its own.

    Attributes:
      shapes: of the leaves that are not static.
    """

    shapes: Sequence[tuple[int, ...]]

    def fits(self, args: Sequence[PyTree]) -> bool:
        """Whether these positional arguments have the same shapes."""
        leaves = Arguments.of(args, {}).leaves
        return [getattr(leaf, "shape", ()) for leaf in leaves] == self.shapes


class Donated(NamedTuple):
    """Where donated leaves are to be for their memory to be used.

    Attributes:
      shardings: the number of each such leaf and the sharding that it must have.
      others_fit: what tells of the other arguments; None: any may.
    """

    shardings: Sequence[tuple[int, Sharding]]
    others_fit: Fits | None

    def fits(self, args: Sequence[PyTree]) -> bool:
        """Whether the donated leaves have these shardings."""
        leaves = jax.tree.leaves(args)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            return False  # The program would crash; who looks it up says so.
        twice = repeated(leaves)
        if twice and any(id(leaves[k]) in twice for k, _ in self.shardings):
            return False
        return all(
            getattr(leaves[k], "sharding", None) == sharding and leaves[k].committed
            for k, sharding in self.shardings
        ) and (self.others_fit is None or self.others_fit(args))


class Ready(NamedTuple):
    """A program, and what it takes: enough to run calls of one kind.

    Attributes:
      program: a `jax.jit`, called with what the user passes.
      fits: tells of positional arguments, by one look, whether the program may be tried
        on them; it refuses what it is not for. None if any may.
      shardings: of the leaves; None: the program lays them out itself.
      donated: which leaves are donated.
    """

    program: Callable[..., Any]
    fits: Fits | None
    shardings: Sequence[Sharding] | None
    donated: Sequence[bool]
