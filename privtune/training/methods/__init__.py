"""Training methods, one paper a file."""
