"""Descriptions of tools by prompts of the user, of a trusted project, and of a stored version."""

import json
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_agent.settings.project_files import take_snapshot
from crow_agent.settings.trust import TrustedFolders
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    LoadSessionRequest,
    NoticeCapabilities,
    NoticeUpdate,
)
from crow_core.app import Crow
from crow_core.messages.notes import Notes
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import find_quirks
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect
from crow_persistence.database import Database
from crow_persistence.prompt_versions import list_renders

pytestmark = pytest.mark.anyio
NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def describe(folder: Path, tool: str, text: str) -> None:
    """Write a description to a folder of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"tool.{tool}.md.j2").write_text(text)


async def make_crow(tmp_path: Path, model: Any = None) -> Crow:
    env = {"CROW_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    return await build(env, models={"m": model or ScriptedModel([Reply("Hello.")] * 3)})


def find_tool(request: dict[str, Any], name: str) -> dict[str, Any]:
    (function,) = [tool["function"] for tool in request["tools"] if tool["function"]["name"] == name]
    return function


async def ask(crow: Crow, folder: Path, session: str = "") -> tuple[str, list[str], list[Notes]]:
    """Send a prompt; return the id of the session, its warnings, and the render markers of tools in its log."""
    async with connect(crow, capabilities=NOTICES) as editor:
        if session:
            await editor.request("session/load", LoadSessionRequest(session_id=session, cwd=str(folder)))
        else:
            session = (await editor.new_session(str(folder))).session_id
        await editor.prompt(session, "Hi.")
        log = crow.sessions[session].log
        renders = [notes for entry in log if (notes := entry.get("crow", {})).get("purpose") == "tool"]
        return session, [str(notice.title) for notice in editor.of(NoticeUpdate)], renders


async def test_users_description_is_sent_with_the_same_schema_and_its_version_is_in_the_log(
    tmp_path: Path, project: Path
) -> None:
    plain, described = ScriptedModel([Reply("Hello.")]), ScriptedModel([Reply("Hello.")])
    await ask(await make_crow(tmp_path, plain), project)
    describe(tmp_path / "home" / "prompts", "terminal", "Run one command.\n")
    session, notices, renders = await ask(await make_crow(tmp_path, described), project)
    before, after = find_tool(plain.requests[0], "terminal"), find_tool(described.requests[0], "terminal")
    assert after == {**before, "description": "Run one command."}
    assert [tool["function"]["name"] for tool in plain.requests[0]["tools"]] == [
        tool["function"]["name"] for tool in described.requests[0]["tools"]
    ]
    assert [(one.get("prompt"), one.get("text")) for one in renders] == [("tool.terminal", "Run one command.")]
    assert notices == []
    with Database(f"sqlite:///{tmp_path}/home/crow.db", tmp_path / "home").begin_read() as connection:
        assert [one.session for one in list_renders(connection, "tool.terminal@1")] == [session]


async def test_stored_session_keeps_its_tools_and_renders_no_description_twice(tmp_path: Path, project: Path) -> None:
    describe(tmp_path / "home" / "prompts", "terminal", "Run one command.")
    session, _, _ = await ask(await make_crow(tmp_path), project)
    _, notices, renders = await ask(await make_crow(tmp_path), project, session)
    assert (len(renders), notices) == (1, [])


async def test_projects_description_counts_only_in_a_trusted_folder(tmp_path: Path, project: Path) -> None:
    describe(project / ".crow" / "prompts", "terminal", "The project's words.")
    model = ScriptedModel([Reply("Hello.")] * 2)
    crow = await make_crow(tmp_path, model)
    await ask(crow, project)
    TrustedFolders(tmp_path / "home").add(take_snapshot(project, keep=True))
    await ask(await make_crow(tmp_path, model), project)
    untrusted, trusted = (find_tool(request, "terminal")["description"] for request in model.requests)
    assert "The project's words." not in untrusted
    assert trusted == "The project's words."


async def test_description_of_a_tool_that_does_not_exist_is_named_once(tmp_path: Path, project: Path) -> None:
    for name in ("termnial", "run"):  # `run` is a tool for small models
        describe(tmp_path / "home" / "prompts", name, "Words.")
    crow = await make_crow(tmp_path)
    async with connect(crow, capabilities=NOTICES) as editor:
        session = await editor.new_session(str(project))
        for _ in range(2):
            await editor.prompt(session.session_id, "Hi.")
        said = [str(notice.title) for notice in editor.of(NoticeUpdate)]
    assert said == ["tool.termnial.md.j2 is not used: there is no such tool in this session."]


async def test_tool_for_small_models_is_described_too(tmp_path: Path, project: Path) -> None:
    describe(tmp_path / "home" / "prompts", "run", "Run a command.")
    (tmp_path / "home" / "prompts" / "small.md.j2").write_text("You are small.")
    async with ScriptedServer([Reply("Hello.")]) as server:
        name = "qwen2.5:1.5b"
        model = ChatModel(name=name, base_url=server.url, quirks=find_quirks(server.url, name, {}))
        await ask(await make_crow(tmp_path, model), project)
        (request,) = server.requests
    assert find_tool(request, "run")["description"] == "Run a command."
    assert request["messages"][0]["content"].startswith("You are small.")


async def test_description_that_is_no_template_ends_the_turn_with_a_sentence(tmp_path: Path, project: Path) -> None:
    describe(tmp_path / "home" / "prompts", "terminal", "Run {{ what }}.")
    crow = await make_crow(tmp_path)
    with pytest.raises(Exception, match=r"The template of the prompt 'tool.terminal' is wrong: 'what' is undefined"):
        await ask(crow, project)


async def test_description_changes_in_an_open_session_with_its_prompt(tmp_path: Path, project: Path) -> None:
    describe(tmp_path / "home" / "prompts", "terminal", "First.")
    await ask(await make_crow(tmp_path), project)
    describe(tmp_path / "home" / "prompts", "terminal", "Second.")
    model = ScriptedModel([Reply("Hello.")] * 2)
    crow = await make_crow(tmp_path, model)
    async with connect(crow) as editor:
        session = (await editor.new_session(str(project))).session_id
        await editor.prompt(session, "Hi.")
        await editor.prompt(session, "/prompts use tool.terminal@1")
        await editor.prompt(session, "Hi.")
    assert [find_tool(request, "terminal")["description"] for request in model.requests] == ["Second.", "First."]
    assert json.dumps(model.requests[0]["messages"][0]) == json.dumps(model.requests[1]["messages"][0])
