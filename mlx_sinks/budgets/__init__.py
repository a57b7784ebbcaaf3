"""Prompts compacted to a budget of rows."""
