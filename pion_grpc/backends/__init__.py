"""Attention: a NumPy reference that defines the right answer, and faster ones compared with it."""
