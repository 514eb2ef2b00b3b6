"""The requests about stored sessions that ACP may still change: archive one, name it, ask whether it is open."""

from collections.abc import Mapping
from typing import Protocol

from crow_system.shortening import shorten_line

from crow_core.acp.connection import Handler, RpcError
from crow_core.acp.schema import (
    INVALID_PARAMS,
    ArchiveSessionRequest,
    ArchiveSessionResponse,
    SessionStatusRequest,
    SessionStatusResponse,
    SetSessionTitleRequest,
    SetSessionTitleResponse,
    UnarchiveSessionRequest,
    UnarchiveSessionResponse,
)
from crow_core.agent.rpc_errors import find_stored
from crow_core.app import Crow
from crow_core.session.store import SessionChange
from crow_core.text import to_line

MAX_TITLE = 200
"""Characters of a title that a client sets; a longer one is shortened."""


class SessionOwner(Protocol):
    """The agent, as far as these requests need it."""

    async def crow(self) -> Crow: ...
    def release_session(self, crow: Crow, id: str, purpose: str) -> None: ...


class StoredSessions:
    """Answers the requests of one client."""

    def __init__(self, agent: SessionOwner) -> None:
        self._agent = agent

    def make_handlers(self) -> Mapping[str, Handler]:
        """Return the functions that answer, by their methods."""
        return {
            "session/archive": self.archive_session,
            "session/unarchive": self.unarchive_session,
            "session/set_title": self.set_session_title,
            "session/status": self.get_session_status,
        }

    async def archive_session(self, params: ArchiveSessionRequest) -> ArchiveSessionResponse:
        """Close a session and take it out of the list. One without a message was never stored, so it is unknown."""
        crow, id = await self._agent.crow(), params.session_id

        async def archive() -> bool:
            self._agent.release_session(crow, id, "archive it")
            return await crow.archive(id)

        await find_stored(id, archive())
        return ArchiveSessionResponse()

    async def unarchive_session(self, params: UnarchiveSessionRequest) -> UnarchiveSessionResponse:
        crow, id = await self._agent.crow(), params.session_id
        await find_stored(id, crow.change(id, SessionChange(archived=False)))
        return UnarchiveSessionResponse()

    async def set_session_title(self, params: SetSessionTitleRequest) -> SetSessionTitleResponse:
        """Give a session a title of one line, whoever has it open."""
        crow, title = await self._agent.crow(), to_line(" ".join(params.title.split()))
        if not title:
            raise RpcError(INVALID_PARAMS, "Unusable title", details="The title is empty.")
        title = shorten_line(title, MAX_TITLE)
        await find_stored(params.session_id, crow.set_title(params.session_id, title))
        return SetSessionTitleResponse(title=title)

    async def get_session_status(self, params: SessionStatusRequest) -> SessionStatusResponse:
        """Tell whether a session is open in this process, or stored."""
        crow, id = await self._agent.crow(), params.session_id
        if id in crow.sessions:
            return SessionStatusResponse(status="open")
        await find_stored(id, crow.find(id))
        return SessionStatusResponse(status="saved")
