"""What leans on how JAX is made, each with its reason."""
