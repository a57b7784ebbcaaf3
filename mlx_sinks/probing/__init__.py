"""What a selection kept: measured on a model as it runs."""
