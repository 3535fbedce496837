"""What the transformations of JAX do with a map. Importing registers them.

Every rule works in the same way: it transforms the function of one element with
JAX's own public transformation, traces the result with the axis bound, and binds
the map again. So any composition of transformations of a map is a program of maps.
"""

from shardmap.map.rules import (
    checkify,
    dce,
    differentiation,
    remat,
    vectorization,
)

__all__ = [
    "checkify",
    "dce",
    "differentiation",
    "remat",
    "vectorization",
]
