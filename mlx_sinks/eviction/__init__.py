"""Caches that drop keys on purpose, and never a sink."""
