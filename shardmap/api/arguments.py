"""The arguments of a call, flat, with the static ones in their structure."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardmap._jax.types import PyTree, TreeDef, Value
from shardmap.arrays.placement import memory_kind
from shardmap.arrays.processes import is_global_array


class Static:
    """A compile-time constant: a pytree without leaves, and a part of cache keys.

    Equal if the values are equal and of one type, also inside tuples and frozensets:
    ``1``, ``1.0`` and ``True`` are equal, but compute differently.

    >>> Static((1, 2)) == Static((1, 2)), Static((1, 2)) == Static((True, 2))
    (True, False)
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.value)
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        mine, its = self.value, other.value
        return mine is its or with_types(mine) == with_types(its)

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(
    Static, lambda static: ((), static), lambda static, _: static
)


def with_types(value: Hashable) -> Hashable:
    """A value with its types, equal only for equal values of equal types.

    >>> with_types(1) == with_types(1.0)
    False
    """
    if isinstance(value, tuple):
        return type(value), *map(with_types, value)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(with_types, value))
    return type(value), value


def wrap_statics(args: tuple[Any, ...], argnums: Collection[int]) -> tuple[Any, ...]:
    """Makes each static argument a `Static`."""
    return tuple(Static(a) if k in argnums else a for k, a in enumerate(args))


class Arguments(NamedTuple):
    """The arguments of a call.

    Attributes:
      leaves: the values, flat.
      in_tree: the structure of (positional arguments, keyword arguments).
      statics: the static arguments, by position.
    """

    leaves: Sequence[Value]
    in_tree: TreeDef
    statics: Mapping[int, Static]

    @classmethod
    def of(cls, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> "Arguments":
        """Those of a call whose static arguments are each a `Static`."""
        leaves, in_tree = jax.tree.flatten((tuple(args), kwargs))
        statics = {k: arg for k, arg in enumerate(args) if type(arg) is Static}
        return cls(leaves, in_tree, statics)

    def cache_key(self) -> Hashable:
        """Equal for calls with the same program."""
        kinds = tuple(
            (
                leaf.shape,
                leaf.dtype,
                getattr(leaf, "weak_type", False),
                is_global_array(leaf),
                leaf.sharding
                if isinstance(leaf, jax.ShapeDtypeStruct)
                else isinstance(leaf, jax.Array) and memory_kind(jax.typeof(leaf)),
            )
            if hasattr(leaf, "dtype")
            else type(leaf)
            for leaf in self.leaves
        )
        # JAX's hash of a structure leaves out the static arguments in it.
        return self.in_tree, kinds, tuple(self.statics.values())

    def with_leaves(
        self, leaves: Sequence[Any]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Positional and keyword arguments with these leaves."""
        args, kwargs = jax.tree.unflatten(self.in_tree, leaves)
        return args, kwargs

    def with_statics(self, entries: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Entries for positional arguments, with each static one as its own entry."""
        count = self.num_positional
        if len(entries) == count - len(self.statics):
            given = iter(entries)
            return tuple(self.statics.get(k) or next(given) for k in range(count))
        return tuple(self.statics.get(k, entry) for k, entry in enumerate(entries))

    @property
    def num_positional(self) -> int:
        """The number of positional arguments."""
        return len(self.in_tree.children()[0].children())

    def donated(self, argnums: Sequence[int], names: Sequence[str]) -> list[bool]:
        """Which leaves are of the arguments at these positions, or of these names."""
        if not argnums:
            return [False] * self.in_tree.num_leaves
        positional, by_name = self.in_tree.children()
        given = [(k in argnums, tree) for k, tree in enumerate(positional.children())]
        keys = by_name.node_data()[1]
        given += zip((key in names for key in keys), by_name.children(), strict=True)
        return [donated for donated, tree in given for _ in range(tree.num_leaves)]
