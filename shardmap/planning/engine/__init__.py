"""How slices pass through a graph. It knows no primitive."""
