"""The layouts that a program asks for with `jax.lax.with_sharding_constraint`."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.extend.core as jex_core
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import NamedSharding

from shardmap._jax.types import Atom, Equation, Jaxpr, aval_of
from shardmap.sharding.conversions import axes_in
from shardmap.source import source_of


class LayoutConstraint(NamedTuple):
    """A layout that a program asks for.

    Attributes:
      sharding: the layout.
      whole: the shape of the value.
      shape: the shape of a shard.
      source: the line of the constraint.
      lines: the lines of the constraint, of the operation that makes the value, and of
        those that take it. XLA may name any of them for what it sends.
    """

    sharding: NamedSharding
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    source: str | None
    lines: frozenset[str | None]


def constraints_of(jaxpr: Jaxpr, around: str | None) -> Iterator[LayoutConstraint]:
    """The layouts that the equations of a jaxpr ask for, without nested ones.

    Args:
      jaxpr: the jaxpr.
      around: the line of the equation around it.
    """
    asking = [equation for equation in jaxpr.eqns if _layout(equation) is not None]
    if not asking:
        return
    makers = {var: each for each in jaxpr.eqns for var in each.outvars}
    takers: dict[Atom, list[Equation]] = collections.defaultdict(list)
    for each in jaxpr.eqns:
        for atom in each.invars:
            if not isinstance(atom, jex_core.Literal):
                takers[atom].append(each)
    for equation in asking:
        layout = _layout(equation)
        [before], [after] = equation.invars, equation.outvars
        assert layout is not None
        maker = None if isinstance(before, jex_core.Literal) else makers.get(before)
        lines = {around if maker is None else source_of(maker) or around}
        for each in (equation, *_takers(after, takers)):
            lines.add(source_of(each) or around)
        shape = aval_of(after).shape
        yield LayoutConstraint(
            layout,
            shape,
            _shard_shape(shape, layout),
            source_of(equation) or around,
            frozenset(lines - {None}),
        )


def _takers(
    atom: Atom, takers: Mapping[Atom, Sequence[Equation]]
) -> Iterator[Equation]:
    """The equations that use a value, also after further constraints."""
    for each in takers.get(atom, ()):
        yield each
        if _layout(each) is not None:
            yield from _takers(each.outvars[0], takers)


def _layout(equation: Equation) -> NamedSharding | None:
    """The layout that an equation asks for, or None."""
    # The primitive of `jax.sharding.reshard` has no public name.
    asks = equation.primitive is sharding_constraint_p
    layout = equation.params.get("sharding" if asks else "dst_sharding")
    return layout if isinstance(layout, NamedSharding) else None


def _shard_shape(shape: tuple[int, ...], layout: NamedSharding) -> tuple[int, ...]:
    """The shape of a shard, also along the mesh axes of a `jax.shard_map` around."""
    counts = [math.prod(sizes.values()) for sizes in axis_sizes(layout)]
    counts += [1] * (len(shape) - len(counts))
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


def axis_sizes(layout: NamedSharding) -> Iterator[dict[str, int]]:
    """The mesh axes of each dimension, with their sizes."""
    for entry in layout.spec.partitions:
        names = [name for name in axes_in(entry) if isinstance(name, str)]
        yield {name: layout.mesh.shape[name] for name in names}
