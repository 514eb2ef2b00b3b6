"""A model without HTTP: the shortest way to a test of the loop."""

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from crow_core.testing.script import Reply, deltas, finish_reason, in_order, usage


class ScriptedModel:
    """Streams the replies of a list in order, or what a function makes of each request.

    Asked once more than the list is long, it raises `ScriptEnded`.
    """

    def __init__(
        self,
        script: Callable[[dict[str, Any]], Reply | Awaitable[Reply]] | Sequence[Reply],
        name: str = "scripted",
        window: int | None = None,
    ) -> None:
        self.name = name
        self.window = window
        """Tokens it pretends to have room for; None when nobody said."""
        self.requests: list[dict[str, Any]] = []
        """Copies of the requests, oldest first: what was asked, whatever became of the messages since."""
        self._script = script if callable(script) else in_order(script)

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield the reply's deltas, then `{"finish_reason": ..., "usage": ...}`; raises the reply's `error`."""
        self.requests.append(copy.deepcopy(request))
        turn = len(self.requests)
        answer = self._script(request)
        reply = await answer if inspect.isawaitable(answer) else answer
        for delta in deltas(reply, turn):
            yield delta
            await asyncio.sleep(reply.pace)
        if reply.error:
            raise reply.error
        if reply.hang:
            await asyncio.Event().wait()
        yield {"finish_reason": finish_reason(reply), "usage": usage(reply, request)}
