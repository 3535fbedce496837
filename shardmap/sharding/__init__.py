"""What a sharding is: the model, and its way to and from protos, JAX and meshes.

`spec` is what users build, on the `model` of entries and indices. `proto` and `named`
say the same in XLA's and in JAX's words. `mesh` makes meshes and takes parts of them.
"""
