"""Caches with a window: the sinks and the newest tokens."""
