"""What is `spmap`'s own: how it reads a call of elements, and what it refuses."""
