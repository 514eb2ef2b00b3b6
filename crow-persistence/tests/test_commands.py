"""The commands that read the store, as a client sends them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.schema import LoadSessionRequest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.session.prompts import Prompt
from crow_core.testing import Editor, Reply, ScriptedCall, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.prompt_versions import list_stats
from crow_persistence.store_commands import MAX_LENGTH
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio


def app(database: Database, model: ScriptedModel) -> Crow:
    url = database.url.render_as_string(hide_password=False)
    return Crow(model).use(persistence, url=url, folder=database.folder).use(commands)


async def test_fork_command_copies_the_session_and_both_continue(database: Database):
    model = ScriptedModel(lambda request: Reply("Well."))
    async with connect(app(database, model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/fork")
        assert editor.text == "There is nothing to fork yet."
        await editor.prompt(session.session_id, "one")
        await editor.prompt(session.session_id, "/fork")
        id = editor.text.rpartition("Session ")[2].split()[0]
        await editor.prompt(session.session_id, "two")
        await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        await editor.prompt(id, "three")
    said = [[m["content"] for m in request["messages"] if m["role"] == "user"] for request in model.requests]
    assert said == [["one"], ["one", "two"], ["one", "three"]]


@pytest.mark.parametrize(("words", "suffix"), [("", ".md"), ("html", ".html"), ("jsonl", ".jsonl"), ("atif", ".json")])
async def test_export_command_writes_a_file_without_secrets(
    database: Database, tmp_path: Path, words: str, suffix: str
):
    key = "sk-" + "a1B2c3D4" * 5
    async with connect(app(database, ScriptedModel([Reply("I saw it.")]))) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, f"My key is {key}")
        await editor.prompt(session.session_id, f"/export {words}")
    file = tmp_path / f"crow-{session.session_id[:8]}{suffix}"
    assert f"Written to `{file}`. Likely secrets masked: " in editor.text
    written = file.read_text()
    assert "I saw it." in written
    assert key not in written


async def test_export_command_reports_its_failures(database: Database, tmp_path: Path):
    async with connect(app(database, ScriptedModel([Reply("Hello.")]))) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "/export")
        assert editor.text == "There is nothing to export yet."
        await editor.prompt(session.session_id, "hi")
        await editor.prompt(session.session_id, "/export pdf")
        assert "There is no format 'pdf'. Choose one of: markdown, jsonl, html, atif." in editor.text
        (tmp_path / f"crow-{session.session_id[:8]}.md").mkdir()
        await editor.prompt(session.session_id, "/export")
    assert editor.text.endswith("cannot be written: Is a directory.")


def full_app(database: Database, model: ScriptedModel, **system: Any) -> Crow:
    crow = Crow(model, **system)
    url = database.url.render_as_string(hide_password=False)
    crow.use(persistence, url=url, folder=database.folder).use(mask_secrets, known=[SECRET])
    return crow.use(usage).use(permissions, mode="yolo").use(commands)


DEMO: FastMCP[Any] = FastMCP("demo")


@DEMO.tool
def echo(text: str) -> str:
    """Return a text."""
    return text


SECRET = "0123-very-secret-9876"


async def test_calls_shows_the_exact_request_and_hides_secrets(database: Database):
    model = ScriptedModel(lambda request: Reply("Well.", usage={"prompt_tokens": 1000, "completion_tokens": 7}))
    likely = "sk-" + "a1B2c3D4" * 5
    async with connect(full_app(database, model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/calls")
        assert editor.text == "The model has not been asked in this session."
        await editor.prompt(session.session_id, f"one ``` {SECRET} and {likely}")
        listed = await ask(editor, session.session_id, "/calls")
        shown = await ask(editor, session.session_id, "/calls last")
        id = next(line for line in listed.splitlines() if line.startswith("| 0") or "turn" in line).split()[1]
        assert shown == await ask(editor, session.session_id, f"/calls {id}")
        assert "There is no model call" in await ask(editor, session.session_id, "/calls nosuch")
        await editor.prompt(session.session_id, "two")
    assert "1,000" in listed
    assert shown.startswith("The request of ")
    body = json.loads(shown.partition("json\n")[2].rpartition("\n")[0])
    assert body["messages"][-1]["content"] == "one ``` [secret] and [redacted]"
    assert SECRET not in shown
    assert [m["content"] for m in model.requests[-1]["messages"]][1:] == [
        f"one ``` [secret] and {likely}",
        "Well.",
        "two",
    ]


async def ask(editor: Editor, session: str, prompt: str) -> str:
    """Send a prompt and return the text of its answer alone."""
    before = len(editor.text)
    await editor.prompt(session, prompt)
    return editor.text[before:]


async def test_a_long_request_is_cut_in_its_middle(database: Database):
    async with connect(full_app(database, ScriptedModel(lambda request: Reply("x")))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "word " * 20_000 + "the end")
        shown = await ask(editor, session.session_id, "/calls last")
    assert len(shown) <= MAX_LENGTH
    assert "characters left out" in shown
    assert "the end" in shown
    assert shown.endswith("\n```")


async def test_search_finds_messages_of_all_sessions(database: Database):
    async with connect(full_app(database, ScriptedModel(lambda request: Reply("Use podman | docker.")))) as editor:
        other = await editor.new_session("/tmp")
        await editor.prompt(other.session_id, "How do I start the *blue* whale?")
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        found = await ask(editor, session.session_id, "/search blue whale")
        nothing = await ask(editor, session.session_id, "/search nosuchword")
        assert "Name the words" in await ask(editor, session.session_id, "/search")
    assert "**blue**" in found
    assert f"session {other.session_id[:8]} in /tmp" in found
    assert nothing == "No stored message holds all of these words: nosuchword."


async def test_audit_lists_decisions(database: Database):
    call = ScriptedCall(name="demo_echo", arguments={"text": "x"})
    crow = full_app(database, ScriptedModel([Reply(tool_calls=[call]), Reply("Done.")]))
    crow.servers.append(Server("demo", lambda: DEMO, shared=True))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        assert await ask(editor, session.session_id, "/audit") == "Nothing has been decided in this session yet."
        await editor.prompt(session.session_id, "go")
        listed = await ask(editor, session.session_id, "/audit")
        assert "not understood" in await ask(editor, session.session_id, "/audit nosuch")
    assert re.search(r"^- #\d+, [-\d]+ [:\d]+, \*\*allow\*\* demo\\_echo.* · by \w", listed, re.M)
    assert "**completed** demo\\_echo" in listed


async def test_prompts_tells_the_version_and_what_changed_in_it(database: Database):
    for text in ("You are a crow.\nBe short.", "You are a crow.\nBe kind."):
        crow = full_app(database, ScriptedModel([Reply("Caw.")]), system=Prompt("system", text))
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            assert "has been sent" in await ask(editor, session.session_id, "/prompts")
            await editor.prompt(session.session_id, "hi")
            told = await ask(editor, session.session_id, "/prompts")
    assert "**system**, version 2, known since " in told
    assert "-Be short.\n+Be kind." in told


async def test_usage_of_a_loaded_session_counts_what_was_before(database: Database):
    model = ScriptedModel(
        lambda request: Reply(
            "Well.",
            usage={"prompt_tokens": 1000, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 900}},
        )
    )
    async with connect(full_app(database, model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "one")
    async with connect(full_app(database, model)) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id=session.session_id, cwd="/", mcp_servers=[]))
        before = await ask(editor, session.session_id, "/usage")
        await editor.prompt(session.session_id, "two")
        await editor.prompt(session.session_id, "three")
        after = await ask(editor, session.session_id, "/usage")
    assert "1 model calls: 1,000 tokens in (900 from the server's cache, 90%), 7 out." in before
    assert "3 model calls: 3,000 tokens in" in after
    assert re.search(r"`█+░*` \d\d% of the last request is the beginning of the one before it\.", after)
    assert "`█████████░` 90% came from the server's cache: 900 of 1,000 tokens." in after


async def test_the_last_rating_of_an_answer_counts_for_its_prompt_version(database: Database):
    async with connect(app(database, ScriptedModel([Reply("One."), Reply("Two.")]))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "/good")
        assert editor.text == "There is no answer to rate yet."
        for words in ("one", "/good", "/bad too short", "two", "/good"):
            await editor.prompt(session.session_id, words)
    with database.begin_read() as connection:
        (stats,) = list_stats(connection)
    assert (stats["sessions"], stats["calls"], stats["good"], stats["bad"]) == (1, 2, 1, 1)
