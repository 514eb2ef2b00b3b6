"""Fixtures for all tests of crow-skills."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.schema import ClientCapabilities, TextBlock, UserMessageChunk
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.mcp.server import Server
from crow_core.messages.message import marker_kind
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect

Request = dict[str, Any]


@dataclass
class Talk:
    """An editor in a session of an app."""

    editor: Editor
    session: Session
    model: ScriptedModel

    async def say(self, text: str) -> str:
        return (await self.editor.prompt(self.session.id, text)).stop_reason

    @property
    def system(self) -> str:
        return self.model.requests[-1]["messages"][0]["content"]

    @property
    def last_content(self) -> Any:
        """The content of the last message of the last request."""
        return self.model.requests[-1]["messages"][-1]["content"]

    @property
    def replayed(self) -> list[str]:
        """The text of the user's messages in a replay of the session."""
        contents = [update.content for update in replay(self.session.log, "/") if isinstance(update, UserMessageChunk)]
        return [block.text for block in contents if isinstance(block, TextBlock)]

    def renders(self, purpose: str) -> list[dict[str, Any]]:
        """Return the renders in the log for a purpose."""
        notes = [entry.get("crow", {}) for entry in self.session.log if marker_kind(entry) == "render"]
        return [render for render in notes if render["purpose"] == purpose]


Talking = Callable[..., AbstractAsyncContextManager[Talk]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    return folder


@pytest.fixture
def app() -> Callable[..., Crow]:
    """Makes an app with crow's own tools whose model gives the scripted replies, or always \"Good.\"."""

    def make(*replies: Reply) -> Crow:
        server = Server(
            "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
        )
        return Crow(ScriptedModel(replies or (lambda request: Reply("Good."))), servers=[server])

    return make


@pytest.fixture
def talk(project: Path) -> Talking:
    """Opens a session in the project, or in a folder of it."""

    @asynccontextmanager
    async def talk(
        crow: Crow, cwd: Path = project, *, capabilities: ClientCapabilities | None = None, roots: tuple[str, ...] = ()
    ) -> AsyncGenerator[Talk]:
        async with connect(crow, capabilities=capabilities) as editor:
            opened = await editor.new_session(str(cwd))
            session, model = crow.sessions[opened.session_id], crow.models["scripted"]
            session.folders.roots += roots
            assert isinstance(model, ScriptedModel)
            yield Talk(editor, session, model)

    return talk
