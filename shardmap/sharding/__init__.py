"""What a sharding is.

`spec` is the sharding model, `conversions` its ways to and from JAX's shardings, XLA's
protos and Shardy, `mesh` makes meshes and takes parts of them.
"""
