"""What is `mesh_map`'s own: how it reads a call of blocks."""
