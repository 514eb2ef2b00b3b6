"""Where a command runs, and what it changed."""
