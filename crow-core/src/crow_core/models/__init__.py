"""How a model is asked: chat completions over server-sent events."""
