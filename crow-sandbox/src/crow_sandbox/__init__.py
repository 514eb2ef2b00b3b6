"""The place where a command runs, and its changes."""
