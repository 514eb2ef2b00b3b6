"""Chat-completions messages: the entries of the log, and how the log becomes a request."""
