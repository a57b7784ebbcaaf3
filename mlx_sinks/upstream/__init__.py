"""What we know of the packages under us."""
