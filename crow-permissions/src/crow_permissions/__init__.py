"""Permission: whether a tool call runs, is asked about, or is denied. The extension `permissions` uses it."""
