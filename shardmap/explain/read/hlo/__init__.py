"""What XLA's text of a compiled program says: what moves, where from, what is alive."""
