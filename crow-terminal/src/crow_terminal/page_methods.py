"""The methods beyond ACP between the terminal and its page; `PageLink` answers them."""

JOIN_METHOD = "_crow/join"
"""The page asks for what has happened since the last turn began, and for what happens from then on."""
TURN_METHOD = "_crow/turn"
"""Tells the page that a turn of the terminal has begun, or ended with a `stopReason`."""
OPENED_METHOD = "_crow/opened"
"""Tells the page that the terminal has opened another session, or that the session is to be read again.

If the agent was `restarted`, no session is open.
"""
