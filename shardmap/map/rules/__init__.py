"""What the transformations of JAX do with a map. Importing registers them."""

from shardmap.map.rules import checkify, mesh_batches, remat, transformations

__all__ = ["checkify", "mesh_batches", "remat", "transformations"]
