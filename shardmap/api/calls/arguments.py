"""Reading the arguments of a mapped call: axes, sizes, and what is wrong with them.

Errors name each bad leaf by its key path, as ``params['w']`` or ``x``, with its shape.
"""

import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardmap.arrays import array_likes


def check_axes(name: str, axes: Any) -> None:
    """Refuses anything but ints and None as the leaves of ``axes``."""
    for leaf in jax.tree.leaves(axes):
        if type(leaf) is not int:
            raise TypeError(
                f"spmap {name} must be an int, None, or (nested) container with those "
                f"types as leaves, but got {axes}."
            )


def index_tuple(name: str, argnums: Any) -> tuple[int, ...]:
    """Positions of arguments, given as an int or several, as a tuple."""
    values = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"spmap {name} must be an int or several, none below 0, but got "
                f"{argnums}."
            )
    return values


class Static:
    """A compile-time constant as a part of keys.

    Equal to another if both have the same value and type, tuples and frozensets with
    all that is in them: ``1``, ``1.0`` and ``True`` are equal, but compute differently.

    >>> Static((1, 2)) == Static((1, 2)), Static((1, 2)) == Static((True, 2))
    (True, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: Hashable) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        mine, its = self.value, other.value
        return mine is its or typed(mine) == typed(its)

    def __repr__(self) -> str:
        return repr(self.value)


def typed(value: Hashable) -> Hashable:
    """What is equal only for equal values of equal types.

    >>> typed(1) == typed(1.0)
    False
    """
    if isinstance(value, tuple):
        return type(value), *map(typed, value)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(typed, value))
    return type(value), value


def wrap_statics(args: tuple[Any, ...], argnums: Collection[int]) -> tuple[Any, ...]:
    """The positional arguments, those that are constants each as a `Static`."""
    if not argnums:
        return args
    count = len(args)
    static = {argnum % count for argnum in argnums if -count <= argnum < count}
    return tuple(Static(a) if k in static else a for k, a in enumerate(args))


def batch_size(size: int | None) -> int | None:
    """``size``, if it is one."""
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(
            f"spmap batch_size must be an int above 0 or None, but got {size!r}."
        )
    return size


def lowering(name: str, batch_size: int | None) -> str:
    """``name``, if there is such a lowering and it can do what is asked."""
    if name not in ("manual", "spmd"):
        raise ValueError(
            f"spmap lowering must be 'manual' or 'spmd', but got {name!r}."
        )
    if name == "spmd" and batch_size is not None:
        raise ValueError(
            f"spmap lowering='spmd' and batch_size={batch_size} do not go together: "
            "the partitioner decides what a device does at once. Leave batch_size out, "
            "or use lowering='manual'."
        )
    return name


def mesh_axes(
    mesh: Mesh | None, names: str | Sequence[str] | None, devices: Any, backend: Any
) -> tuple[str, ...] | None:
    """The axes of ``mesh`` to lay a map over, as a tuple.

    Raises:
      ValueError: only one of ``mesh`` and ``names`` given, a name that the mesh does
        not have, or one twice.
    """
    if mesh is None and names is None:
        return None
    if mesh is None or names is None:
        raise ValueError(
            "spmap takes mesh and mesh_axes together, but got "
            f"mesh={mesh} and mesh_axes={names!r}."
        )
    if devices is not None or backend is not None:
        raise ValueError(
            "spmap takes its devices from mesh, so give neither devices nor backend "
            "with it."
        )
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(set(names)) < len(names) or set(names) - set(mesh.axis_names):
        raise ValueError(
            f"spmap mesh_axes must be axes of the mesh, each once, but got {names} for "
            f"a mesh with axes {mesh.axis_names}."
        )
    return names


def is_none(value: Any) -> bool:
    """Whether ``value`` is None, which pytrees do not count as a leaf."""
    return value is None


def broadcast_axes(
    name: str,
    axes: Any,
    tree: Any,
    described: str,
    is_leaf: Callable[[Any], bool] = is_none,
    caller: str = "spmap",
) -> tuple[Any, ...]:
    """One leaf of ``axes`` for each leaf of ``tree``.

    Args:
      name: "in_axes" or "out_axes", for the error.
      axes: a pytree prefix of ``tree``.
      tree: a pytree, or its structure.
      described: what ``tree`` is, for the error.
      is_leaf: what to take as leaves of ``axes`` besides ints.
      caller: what was called, for the error.
    """
    leaves, prefix = jax.tree.flatten(axes, is_leaf=is_leaf)
    structure = (
        tree if isinstance(tree, jax.tree_util.PyTreeDef) else jax.tree.structure(tree)
    )
    counts = _leaf_counts(prefix, structure)
    if counts is None:
        raise ValueError(
            f"{caller} {name} must be a pytree prefix of {described}: {name} is "
            f"{axes}, which does not fit {structure}. "
            + _misfit(jax.tree.unflatten(prefix, range(len(leaves))), structure, name)
        )
    return tuple(
        leaf for leaf, count in zip(leaves, counts, strict=True) for _ in range(count)
    )


def _misfit(numbered: Any, structure: Any, name: str) -> str:
    """Where a prefix does not fit, in JAX's words."""
    whole = with_leaves(structure, [object() for _ in range(structure.num_leaves)])
    try:
        jax.tree.broadcast(numbered, whole)
    except ValueError as error:
        return str(error).replace("broadcast_prefix prefix_tree", name)
    return ""


def _leaf_counts(prefix: Any, structure: Any) -> list[int] | None:
    """How many leaves of ``structure`` each leaf of a prefix stands for.

    None if it is no prefix. Only structures are compared: a user's class may not like
    to be made of anything but arrays.
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
    """What the arguments at these positions are called when passed by keyword."""
    return tuple(
        parameter.name
        for argnum, parameter in enumerate(_parameters(fun))
        if argnum in argnums
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return []


def leaf_names(
    fun: Callable[..., Any], argnums: Sequence[int], args: Any, kwargs: Any
) -> list[str]:
    """How a caller would write each leaf: ``x``, ``params['w']``, ``args[1][0]``."""
    parameters = _parameters(fun)
    names = []
    for argnum, arg in zip(argnums, args, strict=True):
        positional = argnum < len(parameters) and parameters[argnum].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        root = parameters[argnum].name if positional else f"args[{argnum}]"
        names += [
            root + jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(arg)
        ]
    for key in sorted(kwargs):
        names += [
            key + jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(kwargs[key])
        ]
    return names


def leaf_aval(leaf: Any) -> Any:
    """The abstract value of an argument: shape, dtype, weak type.

    Raises:
      TypeError: ``leaf`` is nothing that JAX can compute with.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray):
        return jax.core.ShapedArray(leaf.shape, leaf.dtype, leaf.weak_type)
    return array_likes.abstract_value(leaf)


def normalize_in_axes(
    axes: Sequence[int | None], avals: Sequence[Any], names: Callable[[], list[str]]
) -> tuple[int | None, ...]:
    """Negative axes counted from the front.

    Raises:
      ValueError: an axis that its argument does not have.
    """
    bad = [
        k
        for k, (axis, aval) in enumerate(zip(axes, avals, strict=True))
        if axis is not None and not -aval.ndim <= axis < aval.ndim
    ]
    if bad:
        listed = "".join(
            f"\n  * {names()[k]} is {avals[k].str_short()} (rank {avals[k].ndim}), "
            f"in_axes asks for axis {axes[k]}"
            for k in bad
        )
        raise ValueError(
            "spmap was requested to map its argument along an axis that it does not "
            f"have:{listed}\nGive None in in_axes for what every element should get "
            "whole. Arguments passed by keyword are always mapped along axis 0."
        )
    return tuple(
        None if axis is None else axis % aval.ndim
        for axis, aval in zip(axes, avals, strict=True)
    )


def normalize_out_axes(
    axes: Sequence[int | None], avals: Sequence[Any]
) -> tuple[int | None, ...]:
    """Negative axes counted from the front of the result with the mapped axis in it.

    Raises:
      ValueError: an axis beyond the result's rank.
    """
    for axis, aval in zip(axes, avals, strict=True):
        if axis is not None and not -aval.ndim - 1 <= axis <= aval.ndim:
            raise ValueError(
                f"spmap out_axes puts the mapped axis at {axis}, but the result is "
                f"{aval.str_short()}: with the mapped axis it has rank "
                f"{aval.ndim + 1}. Give an axis from {-aval.ndim - 1} to {aval.ndim}."
            )
    return tuple(
        None if axis is None else axis % (aval.ndim + 1)
        for axis, aval in zip(axes, avals, strict=True)
    )


def mapped_size(
    axes: Sequence[int | None],
    avals: Sequence[Any],
    names: Callable[[], list[str]],
    axis_size: int | None,
) -> int:
    """The size of the mapped axis, which all mapped arguments share.

    Raises:
      ValueError: sizes that differ, or no mapped argument and no ``axis_size``.
    """
    sizes = [
        (k, aval.shape[axis])
        for k, (axis, aval) in enumerate(zip(axes, avals, strict=True))
        if axis is not None
    ]
    distinct = {size for _, size in sizes}
    if len(distinct) > 1:
        listed = "".join(
            f"\n  * {names()[k]} is {avals[k].str_short()}, axis {axes[k]} has size "
            f"{size}"
            for k, size in sizes
        )
        raise ValueError(
            f"spmap got inconsistent sizes for array axes to be mapped:{listed}\n"
            "Give all of them the same size, or None in in_axes for what every "
            "element should get whole."
        )
    if not distinct:
        if axis_size is None:
            raise ValueError(
                "spmap wrapped function must be passed at least one argument "
                f"containing an array to map, but got {len(avals)} "
                f"array{'' if len(avals) == 1 else 's'}, none mapped. "
                "Give axis_size=n to map over n elements all the same."
            )
        return axis_size
    (size,) = distinct
    if axis_size is not None and size != axis_size:
        raise ValueError(
            f"Specified axis_size {axis_size} doesn't match received axis_size {size} "
            f"of {names()[sizes[0][0]]}. Leave axis_size out, or give {size}."
        )
    return size


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any | None:
    """The pytree of these leaves, which are no arrays.

    None where a class of the user's does not like to be made of anything but arrays.
    """
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception:
        return None


def result_names(out_tree: Any) -> list[str]:
    """The key path of each leaf of a result, such as ``result['w'][0]``."""
    count = out_tree.num_leaves
    leaves = jax.tree_util.tree_leaves_with_path(
        with_leaves(out_tree, [object() for _ in range(count)])
    )
    if len(leaves) < count:
        return [f"leaf {k} of the result" for k in range(count)]
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in leaves]
