"""How `spmap` reads a call of elements."""
