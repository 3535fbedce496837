"""Reading what users say about partitions, and what is wrong with it.

A leaf is None, or a tuple of ints with a count for each dimension, or the same as a
`jax.sharding.PartitionSpec`.
"""

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from shardmap._jax.types import Aval, PyTree, with_shape
from shardmap.arrays import trees
from shardmap.map.constraint import partition_mesh
from shardmap.map.partition_axes import total_partitions

Counts = tuple[int, ...] | None
"""Of partitions along each dimension; None: every device has the whole value."""


def _is_counts(value: object) -> bool:
    return (
        type(value) is tuple
        and len(value) > 0
        and all(type(count) is int for count in value)
    )


def is_leaf(value: object) -> bool:
    """Whether ``value`` is a leaf of parts, and no container of them."""
    return value is None or isinstance(value, PartitionSpec) or _is_counts(value)


def check_leaves(name: str, tree: PyTree) -> None:
    """Refuses other leaves, and counts below 1."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_leaf):
        counts = () if leaf is None else leaf
        if not is_leaf(leaf) or not all(
            count is None or type(count) is int for count in counts
        ):
            raise TypeError(
                f"{name} must be a tuple of ints, None, or a (nested) container with "
                f"these as leaves, but got {tree}."
            )
        if any(count is not None and count < 1 for count in counts):
            raise ValueError(f"{name} must be counts of at least 1, but got {tree}.")


def broadcast_parts(
    what: str, name: str, parts: PyTree, tree: PyTree, described: str
) -> list[Counts]:
    """The counts for each leaf of ``tree``, from a pytree prefix of it."""
    leaves = trees.broadcast_axes(name, parts, tree, described, is_leaf, caller=what)
    return [
        tuple(1 if count is None else count for count in leaf) if leaf else None
        for leaf in leaves
    ]


def check_shapes(
    what: str,
    names: Sequence[str],
    avals: Sequence[Aval],
    all_parts: Sequence[Counts],
) -> None:
    """Refuses counts for another rank, and those that do not divide a dimension."""
    problems = []
    for name, aval, parts in zip(names, avals, all_parts, strict=True):
        if parts is None:
            continue
        where = f"\n  * {name} is {aval.str_short()}"
        if len(parts) != aval.ndim:
            problems.append(
                f"{where} (rank {aval.ndim}), but parts {parts} are for rank "
                f"{len(parts)}"
            )
            continue
        problems += [
            f"{where}: dimension {dimension} of size {size} is not divisible by "
            f"{count} parts"
            for dimension, (size, count) in enumerate(
                zip(aval.shape, parts, strict=True)
            )
            if size % count
        ]
    if problems:
        raise ValueError(
            f"{what} cannot cut these values into parts:{''.join(problems)}\nGive one "
            "count for each dimension, 1 where it is not cut, or None for the whole "
            "value."
        )


Total = tuple[str, int | None]
"""Who says how many partitions there are, and the number, if any."""


def counted(
    kind: str, names: Sequence[str], all_parts: Sequence[Counts]
) -> list[Total]:
    """The totals of these parts."""
    return [
        (f"{kind} of {name}", None if parts is None else total_partitions(parts))
        for name, parts in zip(names, all_parts, strict=True)
    ]


def agreed_total(what: str, totals: Sequence[Total]) -> int | None:
    """The total that all agree on; None if nobody says one."""
    said = [(source, total) for source, total in totals if total is not None]
    for source, total in said:
        if total != said[0][1]:
            raise ValueError(
                f"{what}: {source} has {total} total partitions but {said[0][1]} are "
                f"expected, as {said[0][0]} has. All parts must have the same "
                "product, or be None."
            )
    return said[0][1] if said else None


# Of several processes


def check_local_parts(
    what: str,
    kind: str,
    names: Sequence[str],
    avals: Sequence[Aval],
    all_parts: Sequence[Counts],
    all_local: Sequence[Counts],
) -> None:
    """Refuses counts of this process's partitions that are not those which it has.

    Args:
      what: who was called, for errors.
      kind: the parameter, for errors.
      names: what each value is called.
      avals: the values' kinds.
      all_parts: how each is cut.
      all_local: how this process's partitions of it are; None: it has no own.
    """
    problems = []
    for name, aval, parts, local in zip(
        names, avals, all_parts, all_local, strict=True
    ):
        if local is None:
            continue
        if parts is None:
            parts = (1,) * aval.ndim
        total = total_partitions(parts)
        own = own_count(total)
        box = _own_box(parts, own)
        if local != box:
            problems.append(
                f"\n  * {kind} of {name} is {local}, but of {parts} partitions, "
                f"{total} in all, this process has {own}, which are "
                + ("no such block" if box is None else f"{box}")
            )
    if problems:
        raise ValueError(
            f"{what} cannot put the partitions of the processes together:"
            f"{''.join(problems)}\nPartitions that this process has devices for are "
            "all its own; of more, each process has equally many, one behind the "
            "other, counted row-major. Give those counts, or pass global arrays and "
            f"leave {kind} out."
        )


def check_own_count(what: str, total: int, wanted: int) -> None:
    """Refuses another number of partitions on this process than there are."""
    if (own := own_count(total)) != wanted:
        raise ValueError(
            f"{what} got local_num_partitions {wanted}, but of the {total} partitions "
            f"{own} are on each process that has any. Leave it out."
        )


def own_count(total: int) -> int:
    """How many of the partitions are on this process."""
    here = jax.process_index()
    devices = partition_mesh((), total, "sharded_jit").devices.flat
    return sum(device.process_index == here for device in devices)


def _own_box(parts: tuple[int, ...], count: int) -> Counts:
    """The shape of ``count`` partitions one behind the other; None if it is no box."""
    box: list[int] = []
    for partitions in reversed(parts):
        box.append(min(partitions, count))
        if max(partitions, count) % box[-1]:
            return None
        count //= box[-1]
    return tuple(reversed(box))


def whole_aval(aval: Aval, parts: Counts, local: Counts) -> Aval:
    """The kind of the global array of which this process has these partitions."""
    if parts is None or local is None:
        return aval
    shape = [
        size // own * partitions
        for size, own, partitions in zip(aval.shape, local, parts, strict=True)
    ]
    return with_shape(aval, shape)
