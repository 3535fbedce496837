"""Collectives over mapped axes: what they ask, and over blocks of elements."""
