"""Taps are given the host function that they are given in tests/api."""

from tests.api.conftest import recorder

__all__ = ["recorder"]
