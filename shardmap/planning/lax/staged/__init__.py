"""Rewrites operations as several stages, where a cut would end at one of them."""
