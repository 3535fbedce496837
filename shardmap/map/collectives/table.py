"""The table of collectives, for maps, plans and explain."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core.primitives as p
import jax.numpy as jnp

from shardmap._jax.primitives import PBROADCAST, PSUM_INVARIANT, REDUCE_SCATTER
from shardmap._jax.types import Aval, Primitive
from shardmap.map.collectives import rules
from shardmap.map.collectives.rules import REDUCTIONS, Reduction, Rule
from shardmap.units import shown


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      name: the name of the function, for messages and `explain`.
      kind: XLA's name; None if nothing is sent.
      rule: its rule for blocks of elements.
      combiner: how values of several devices become one; None if they stay apart.
      of_equal_groups: whether all ``axis_index_groups`` must have one size.
      is_elementwise: whether a plan may cut the dimensions of an element.
      lowers_per_device: whether JAX lowers it for one element on each device, given the
        type of an operand and the platform.
    """

    name: str
    kind: str | None
    rule: Rule
    combiner: str | None = None
    of_equal_groups: bool = False
    is_elementwise: bool = False
    lowers_per_device: Callable[[Aval, str], bool] = lambda aval, platform: True

    @property
    def is_reduction(self) -> bool:
        """Whether it only combines values."""
        return isinstance(self.rule, Reduction)

    @property
    def is_shared(self) -> bool:
        """Whether all elements of a group have its result."""
        alike = rules.all_gather_rule, rules.pbroadcast_rule
        return self.is_reduction or self.rule in alike


def _reduction(name: str, combiner: str, **options: Any) -> Collective:
    rule = REDUCTIONS[combiner]
    return Collective(
        name, "all-reduce", rule, combiner, is_elementwise=True, **options
    )


def _is_comparable(aval: Aval, platform: str) -> bool:
    # XLA compares no complex numbers between devices, and loses NaN on CPU.
    kind = jnp.inexact if platform == "cpu" else jnp.complexfloating
    return not jnp.issubdtype(aval.dtype, kind)


COLLECTIVES: dict[Primitive, Collective] = {
    p.psum_p: _reduction("psum", "add"),
    PSUM_INVARIANT: _reduction("psum", "add"),
    p.pmax_p: _reduction("pmax", "max", lowers_per_device=_is_comparable),
    p.pmin_p: _reduction("pmin", "min", lowers_per_device=_is_comparable),
    REDUCE_SCATTER: Collective(
        "psum_scatter",
        "reduce-scatter",
        rules.reduce_scatter_rule,
        combiner="add",
        of_equal_groups=True,
        lowers_per_device=lambda aval, platform: bool(aval.size),
    ),
    p.all_gather_p: Collective(
        "all_gather",
        "all-gather",
        rules.all_gather_rule,
        of_equal_groups=True,
        # Not random keys, and not arrays without entries.
        lowers_per_device=lambda aval, platform: (
            bool(aval.size) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        ),
    ),
    p.all_to_all_p: Collective(
        "all_to_all", "all-to-all", rules.all_to_all_rule, of_equal_groups=True
    ),
    p.ragged_all_to_all_p: Collective(
        "ragged_all_to_all", "ragged-all-to-all", rules.ragged_all_to_all_rule
    ),
    p.ppermute_p: Collective(
        "ppermute", "collective-permute", rules.ppermute_rule, is_elementwise=True
    ),
    PBROADCAST: Collective(
        "pbroadcast",
        "collective-permute",
        rules.pbroadcast_rule,
        combiner="add",  # Of the one and zeros for the others.
        is_elementwise=True,
        lowers_per_device=lambda aval, platform: platform != "cpu",
    ),
    p.axis_index_p: Collective("axis_index", None, rules.axis_index_rule),
}


def register_collective(primitive: Primitive, combiner: str | None = None) -> None:
    """Registers a collective of your own for maps, `plan` and `explain`.

    The primitive has the names of the mapped axes in its parameter ``axes`` or
    ``axis_name``, and has a batching rule for `jax.vmap`.

    Args:
      primitive: a `jax.extend.core.Primitive`.
      combiner: for a reduction, how two values combine: "add", "mul", "max", "min",
        "and", "or" or "xor". Each device combines its own elements and sends one value.
        The primitive takes one array, and apart from its axes only
        ``axis_index_groups``. None: every device gets all values and applies the
        batching rule to them.

    Raises:
      TypeError: ``primitive`` is not a primitive.
      ValueError: ``primitive`` is registered already, or ``combiner`` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, shardmap as sm
      >>> from jax.extend.core import Primitive
      >>> pprod_p = Primitive("pprod")
      >>> _ = pprod_p.def_abstract_eval(lambda x, axes: x)
      >>> sm.extend.register_collective(pprod_p, "mul")
      >>> mapped = sm.spmap(lambda x: pprod_p.bind(x, axes=("i",)), "i")
      >>> print(mapped(jnp.full(16, 2.0))[0])
      65536.0
    """
    if not isinstance(primitive, Primitive):
        raise TypeError(
            "register_collective takes a jax.extend.core.Primitive, got "
            f"{shown(primitive)}. Give the primitive that the function binds."
        )
    if primitive in COLLECTIVES:
        raise ValueError(f"register_collective: {primitive} is a collective already.")
    if combiner not in (None, *REDUCTIONS):
        raise ValueError(
            f"register_collective: {primitive} has combiner={combiner!r}, which is not "
            f"one of {', '.join(REDUCTIONS)}. Leave it out, and its batching rule is "
            "used."
        )
    name, rule = primitive.name, rules.rule_of_vmap(primitive)
    collective = (
        Collective(name, "all-gather", rule)
        if combiner is None
        else _reduction(name, combiner)
    )
    collective = dataclasses.replace(
        collective, lowers_per_device=lambda aval, platform: False
    )
    COLLECTIVES[primitive] = collective
