"""The Agent Client Protocol: its messages, the connection and the transports."""
