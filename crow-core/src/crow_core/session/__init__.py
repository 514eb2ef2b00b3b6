"""A session: its log, its requests to the model, its updates to the client, and the hooks that extensions use."""
