"""Conversations about commands in the sandbox: the real terminal tool, real overlays, and a person who answers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from crow_agent.builtin_tools import make_tool_server
from crow_core.acp.client import OPTION_NAMES
from crow_core.acp.schema import (
    BlockContent,
    ClientCapabilities,
    DiffContent,
    RequestPermissionRequest,
    RequestPermissionResponse,
    TextBlock,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.undo import undo
from crow_permissions.extension import permissions
from crow_permissions.review import ReviewSettings
from crow_sandbox.sandbox import Sandbox

from crow_testing.skipping import unable


@pytest.fixture
async def sandbox(tmp_path: Path) -> ReviewSettings:
    folder = tmp_path / "data" / "sandbox"
    standing = await Sandbox(folder).prove("review")
    if standing.level != "review":
        unable(standing.says)
    return ReviewSettings(folder)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("one\n")
    return folder


def run(command: str, **more: Any) -> Use:
    return {"name": "terminal", "arguments": {"command": command, **more}}


def in_turn(*uses: Use) -> ScriptedModel:
    """Make a model that makes one of these tool calls in each turn."""
    return ScriptedModel([reply for use in uses for reply in (Reply(tool_calls=[use]), Reply("Done."))])


def one_after_another(*uses: Use) -> ScriptedModel:
    """Make a model that makes these tool calls in one turn."""
    return ScriptedModel([*(Reply(tool_calls=[use]) for use in uses), Reply("Done.")])


def make_crow(model: ScriptedModel, sandbox: ReviewSettings | None, **options: Any) -> Crow:
    crow = Crow(model)
    crow.servers.append(make_tool_server(crow))
    crow.use(permissions, sandbox=sandbox, **options)
    crow.use(commands).use(undo).use(mask_secrets, known=["5ecret-value"])
    return crow


def get_answer(model: ScriptedModel) -> str:
    """Return the last result that the model received."""
    return [each["content"] for each in model.requests[-1]["messages"] if each["role"] == "tool"][-1]


def get_text(question: RequestPermissionRequest) -> str:
    (block,) = [each for each in cast(Any, question.tool_call.content) if isinstance(each, BlockContent)]
    return cast(TextBlock, block.content).text


def get_diffs(question: RequestPermissionRequest) -> list[DiffContent]:
    return [each for each in cast(Any, question.tool_call.content) if isinstance(each, DiffContent)]


def decisions(session: Session) -> list[tuple[str, str, list[str]]]:
    notes: list[Any] = [entry.get("crow", {}) for entry in session.log]
    return [(note["is"], note["by"], note.get("changed", [])) for note in notes if note.get("kind") == "decision"]


class Person(Editor):
    """An editor that may give one answer to every question about a permission."""

    fixed: RequestPermissionResponse | None = None

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        answer = await super().on_permission(question)
        return self.fixed or answer


class ReviewedConversation:
    """A session with a scripted model, and an editor that answers the questions."""

    def __init__(self, crow: Crow, model: ScriptedModel, editor: Editor, session_id: str) -> None:
        self.crow, self.model, self.editor, self.id = crow, model, editor, session_id

    @property
    def session(self) -> Session:
        return self.crow.sessions[self.id]

    @property
    def questions(self) -> list[RequestPermissionRequest]:
        return self.editor.questions

    async def prompt(self, text: str = "go") -> str:
        """Run a turn, and return the last result that the model received."""
        await self.editor.prompt(self.id, text)
        return get_answer(self.model)


@asynccontextmanager
async def converse(
    project: Path,
    sandbox: ReviewSettings | None,
    model: ScriptedModel,
    permit: str | None = "allow_once",
    *,
    answer: RequestPermissionResponse | None = None,
    person: type["Person"] = Person,
    **options: Any,
) -> AsyncGenerator[ReviewedConversation]:
    crow = make_crow(model, sandbox, **options)
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = person(ours, permit=permit)
    editor.fixed = answer
    try:
        async with editor.serving():
            await editor.initialize("editor", ClientCapabilities(terminal=True, meta=OPTION_NAMES))
            opened = await editor.new_session(str(project))
            yield ReviewedConversation(crow, model, editor, opened.session_id)
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
