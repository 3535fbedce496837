"""A compiler that cuts any JAX function into independent shards."""
