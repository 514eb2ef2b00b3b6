"""The client side of the Model Context Protocol: servers, their transports, and a session's tools."""
