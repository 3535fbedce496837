"""Rules of the primitives that take indices: slices, gathers and scatters."""
