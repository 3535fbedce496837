"""One call: its options, its arguments, the programs that are kept for it."""
