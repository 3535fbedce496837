"""The options of mapped functions, checked."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax

from shardmap._jax.types import PyTree, TreeDef

Lowering = Literal["manual", "spmd"]


def hashable(
    tree: PyTree, is_leaf: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], TreeDef]:
    """A pytree of options as a part of a key, whatever containers it is in."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return tuple(leaves), structure


def index_tuple(
    name: str, argnums: int | Iterable[int], caller: str = "spmap"
) -> tuple[int, ...]:
    """Positions of arguments, given as an int or several, as a tuple."""
    values = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{caller} {name} must be an int or several, none below 0, but got "
                f"{argnums}."
            )
    return values


def check_apart(
    caller: str,
    static_parameter: str,
    static: Sequence[int],
    donated: Sequence[int],
) -> None:
    """Refuses arguments that are static and donated."""
    if both := sorted(set(static) & set(donated)):
        raise ValueError(
            f"{caller} {static_parameter} {static} and donate_argnums {donated} "
            f"both have {both}: a static argument has no buffer to donate."
        )


def lowering(name: Lowering, batch_size: object, caller: str = "spmap") -> Lowering:
    """``name``, if there is such a lowering and it can do what is asked."""
    if name != "manual" and name != "spmd":
        raise ValueError(
            f"{caller} lowering must be 'manual' or 'spmd', but got {name!r}."
        )
    if name == "spmd" and batch_size is not None:
        raise ValueError(
            f"spmap lowering='spmd' and batch_size={batch_size} do not go together: "
            "the partitioner decides what a device does at once. Leave batch_size out, "
            "or use lowering='manual'."
        )
    return name
