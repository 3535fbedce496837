"""Running shards: here, in threads, in other processes, from a checkpoint."""
