"""The ACP agent: requests of a client come in, answers and updates go out."""
