"""What we know of the packages that we build on."""
