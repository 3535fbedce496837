"""Programs of pods, compiled for real machines and not run."""
