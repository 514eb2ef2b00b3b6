"""Examines whether any ACP agent conforms to the protocol."""
