"""The rules of the primitives of `jax.lax`: how cuts pass through each."""
