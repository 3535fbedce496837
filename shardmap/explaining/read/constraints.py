"""The layouts that a program asks for with `jax.lax.with_sharding_constraint`."""

from collections.abc import Iterator

from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import NamedSharding

from shardmap._jax.types import Equation
from shardmap.sharding.conversions import axes_in


def constraint_of(equation: Equation) -> NamedSharding | None:
    """The layout that an equation asks for, or None."""
    # The primitive of `jax.sharding.reshard` has no public name.
    asks = equation.primitive is sharding_constraint_p
    layout = equation.params.get("sharding" if asks else "dst_sharding")
    return layout if isinstance(layout, NamedSharding) else None


def axis_sizes(layout: NamedSharding) -> Iterator[dict[str, int]]:
    """The mesh axes of each dimension, with their sizes."""
    for entry in layout.spec.partitions:
        names = [name for name in axes_in(entry) if isinstance(name, str)]
        yield {name: layout.mesh.shape[name] for name in names}
