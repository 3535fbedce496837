"""Pytrees of arguments: the axes and the names of their leaves."""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.errors import prefix_error
from shardmap._jax.types import PyTree, TreeDef


@jax.tree_util.register_pytree_node_class
class Flattened:
    """A user's result as its leaves and its structure.

    JAX unflattens results with placeholders for arrays, which a user's class may
    refuse.
    """

    def __init__(self, leaves: Sequence[Any], tree: PyTree) -> None:
        self.leaves = leaves
        self.tree = tree

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.tree

    @classmethod
    def tree_unflatten(cls, tree: PyTree, leaves: Sequence[Any]) -> "Flattened":
        return cls(leaves, tree)


def is_none(value: object) -> bool:
    """Whether a value is None, which pytrees take for an empty container."""
    return value is None


def broadcast_axes(
    name: str,
    axes: PyTree,
    tree: PyTree,
    described: str,
    is_leaf: Callable[[Any], bool],
    caller: str,
) -> tuple[Any, ...]:
    """One leaf of ``axes`` for each leaf of ``tree``.

    Args:
      name: the option, such as "in_axes", for the error.
      axes: a pytree prefix of ``tree``.
      tree: a pytree, or its structure.
      described: what ``tree`` is, for the error.
      is_leaf: tells the leaves of ``axes`` that pytrees take for containers.
      caller: what was called, for the error.
    """
    leaves, prefix = jax.tree.flatten(axes, is_leaf=is_leaf)
    structure = (
        tree if isinstance(tree, jax.tree_util.PyTreeDef) else jax.tree.structure(tree)
    )
    counts = _leaf_counts(prefix, structure)
    if counts is None:
        one = jax.tree.structure((axes,), is_leaf=is_leaf)
        if _leaf_counts(one, structure) is not None:
            raise ValueError(
                f"{caller} {name} must be a pytree prefix of {described}: {name} is "
                f"{axes}. For the one argument, write {name}=({axes},)."
            )
        whole = with_leaves(structure, [object() for _ in range(structure.num_leaves)])
        numbered = jax.tree.unflatten(prefix, range(len(leaves)))
        raise ValueError(
            f"{caller} {name} must be a pytree prefix of {described}: {name} is "
            f"{axes}, which does not fit {structure}. "
            f"{prefix_error(numbered, whole, name)}"
        )
    return tuple(itertools.chain.from_iterable(map(itertools.repeat, leaves, counts)))


def _leaf_counts(prefix: PyTree, structure: TreeDef) -> list[int] | None:
    """How many leaves of ``structure`` each leaf of a prefix stands for.

    None if it is not a prefix. Only structures are compared, as classes of users may
    take nothing but arrays.
    """
    if jax.tree_util.treedef_is_leaf(prefix) and prefix.num_leaves == 1:
        return [structure.num_leaves]
    ours, theirs = prefix.children(), structure.children()
    if prefix.node_data() != structure.node_data() or len(ours) != len(theirs):
        return None
    counts = []
    for child, other in zip(ours, theirs, strict=True):
        inner = _leaf_counts(child, other)
        if inner is None:
            return None
        counts += inner
    return counts


def keyword_names(fun: Callable[..., Any], argnums: Sequence[int]) -> tuple[str, ...]:
    """The names of the arguments at these positions."""
    return tuple(
        parameter.name
        for argnum, parameter in enumerate(parameters_of(fun) or ())
        if argnum in argnums
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None of some builtins, which tell nothing."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return None


def with_leaves(tree: PyTree, leaves: Sequence[Any]) -> Any | None:
    """The pytree of these leaves, which are not arrays.

    None if a class in it takes nothing but arrays.
    """
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception:
        return None


def accepts_placeholders(*trees: TreeDef) -> bool:
    """Whether such pytrees can have leaves that are not arrays, such as None."""
    for tree in trees:
        if with_leaves(tree, [object()] * tree.num_leaves) is None:
            return False
        empty = with_leaves(tree, [None] * tree.num_leaves)
        if jax.tree.structure(empty, is_leaf=is_none) != tree:
            return False
    return True


def prefix_of(tree: TreeDef, leaves: Sequence[Any]) -> Any | None:
    """A pytree prefix of ``tree`` that gives it these leaves.

    Equal leaves are one leaf of the prefix. It has no container of a class of users, as
    far as possible: such a class may take nothing but arrays.
    """
    if leaves and list(leaves).count(leaves[0]) == len(leaves):
        return leaves[0]
    rest = iter(leaves)
    data, children = tree.node_data(), tree.children()
    if data is None or data[0] not in (tuple, list, dict):
        return with_leaves(tree, leaves)
    parts = [
        prefix_of(child, list(itertools.islice(rest, child.num_leaves)))
        for child in children
    ]
    return dict(zip(data[1], parts, strict=True)) if data[0] is dict else data[0](parts)


def result_names(out_tree: TreeDef) -> list[str]:
    """The key path of each leaf of a result, such as ``result['w'][0]``."""
    count = out_tree.num_leaves
    leaves = jax.tree_util.tree_leaves_with_path(
        with_leaves(out_tree, [object() for _ in range(count)])
    )
    if len(leaves) < count:
        return [f"leaf {k} of the result" for k in range(count)]
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in leaves]


def leaf_paths(root: str, tree: PyTree) -> list[str]:
    """How a caller would write each leaf."""
    return [
        root + jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
