"""shardmap against JAX, side by side: `python -m benchmarks`."""
