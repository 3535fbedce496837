"""What `jax.jit` is told about a program: static arguments and shardings."""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from shardmap._jax.types import PyTree, TreeDef
from shardmap.arrays import trees
from shardmap.map.shardings import MapShardings


def jit_options(
    in_tree: TreeDef,
    static: tuple[int, ...],
    out_tree: TreeDef,
    shardings: MapShardings | None,
    has_keywords: bool,
) -> dict[str, Any]:
    """The options of `jax.jit` for a function called as the user's is.

    Args:
      in_tree: the structure of (positional arguments, keyword arguments).
      static: the positions of those that are static, and not in ``in_tree``.
      out_tree: the structure of the result.
      shardings: of leaves and results; None leaves them to what is around.
      has_keywords: whether arguments are passed by keyword, which `jax.jit` does not
        lay out.
    """
    options: dict[str, Any] = {"static_argnums": static, "static_argnames": ()}
    if shardings is None:
        return options
    options["out_shardings"] = _as_prefix(out_tree, shardings.results)
    if not has_keywords:
        positional, _ = in_tree.children()
        operands = iter(shardings.operands)
        options["in_shardings"] = tuple(
            _as_prefix(tree, list(itertools.islice(operands, tree.num_leaves)))
            for tree in positional.children()
        )
    return options


def _as_prefix(tree: TreeDef, shardings: Sequence[NamedSharding]) -> PyTree:
    """Shardings as `jax.jit` takes them for a pytree: one for all leaves, if it can be.

    None leaves it to the program, where they can neither be one nor a tree.
    """
    if shardings and all(sharding == shardings[0] for sharding in shardings):
        return shardings[0]
    return trees.with_leaves(tree, shardings)
