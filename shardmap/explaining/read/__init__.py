"""Readers of jaxprs and of compiled programs."""
