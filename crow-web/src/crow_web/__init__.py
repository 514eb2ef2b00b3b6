"""Shows the stored data in a browser."""
