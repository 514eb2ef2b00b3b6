"""Language models: chat completions over server-sent events."""
