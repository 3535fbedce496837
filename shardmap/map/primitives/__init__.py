"""The primitives of maps and taps, and how jaxprs that hold them are rewritten."""
