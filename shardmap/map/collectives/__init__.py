"""Collectives over mapped axes: checks, rewrites, and rules for blocks of elements."""
