"""What a run keeps on disk: results, checkpoints, scratch arrays."""
