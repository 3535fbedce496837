"""Pytrees of arguments: the axes and the names of their leaves."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.types import PyTree, TreeDef
from shardmap.units import shown


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


def broadcast_axes(
    name: str,
    axes: PyTree,
    tree: PyTree,
    described: str,
    is_leaf: Callable[[Any], bool],
    caller: str,
) -> tuple[Any, ...]:
    """One leaf of ``axes``, a pytree prefix of ``tree``, for each leaf of that.

    Errors name the option, what ``tree`` is, and what was called.
    """
    leaves, prefix = jax.tree.flatten(axes, is_leaf=is_leaf)
    structure = (
        tree if isinstance(tree, jax.tree_util.PyTreeDef) else jax.tree.structure(tree)
    )
    try:
        counts = _leaf_counts(prefix, structure, name)
    except ValueError as error:
        text = f"{caller} {name} must be a pytree prefix of {described}: {error}."
        one = jax.tree.structure((axes,), is_leaf=is_leaf)
        with contextlib.suppress(ValueError):
            _leaf_counts(one, structure, name)
            text += f" For the one argument, write {name}=({axes},)."
        raise ValueError(text) from None
    return tuple(itertools.chain.from_iterable(map(itertools.repeat, leaves, counts)))


def _leaf_counts(prefix: PyTree, structure: TreeDef, path: str) -> list[int]:
    """How many leaves of ``structure`` each leaf of a prefix stands for.

    Only structures are compared, as classes of users may take nothing but arrays. A
    ValueError says where it is no prefix, by the path.
    """
    if jax.tree_util.treedef_is_leaf(prefix) and prefix.num_leaves == 1:
        return [structure.num_leaves]
    ours, theirs = prefix.children(), structure.children()
    if prefix.node_data() != structure.node_data() or len(ours) != len(theirs):
        raise ValueError(
            f"{path} is {_described(prefix)}, but stands for {_described(structure)}"
        )
    kind, keys = prefix.node_data() or (None, ())
    names = keys if kind is dict else range(len(ours))
    counts = []
    for name, child, other in zip(names, ours, theirs, strict=True):
        counts += _leaf_counts(child, other, f"{path}[{name!r}]")
    return counts


def _described(tree: TreeDef) -> str:
    """What a structure is at its root."""
    if tree.node_data() is None:
        return "None" if tree.num_leaves == 0 else "an array"
    kind, keys = tree.node_data()
    if kind is dict:
        return f"a dict with the keys {shown(keys)}"
    return f"a {kind.__name__} of {len(tree.children())}"


def keyword_names(fun: Callable[..., Any], argnums: Sequence[int]) -> tuple[str, ...]:
    """The names of the arguments at these positions; none of some builtins."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return ()
    return tuple(
        parameter.name
        for argnum, parameter in enumerate(parameters)
        if argnum in argnums
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def with_leaves(tree: PyTree, leaves: Sequence[Any]) -> Any | None:
    """The pytree of leaves that are no arrays; None if a class in it refuses them."""
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception:
        return None


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
