"""The code of one shard, from its recipe."""
