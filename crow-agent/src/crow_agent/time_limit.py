"""The time that a prompt may take."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from crow_agent.errors import PromptTimeout


class TimeLimit:
    """The time that a prompt may take, the start of its agent included. It counts from the first block on."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        """None for no limit."""
        self._end: float | None = None

    @asynccontextmanager
    async def holding(self) -> AsyncGenerator[None]:
        """Cancel the block at the end of the time. Raises PromptTimeout then."""
        if self._end is None and self.seconds is not None:
            self._end = asyncio.get_running_loop().time() + self.seconds
        limit = asyncio.timeout_at(self._end)
        try:
            async with limit:
                yield
        except TimeoutError:
            if self.seconds is None or not limit.expired():
                raise
            raise PromptTimeout(self.seconds) from None
