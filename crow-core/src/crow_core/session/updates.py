"""Updates of a session to its client, in order with its log, messages and notices."""

from typing import Literal

from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    NoticeUpdate,
    SessionNotification,
    SessionUpdate,
    TextBlock,
)
from crow_core.session.log import SessionLog, new_id
from crow_core.session.user import Client


class SessionUpdates:
    """The updates of a session for its client."""

    def __init__(self, client: Client, id: str, log: SessionLog) -> None:
        self.client, self.log = client, log
        self.id = id
        """The id of the session."""

    async def update(self, update: SessionUpdate) -> None:
        """Send the client an update, after everything before it has been written."""
        await self.log.written()
        await self.send(update)

    async def send(self, update: SessionUpdate) -> None:
        """Send the client an update without waiting for the log.

        For the end of a tool call, which must be sent even when writing has failed, and for notices.
        """
        await self.client.notify("session/update", SessionNotification(session_id=self.id, update=update))

    async def say(self, text: str, *, is_answer: bool = True) -> None:
        """Send the client a message that is not the model's.

        With `is_answer` false, it is a notice to a client that takes notices, so that it is not read as the answer to
        the prompt.
        """
        if not is_answer and self.takes_notices:
            await self.notice(text)
        else:
            await self.update(AgentMessageChunk(content=TextBlock(text=text), message_id=new_id()))

    @property
    def takes_notices(self) -> bool:
        """True if the client takes notices."""
        wanted = self.client.capabilities.session
        return bool(wanted and wanted.notices)

    async def notice(self, title: str, severity: Literal["info", "warning", "error"] = "info") -> None:
        """Tell the user something that is not part of the conversation. Does not wait for the log."""
        if self.takes_notices:
            await self.send(NoticeUpdate(severity=severity, title=title))
        else:
            await self.send(AgentThoughtChunk(content=TextBlock(text=f"{title}\n"), message_id=new_id()))
