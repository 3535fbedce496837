"""The layouts that a program asks for on its way."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.extend.core as jex_core
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import NamedSharding

from shardmap._jax.types import Equation, Jaxpr, Var, aval_of
from shardmap.explain.read.source import source_of
from shardmap.sharding.conversions import axes_in


class LayoutConstraint(NamedTuple):
    """A layout that a value is to have, as `jax.lax.with_sharding_constraint` says.

    Attributes:
      sharding: the layout.
      whole: the shape of the value.
      shape: what a device is to have of it.
      source: the line that asks.
      lines: those of what makes the value, and of what takes it: XLA may say either of
        what it sends for the layout.
    """

    sharding: NamedSharding
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    source: str | None
    lines: frozenset[str | None]


def constraints_of(jaxpr: Jaxpr, around: str | None) -> Iterator[LayoutConstraint]:
    """The layouts that the equations of a jaxpr ask for, without those inside them.

    Args:
      jaxpr: the jaxpr.
      around: the line of what is around it.
    """
    if not any(_layout(equation) for equation in jaxpr.eqns):
        return
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
        layout = _layout(equation)
        if layout is None:
            continue
        [before], [after] = equation.invars, equation.outvars
        maker = around
        if not isinstance(before, jex_core.Literal):
            maker = made_at.get(before, around)
        shape = aval_of(after).shape
        near = frozenset({line, maker, *taken_at.get(after, ())} - {None})
        yield LayoutConstraint(layout, shape, _on_a_device(shape, layout), line, near)


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
