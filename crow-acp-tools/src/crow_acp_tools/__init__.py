"""Check, record and replay any agent that speaks the Agent Client Protocol."""
