"""The Agent Client Protocol: its vocabulary, the connection, the transports."""
