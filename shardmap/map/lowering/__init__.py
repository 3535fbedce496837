"""How a map becomes a program of its devices. Importing registers it."""

from shardmap.map.lowering import register

__all__ = ["register"]
