"""How a map becomes a program of its devices. Importing registers it.

`spmap_p` is public from here: whoever has it has all of its rules.
"""

from shardmap.map import rules
from shardmap.map.lowering import register
from shardmap.map.primitives.map_primitive import spmap_p

__all__ = ["register", "rules", "spmap_p"]
