"""A plan inside a program: its shards one after the other, in loops of JAX."""
