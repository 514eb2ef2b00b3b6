"""A model without HTTP, for tests of the loop."""

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from crow_core.testing.script import Reply, get_finish_reason, get_usage, play_in_order, to_deltas


class ScriptedModel:
    """Streams the replies of a list in order, or the reply that a function returns for each request.

    It raises `ScriptEnded` after the end of the list.
    """

    is_free = True
    """True: a limit of money holds without prices."""

    def __init__(
        self,
        script: Callable[[dict[str, Any]], Reply | Awaitable[Reply]] | Sequence[Reply],
        name: str = "scripted",
        window: int | None = None,
    ) -> None:
        self.name = name
        self.window = window
        """Tokens that fit into one request and its reply; None if unknown."""
        self.requests: list[dict[str, Any]] = []
        """Copies of the requests, oldest first, so that later changes to their messages do not show."""
        self._script = script if callable(script) else play_in_order(script)

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield the reply's deltas, then `{"finish_reason": ..., "usage": ...}`; raises the reply's `error`."""
        self.requests.append(copy.deepcopy(request))
        turn = len(self.requests)
        answer = self._script(request)
        reply = await answer if inspect.isawaitable(answer) else answer
        for delta in to_deltas(reply, turn):
            yield delta
            await asyncio.sleep(reply.pace)
        if reply.error:
            raise reply.error
        if reply.hang:
            await asyncio.Event().wait()
        yield {"finish_reason": get_finish_reason(reply), "usage": get_usage(reply, request)}
