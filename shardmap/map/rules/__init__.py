"""The rules of maps for JAX's transformations. Importing registers them.

Each rule transforms the function of one element by JAX's own transformation, traces
the result with the axis bound, and binds the map again. So any composition of
transformations of a map is a program of maps.
"""

from shardmap.map.rules import checkify, dce, differentiation, remat, vectorization

__all__ = ["checkify", "dce", "differentiation", "remat", "vectorization"]
