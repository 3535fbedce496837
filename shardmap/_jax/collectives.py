"""The collectives of `jax.lax`: one entry for each, with all that the rooms above ask.

A new one is an entry here, and, under its name, a rule for blocks of elements in
`shardmap.map.collectives.rules`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p
from jax.interpreters import ad

from shardmap._jax.types import Aval, Equation, Params, Primitive


def _registered(name: str) -> Primitive:
    """A primitive that has no public name, found among those with rules for `jvp`.

    Tracing the function that binds it would find it too, and takes longer than all
    else that is done here.
    """
    found = [primitive for primitive in ad.primitive_jvps if primitive.name == name]
    if len(found) != 1:
        raise ImportError(
            f"shardmap has rules for JAX's primitive {name}, but JAX differentiates "
            f"{len(found)} primitives of that name. It works with JAX 0.10.2 to 0.12: "
            "install one of these, or a newer shardmap."
        )
    return found[0]


def _everywhere(aval: Aval, platform: str) -> bool:
    return True


def _not_on_cpu(aval: Aval, platform: str) -> bool:
    return platform != "cpu"


def _of_ordered_numbers(aval: Aval, platform: str) -> bool:
    return not jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _of_numbers(aval: Aval, platform: str) -> bool:
    """Not of random keys, and not of arrays without entries."""
    return bool(aval.size) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      function: of `jax.lax`.
      primitive: what it binds in a map.
      kind: as XLA calls it; None if nothing is sent.
      combiner: how values of several devices become one; None if they do not.
      is_reduction: whether it does nothing else.
      of_equal_groups: whether the groups of ``axis_index_groups`` must be of one size.
      is_elementwise: whether the dimensions of an element have nothing to do with it.
      lowers_per_device: whether JAX lowers it for one element on each device, of an
        operand of that type, on that platform.
      variants: what it binds in a `jax.shard_map` that checks what varies.
    """

    function: Callable[..., Any]
    primitive: Primitive
    kind: str | None
    combiner: Literal["sum", "max", "min"] | None = None
    is_reduction: bool = False
    of_equal_groups: bool = False
    is_elementwise: bool = False
    lowers_per_device: Callable[[Aval, str], bool] = _everywhere
    variants: tuple[Primitive, ...] = ()

    @property
    def name(self) -> str:
        """That of the function."""
        return self.function.__name__


PSUM = Collective(
    lax.psum,
    p.psum_p,
    "all-reduce",
    combiner="sum",
    is_reduction=True,
    is_elementwise=True,
    variants=(_registered("psum_invariant"),),
)
PMAX = Collective(
    lax.pmax,
    p.pmax_p,
    "all-reduce",
    combiner="max",
    is_reduction=True,
    is_elementwise=True,
    lowers_per_device=_of_ordered_numbers,
)
PMIN = Collective(
    lax.pmin,
    p.pmin_p,
    "all-reduce",
    combiner="min",
    is_reduction=True,
    is_elementwise=True,
    lowers_per_device=_of_ordered_numbers,
)
PSUM_SCATTER = Collective(
    lax.psum_scatter,
    _registered("reduce_scatter"),
    "reduce-scatter",
    combiner="sum",
    of_equal_groups=True,
)
ALL_GATHER = Collective(
    lax.all_gather,
    p.all_gather_p,
    "all-gather",
    of_equal_groups=True,
    lowers_per_device=_of_numbers,
)
ALL_TO_ALL = Collective(
    lax.all_to_all, p.all_to_all_p, "all-to-all", of_equal_groups=True
)
RAGGED_ALL_TO_ALL = Collective(
    lax.ragged_all_to_all, p.ragged_all_to_all_p, "all-to-all"
)
PPERMUTE = Collective(
    lax.ppermute, p.ppermute_p, "collective-permute", is_elementwise=True
)
PBROADCAST = Collective(
    lax.pbroadcast,
    _registered("pbroadcast"),
    "collective-permute",
    combiner="sum",  # Of the one and zeros for the others.
    is_elementwise=True,
    lowers_per_device=_not_on_cpu,
)
AXIS_INDEX = Collective(lax.axis_index, p.axis_index_p, None)

TABLE = (
    PSUM,
    PMAX,
    PMIN,
    PSUM_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    RAGGED_ALL_TO_ALL,
    PPERMUTE,
    PBROADCAST,
    AXIS_INDEX,
)

COLLECTIVES: dict[Primitive, Collective] = {each.primitive: each for each in TABLE}
"""By what a map's function binds."""

ALL_COLLECTIVES: dict[Primitive, Collective] = COLLECTIVES | {
    variant: each for each in TABLE for variant in each.variants
}
"""By what any program binds."""


def axis_names(params: Params) -> tuple[Any, ...]:
    """The axes that a collective works over; numbers among them are dimensions."""
    names = params.get("axes", params.get("axis_name"))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def named_axes(equation: Equation) -> tuple[Any, ...]:
    """The same without dimensions."""
    names = axis_names(equation.params)
    return tuple(name for name in names if not isinstance(name, int))
