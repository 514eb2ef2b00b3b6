"""Endpoints, MCP servers and agents that misbehave, for the tests of crow."""
