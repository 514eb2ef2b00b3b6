"""Control characters in texts of models, tools and servers do not reach the client, which may be a terminal."""

import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crow_core.acp.decoding import to_raw
from crow_core.acp.schema import (
    ClientCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    ElicitationSchema,
    FileSystemCapabilities,
    RequestPermissionRequest,
    StringPropertySchema,
)
from crow_core.agent.client_files import ClientWorkspace
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.text import CONTROL_CHARACTERS, clean_json, show_invisible
from crow_extensions.commands import commands
from crow_extensions.mcp import mcp
from crow_extensions.plan import plan
from crow_extensions.resources import resources
from crow_permissions.extension import permissions
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents

pytestmark = pytest.mark.anyio

CONTROLS = [chr(code) for code in CONTROL_CHARACTERS if chr(code) not in "\n\t"]
EVIL = "".join(CONTROLS) + "\x1b]52;c;aGk=\x07\x1b]0;title\x1b\\\x1b[2J"
WILD = st.text(st.one_of(st.sampled_from([*CONTROLS, *'\n\t"\\u0123[]{}:,é😀\u202e']), st.characters()))


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, with the names of members."""
    match value:
        case str():
            yield value
        case list():
            yield from (text for one in value for text in strings(one))
        case dict():
            yield from (text for pair in value.items() for one in pair for text in strings(one))
        case _:
            pass


def find_controls(value: Any) -> set[str]:
    return {letter for text in strings(value) for letter in text if letter in CONTROLS}


@given(st.recursive(WILD | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(WILD, inner), max_leaves=20))
def test_cleaned_json_has_no_controls_and_keeps_the_rest(value: Any):
    for text in (
        json.dumps(value).encode(),
        json.dumps(value, ensure_ascii=False).encode(errors="replace"),
        msgspec.json.encode(json.loads(json.dumps(value).encode().decode("utf-8", "replace")))
        if "\\ud" not in json.dumps(value)
        else b"{}",
    ):
        cleaned = json.loads(clean_json(text))
        assert not find_controls(cleaned)
        before = "".join(strings(json.loads(text))).translate(dict.fromkeys(map(ord, CONTROLS)))
        after = "".join(strings(cleaned)).replace("\ufffd", "")
        assert re.sub(r"\s", "", after) == re.sub(r"\s", "", before.replace("\ufffd", ""))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\nb", "a\nb"),
        ("10%\r20%", "10%\n20%"),
        ("split\r", "split"),
        ("a\tb\n", "a\tb\n"),
        ("\x1b[31mred", "\ufffd[31mred"),
        ("C:\\u001b\\new", "C:\\u001b\\new"),
        ("\\\x1b", "\\\ufffd"),
        ("a\u202eb", "a\ufffdb"),
        ("שלום\u200f é 😀", "שלום\u200f é 😀"),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_characters_are_replaced_in_any_spelling(text: str, shown: str, ascii_only: bool):
    assert json.loads(clean_json(json.dumps({text: text}, ensure_ascii=ascii_only).encode())) == {shown: shown}


def test_every_control_and_format_character_that_reorders_or_controls_is_known():
    controls = {chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cc"}
    assert controls - set("\n\t") <= set(CONTROLS)
    reordering = {
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.bidirectional(chr(code)) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    }
    assert reordering <= set(CONTROLS)


def hostile() -> FastMCP:
    server = FastMCP(f"evil{EVIL}", instructions=EVIL)

    @server.tool(name="talk", title=EVIL, description=EVIL)
    async def talk(context: Context, text: str) -> ToolResult:
        await context.report_progress(1, 2, EVIL)
        resource = TextResourceContents(uri="x://y", text=EVIL)
        return ToolResult(
            [
                TextContent(type="text", text=EVIL),
                EmbeddedResource(type="resource", resource=resource),
                ResourceLink(type="resource_link", uri="x://y", name=EVIL, title=EVIL, description=EVIL),
            ]
        )

    @server.prompt(name="ask", title=EVIL, description=EVIL)
    def ask(word: str) -> str:
        return EVIL

    server.resource("x://list", name=EVIL, description=EVIL)(lambda: EVIL)
    return server


async def test_no_control_character_reaches_the_client(tmp_path: Path):
    uses: list[Any] = [
        {"name": "evil_talk", "arguments": {"text": EVIL}, "id": f"a{EVIL}"},
        {"name": f"nothing{EVIL}", "arguments": {EVIL: EVIL}},
        {"name": "evil_talk", "arguments": {"path": f"/x{EVIL}", "command": EVIL, "text": "x"}},
        {"name": "plan", "arguments": {"entries": [{"content": EVIL, "status": "pending"}]}},
        {"name": "mcp_resources", "arguments": {"uri": "x://list", "server": "evil"}},
        {"name": "mcp_resources", "arguments": {}},
    ]
    model = ScriptedModel([Reply(EVIL, reasoning=EVIL, tool_calls=uses), Reply(EVIL)])
    crow = Crow(model, servers=[Server("evil", hostile, shared=True)])
    crow.use(permissions).use(plan).use(commands).use(mcp).use(resources)
    lines: list[bytes] = []
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "@evil:no\x1bthing")
        await editor.prompt(session.session_id, "/help")
        (opened,) = crow.sessions.values()
        await opened.set_title(EVIL)
        for update in replay(opened.log, str(tmp_path)):
            await opened.update(update)
        await opened.say("over")
        await editor.until(lambda editor: "over" in editor.text)
        for shown in [*editor.updates, *editor.questions]:
            lines.append(msgspec.json.encode(shown, enc_hook=to_raw))
            assert not find_controls(json.loads(lines[-1])), shown
        assert {json.loads(line).get("sessionUpdate") for line in lines} >= {
            *("agent_message_chunk", "agent_thought_chunk", "user_message_chunk", "tool_call", "tool_call_update"),
            *("plan", "available_commands_update", "session_info_update"),
        }
        assert any(isinstance(question, RequestPermissionRequest) for question in editor.questions)
        assert any("\x1b]52" in str(entry) or "\\x1b]52" in str(entry) for entry in opened.log)  # the log is exact


async def test_form_is_answered_with_the_choices_that_were_shown(tmp_path: Path):
    can = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
    crow = Crow(ScriptedModel([]))
    async with connect(crow, capabilities=can) as editor:
        await editor.new_session(str(tmp_path))
        (opened,) = crow.sessions.values()
        editor.answer = CreateElicitationResponse(action="accept", content={"answer": "red\ufffd"})
        form = ElicitationSchema(properties={"answer": StringPropertySchema(enum=["red\x1b", "blue"])})
        answer = await opened.user.elicit(EVIL, form=form)
        assert answer.content == {"answer": "red\ufffd"}
        assert not find_controls(json.loads(msgspec.json.encode(editor.forms[0], enc_hook=to_raw)))


async def test_files_and_commands_reach_the_client_as_they_are(tmp_path: Path):
    able = ClientCapabilities(fs=FileSystemCapabilities(write_text_file=True))
    crow = Crow(ScriptedModel([]))
    async with connect(crow, capabilities=able) as editor:
        await editor.new_session(str(tmp_path))
        (opened,) = crow.sessions.values()
        await ClientWorkspace(opened, "").write_text(str(tmp_path / "a"), EVIL)
        (_, written) = editor.requests[-1]
        assert written.content == EVIL


def test_invisible_characters_are_shown_by_their_escapes():
    assert show_invisible("rm\u200b a\u202e\u00ad b\U000e0041 é 中") == "rm\\u200b a\\u202e\\u00ad b\\U000e0041 é 中"
