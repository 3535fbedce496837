"""How a map becomes a program of its devices. Importing registers it.

`MapPrimitive` and `spmap_p` are public from here: whoever has them has their rules.
"""

from shardmap.map import rules
from shardmap.map.lowering import evaluation, lower_map
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p

__all__ = ["MapPrimitive", "evaluation", "lower_map", "rules", "spmap_p"]
