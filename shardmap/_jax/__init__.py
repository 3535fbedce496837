"""What depends on how JAX is made, with the reason and a check that fails loudly."""
