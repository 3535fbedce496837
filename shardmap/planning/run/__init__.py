"""Running shards: here, in threads, from a checkpoint."""
