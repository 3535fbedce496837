"""How slices pass through a program. It knows no primitive."""
