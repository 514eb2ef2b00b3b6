"""The command `crow`."""
