"""Shows what is stored, in a browser."""
