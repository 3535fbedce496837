"""The arguments that a plan was made for, as long as somebody else holds them."""

import weakref
from typing import Any

import jax

from shardmap._jax.types import PyTree


class Remembered:
    """Arguments, none of which is kept alive."""

    def __init__(self, args: tuple[PyTree, ...]) -> None:
        leaves, self._tree = jax.tree.flatten(args)
        self._leaves = [_weak(leaf) for leaf in leaves]

    def args(self) -> Any:
        """The arguments.

        Raises:
          ValueError: some are gone, or were shapes only.
        """
        leaves = [leaf() for leaf in self._leaves]
        if any(x is None or isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            raise ValueError(
                "the arguments that the plan was made for were shapes only, or are "
                "gone: give them again"
            )
        return jax.tree.unflatten(self._tree, leaves)


def remembered(planned_for: Remembered | None) -> Any:
    return () if planned_for is None else planned_for.args()


def _weak(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # Numbers, which cost nothing.
        return lambda: leaf
