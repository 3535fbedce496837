"""The layouts that a program asks for on its way."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.extend.core as jex_core
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import NamedSharding

from shardmap._jax.types import Jaxpr, Var, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.explain.read.source import source_of


class Asked(NamedTuple):
    """A layout that a value is to have, as `jax.lax.with_sharding_constraint` says.

    Attributes:
      shape: what a device is to have of the value.
      source: the line that asks.
      lines: those of what makes the value, and of what takes it: XLA may say either of
        what it sends for the layout.
    """

    shape: tuple[int, ...]
    source: str | None
    lines: frozenset[str | None]


def asked_in(jaxpr: Jaxpr, around: str | None = None) -> Iterator[Asked]:
    """The layouts that a program asks for.

    Args:
      jaxpr: the program.
      around: the line of what is around it.
    """
    lines = {}
    made_at: dict[Var, str | None] = {}
    taken_at: dict[Var, set[str | None]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        lines[number] = source_of(equation) or around
        made_at.update((var, lines[number]) for var in equation.outvars)
        for atom in equation.invars:
            if not isinstance(atom, jex_core.Literal):
                taken_at.setdefault(atom, set()).add(lines[number])
    for number, equation in enumerate(jaxpr.eqns):
        # Other primitives only note a sharding; that of `jax.sharding.reshard` asks.
        asks = equation.primitive is sharding_constraint_p
        layout = equation.params.get("sharding" if asks else "dst_sharding")
        if isinstance(layout, NamedSharding):
            [before], [after] = equation.invars, equation.outvars
            maker = (
                None
                if isinstance(before, jex_core.Literal)
                else made_at.get(before, around)
            )
            yield Asked(
                _on_a_device(aval_of(after).shape, layout),
                lines[number],
                frozenset({lines[number], maker, *taken_at.get(after, ())} - {None}),
            )
        for inner in jaxprs_in(equation.params):
            yield from asked_in(inner, lines[number])


def _on_a_device(shape: tuple[int, ...], layout: NamedSharding) -> tuple[int, ...]:
    """The shape of a shard, also along the mesh axes of a `jax.shard_map` around."""
    counts = [1] * len(shape)
    for dimension, entry in enumerate(layout.spec.partitions):
        names = entry if isinstance(entry, tuple) else (entry,)
        sizes = [layout.mesh.shape[name] for name in names if isinstance(name, str)]
        counts[dimension] = math.prod(sizes)
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))
