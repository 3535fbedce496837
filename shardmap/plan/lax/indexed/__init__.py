"""Rules of the primitives that find the place of elements in other operands."""
