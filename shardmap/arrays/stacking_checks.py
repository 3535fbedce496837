"""What is asked of values that are stacked: equal structures, shapes and dtypes."""

from collections.abc import Sequence
from typing import Any

import jax

from shardmap._jax.types import PyTree, Value
from shardmap.arrays import array_likes
from shardmap.sharding.mesh import check_devices, too_few_devices


def some_devices(caller: str, devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    given = check_devices(caller, devices)
    if not given:
        raise ValueError(
            f"{caller} needs at least one device, got {devices!r}.{too_few_devices(2)}"
        )
    return given


def check_structures(shards: Sequence[Any], trees: Sequence[Any]) -> None:
    for k, tree in enumerate(trees):
        if tree != trees[0]:
            first, other = _paths(shards[0]), _paths(shards[k])
            missing = [f"shards[0]{p} is not in shards[{k}]" for p in first - other]
            added = [f"shards[{k}]{p} is not in shards[0]" for p in other - first]
            raise ValueError(
                f"device_put_sharded needs shards of equal structure: shards[0] is "
                f"{trees[0]}, shards[{k}] is {tree}."
                + "".join(f"\n  * {line}" for line in sorted([*missing, *added]))
            )


def _paths(tree: PyTree) -> set[str]:
    return {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_avals(shards: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    kinds = [[_kind(leaf) for leaf in row] for row in rows]
    bad = [
        (k, position)
        for k, row in enumerate(kinds)
        for position, kind in enumerate(row)
        if kind != kinds[0][position]
    ]
    if bad:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shards[0])]
        listed = "".join(
            f"\n  * shards[{k}]{jax.tree_util.keystr(paths[position])} is "
            f"{_short(kinds[k][position])}, but in shards[0] it is "
            f"{_short(kinds[0][position])}"
            for k, position in bad
        )
        raise ValueError(
            f"device_put_sharded needs shards of equal shapes and dtypes:{listed}"
        )


def _kind(leaf: Value) -> tuple[Any, tuple[int, ...]]:
    aval = array_likes.abstract_value(leaf)
    return aval.dtype, aval.shape


def _short(kind: tuple[Any, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{dtype}[{','.join(map(str, shape))}]"
