"""Takes back the last turn of a session, with its edits to files, after a question on the page."""

from typing import Any

from crow_core.acp.shared_methods import REWIND_METHOD, REWIND_POINTS_METHOD
from crow_terminal.blocks import Note
from crow_terminal.chat_client import ChatClient
from crow_terminal.rewind import describe_rewind

from crow_web.log import BlockRenderer, Log


class TurnUndo:
    """The question whether the last turn shall be taken back, and what follows."""

    def __init__(self, renderer: BlockRenderer) -> None:
        self._renderer = renderer
        self._asked: tuple[Log, str, dict[str, Any]] | None = None
        """The log with the card, the card's block, and the request that a person confirms; None if nothing is asked."""

    async def ask(self, client: ChatClient, session: str, folder: str, log: Log) -> None:
        """Show what it would change. Raises RpcError, ConnectionClosed."""
        self.leave()
        points = (await client.request(REWIND_POINTS_METHOD, {"sessionId": session}))["points"]
        if not points:
            log.show([Note("Nothing can be undone: there is no earlier prompt.", "warning")])
            return
        params = {"sessionId": session, "messageId": points[-1]["messageId"], "mode": "both"}
        answer = await client.request(REWIND_METHOD, {**params, "dryRun": True})
        if why := answer["files"].get("error"):
            log.show([Note(f"{why} Nothing was undone.", "warning")])
            return
        block = log.take_id()
        self._asked = log, block, params
        log.put(
            block,
            self._renderer.render("undo", f"This undoes the last turn. {'; '.join(describe_rewind(answer, folder))}"),
        )

    async def confirm(self, client: ChatClient) -> bool:
        """Take it back, and return whether that was asked. Raises RpcError, ConnectionClosed."""
        asked, self._asked = self._asked, None
        if asked:
            asked[0].put(asked[1], None)
            await client.request(REWIND_METHOD, {**asked[2], "dryRun": False})
        return asked is not None

    def leave(self) -> None:
        """Remove the question."""
        if self._asked:
            log, block, _ = self._asked
            log.put(block, None)
            self._asked = None
