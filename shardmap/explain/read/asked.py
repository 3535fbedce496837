"""The layouts that a program asks for on its way."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.extend.core as jex_core
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import NamedSharding

from shardmap._jax.types import Equation, Jaxpr, Var, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.explain.read.source import source_of
from shardmap.sharding.conversions import axes_in


class LayoutConstraint(NamedTuple):
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


def asked_in(jaxpr: Jaxpr, around: str | None = None) -> Iterator[LayoutConstraint]:
    """The layouts that a program asks for.

    Those of a jaxpr that is shared are given once for each line that is around it.

    Args:
      jaxpr: the program.
      around: the line of what is around it.
    """
    return _asked_in(jaxpr, around, set())


def _asked_in(
    jaxpr: Jaxpr, around: str | None, seen: set[tuple[int, str | None]]
) -> Iterator[LayoutConstraint]:
    if (id(jaxpr), around) in seen:
        return
    seen.add((id(jaxpr), around))
    lines = [source_of(equation) or around for equation in jaxpr.eqns]
    made_at: dict[Var, str | None] = {}
    taken_at: dict[Var, set[str | None]] = {}
    for equation, line in zip(jaxpr.eqns, lines, strict=True):
        made_at.update((var, line) for var in equation.outvars)
    for equation, line in reversed([*zip(jaxpr.eqns, lines, strict=True)]):
        taken = {line}
        if _layout(equation) is not None:  # What takes it next may ask again.
            taken |= taken_at.get(equation.outvars[0], set())
        for atom in equation.invars:
            if not isinstance(atom, jex_core.Literal):
                taken_at.setdefault(atom, set()).update(taken)
    for equation, line in zip(jaxpr.eqns, lines, strict=True):
        if (layout := _layout(equation)) is not None:
            [before], [after] = equation.invars, equation.outvars
            maker = around
            if not isinstance(before, jex_core.Literal):
                maker = made_at.get(before, around)
            yield LayoutConstraint(
                _on_a_device(aval_of(after).shape, layout),
                line,
                frozenset({line, maker, *taken_at.get(after, ())} - {None}),
            )
        for inner in jaxprs_in(equation.params):
            yield from _asked_in(inner, line, seen)


def _layout(equation: Equation) -> NamedSharding | None:
    """What it asks for; other primitives only note a sharding."""
    # That of `jax.sharding.reshard` has no public name.
    asks = equation.primitive is sharding_constraint_p
    layout = equation.params.get("sharding" if asks else "dst_sharding")
    return layout if isinstance(layout, NamedSharding) else None


def _on_a_device(shape: tuple[int, ...], layout: NamedSharding) -> tuple[int, ...]:
    """The shape of a shard, also along the mesh axes of a `jax.shard_map` around."""
    counts = [1] * len(shape)
    for dimension, entry in enumerate(layout.spec.partitions):
        names = [name for name in axes_in(entry) if isinstance(name, str)]
        sizes = [layout.mesh.shape[name] for name in names]
        counts[dimension] = math.prod(sizes)
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))
