"""How a map becomes a program of its devices. Importing registers it.

`MapPrimitive` and `spmap_p` are public from here: whoever has them has their rules.
"""

from shardmap.map.lowering import evaluation, lower_map
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p
from shardmap.map.rules import (
    checkify,
    dce,
    differentiation,
    remat,
    vectorization,
)

__all__ = ["MapPrimitive", "dce", "evaluation", "remat", "spmap_p"]

RULES = (
    differentiation.register,
    vectorization.register,
    checkify.register,
    lower_map.register,
)
"""The rules of each map primitive. `dce`, `remat` and `evaluation` have `spmap_p`'s."""

MapPrimitive.def_rules(RULES)
