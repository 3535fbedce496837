"""What is `sharded_jit`'s own: how it reads a call of partitions."""
