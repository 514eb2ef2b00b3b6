"""The clock of the event loop, for tests of what happens when a time is up."""

import asyncio


def advance_clock(seconds: float) -> None:
    """Advance the clock of the running event loop, so that what waits no longer than this ends at once."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds
