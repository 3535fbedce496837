"""What a sharding is: the model, and its way to and from protos, JAX and meshes.

`spec` is the model and its indices, pure Python and NumPy. `proto` and `named` say the
same layout in XLA's and in JAX's words. `mesh` makes meshes and takes parts of them.
"""
