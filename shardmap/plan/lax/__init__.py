"""What the primitives of `jax.lax` do with slices: one table, by kind."""
