"""Specs, protos and meshes.

`spec` is the sharding model, `conversions` converts it to and from JAX shardings, XLA
protos and Shardy, and `mesh` makes meshes and parts of them.
"""
