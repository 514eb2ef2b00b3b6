"""Shell commands and terminals, and the processes that run in them."""
