"""Explanations and shardings as text, pictures and pages."""
