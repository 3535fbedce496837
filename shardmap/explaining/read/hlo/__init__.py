"""Readers of XLA's text of a compiled program."""
