"""With every fault of an endpoint the user reads one sentence, the log stays valid, and the next prompt works."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import stamina
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    ImageBlock,
    NoticeCapabilities,
    NoticeUpdate,
    TextBlock,
    ToolCall,
)
from crow_core.app import Crow
from crow_core.mcp.toolbox import Server
from crow_core.messages.passes import view
from crow_core.models.chat_model import ChatModel
from crow_core.testing import Editor, Failure, Raw, Reply, ScriptedServer, connect
from crow_extensions.broken_replies import broken_replies
from crow_extensions.cut_prompts import cut_prompts
from crow_extensions.empty_replies import empty_replies
from crow_extensions.printed_calls import printed_calls
from crow_extensions.usage import usage
from crow_testing.chaos import CHAOS
from fastmcp import FastMCP
from pydantic import BaseModel

pytestmark = pytest.mark.anyio

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
TOOLS = FastMCP("demo")


class Pair(BaseModel):
    a: int
    b: int
    note: str | None = None


@TOOLS.tool
def add(pair: Pair) -> int:
    return pair.a + pair.b


def script(request: dict[str, Any]) -> Reply:
    """Answer as a correct server: with reasoning and two tool calls, then with their results."""
    if request["messages"][-1]["role"] == "tool":
        return Reply("Fünf und sieben, für 3 €.", reasoning="Both are there.")
    calls = [{"name": "demo_add", "arguments": {"pair": {"a": a, "b": a + 1}}} for a in (2, 3)]
    return Reply("Let me see. ", reasoning="Two sums.", tool_calls=calls)  # type: ignore[arg-type]


def flaws(messages: list[dict[str, Any]]) -> list[str]:
    """List the violations of the chat-completions format; some provider refused a request for each."""
    found: list[str] = []
    asked: list[str] = []
    seen: set[str] = set()
    for at, message in enumerate(messages):
        role, calls = message["role"], message.get("tool_calls") or []
        if role == "tool":
            if not asked or message["tool_call_id"] != asked.pop(0):
                found.append(f"{at}: an answer to nothing")
        elif asked:
            found.append(f"{at}: calls without an answer: {asked}")
        if role == "system" and at:
            found.append(f"{at}: a system message in the middle")
        if role == "user" and at and messages[at - 1]["role"] == "user":
            found.append(f"{at}: two user messages in a row")
        if role in ("user", "assistant") and not calls and not message["content"]:
            found.append(f"{at}: empty")
        for call in calls:
            if not isinstance(json.loads(call["function"]["arguments"]), dict):
                found.append(f"{at}: arguments that are no object")
            if not call["id"] or call["id"] in seen:
                found.append(f"{at}: id {call['id']!r}")
            seen.add(call["id"])
        asked = [call["id"] for call in calls] or asked
        if message.keys() - {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}:
            found.append(f"{at}: strange keys {sorted(message)}")
    return found + ([f"unanswered at the end: {asked}"] if asked else [])


def test_flaws_are_found() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "[]"}}
    wrong = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call], "crow": {}},
        {"role": "tool", "tool_call_id": "b", "content": "c"},
    ]
    assert len(flaws(wrong)) == 8


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


FATAL = {
    "error in mid stream": "reported an error: the model has crashed. Try again",
    "error instead of a stream": "reported an error: out of memory. Try again",
    "breaks off before the first token": "broke off",
    "breaks off after the first token": "broke off",
    "ends after the first token": "",  # text alone may be complete; a notice says so
    "half an event": "sent an event that is not JSON",
    "events of another kind": "sent something unknown",
    "empty reply": "answered nothing, twice",
    "empty body": "closed the connection without an answer",
    "web page": "it sent a web page instead of JSON; base_url usually ends in /v1",
    "429 for good": "is limiting requests (429): Rate limit reached",
    "500 for good": "has trouble (500): CUDA error: out of memory",
    "wrong key": "refused the key (401)",
    "unknown model": "has no model 'm'",
    "context too long": "maximum context length is 5 tokens",
    "refuses tools": "takes no tools (500): tools param requires --jinja flag. Start llama.cpp with --jinja",
}
"""Faults that end the turn with an error, and the text of the error."""

UNFINISHED = {"stops at half a call": "max_tokens", "calls printed as text": "end_turn"}
"""Faults after which the turn ends without an error, but with an incomplete answer."""


def crow_on(url: str) -> Crow:
    model = ChatModel(name="m", base_url=url, parameters={"temperature": 0})
    crow = Crow(model, servers=[Server("demo", lambda: TOOLS, shared=True)])
    for extension in (cut_prompts, usage, printed_calls, broken_replies, empty_replies):
        crow.use(extension)
    return crow


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "all at once" else []) for name in CHAOS]
)
async def test_session_survives_every_fault(name: str) -> None:
    calm, bad = False, CHAOS[name](script)

    def served(request: dict[str, Any]) -> Any:
        return script(request) if calm else bad(request)

    async with ScriptedServer(served) as server:
        crow = crow_on(server.url)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            outcome = await prompted(editor, session.session_id, "2 + 3, and 3 + 4?")
            asked = len(server.requests)
            check(name, outcome, editor)
            calm = True
            assert await prompted(editor, session.session_id, "And now?") == "end_turn"
            assert editor.text.endswith("Fünf und sieben, für 3 €.")
            (opened,) = crow.sessions.values()
            assert flaws([dict(message) for message in view(opened.log)]) == []
    assert 1 <= asked <= 12, "no endless asking"
    for request in server.requests:
        assert flaws(request["messages"]) == []


async def prompted(editor: Editor, id: str, words: str) -> str:
    """Prompt with an image; return the stop reason or the error."""
    picture = ImageBlock(data=PIXEL, mime_type="image/png")
    try:
        return (await editor.prompt(id, [TextBlock(text=words), picture])).stop_reason
    except RpcError as error:
        return (error.data or {})["details"]


def check(name: str, outcome: str, editor: Editor) -> None:
    if name in FATAL:
        assert FATAL[name] in outcome
        assert "\n" not in outcome
        assert outcome == "end_turn" or outcome.endswith((".", "?"))
    elif name in UNFINISHED:
        assert outcome == UNFINISHED[name]
        assert editor.of(ToolCall) == []
    else:
        assert outcome == "end_turn"
        if name != "only the closing think tag":  # the reasoning is recognized only after it was shown
            assert editor.text == "Let me see. Fünf und sieben, für 3 €.", "nothing is lost, nothing is said twice"
            assert "Two sums." in editor.thoughts
        assert [call.raw_input for call in editor.of(ToolCall)] == [{"pair": {"a": a, "b": a + 1}} for a in (2, 3)]
        assert [states[-1] for states in editor.calls().values()] == ["completed", "completed"]


NOTICES_OF = {
    "429 and then well": "is limiting requests",
    "500 and then well": "has trouble",
    "breaks off once": "broke off",
    "refuses stream options": "does not take stream_options",
    "refuses temperature": "does not take temperature",
    "refuses images": "cannot see images",
    "refuses schemas": "cannot read the",
    "refuses a system role": "knows no system role",
    "wants reasoning back": "wants earlier reasoning back",
    "calls printed as text": "--enable-auto-tool-choice",
    "cut prompt": "it cut the beginning",
    "ends after the first token": "may be cut short",
    "breaks off after the first token": "Asking the model to go on",
}
"""Faults that are reported, and a part of the notice."""


@pytest.mark.parametrize("name", NOTICES_OF)
async def test_fault_is_reported(name: str) -> None:
    async with (
        ScriptedServer(CHAOS[name](script)) as server,
        connect(crow_on(server.url), capabilities=NOTICES) as editor,
    ):
        session = await editor.new_session("/")
        long = "Please add these numbers for me, one after the other. " * 200
        await prompted(editor, session.session_id, long)
        titles = " ".join(str(notice.title) for notice in editor.of(NoticeUpdate))
    assert NOTICES_OF[name] in titles


async def test_every_fault_is_named_and_gives_an_answer() -> None:
    assert not FATAL.keys() - CHAOS.keys()
    assert not NOTICES_OF.keys() - CHAOS.keys()
    for chaos in CHAOS.values():
        answer: Any = chaos(script)({"messages": [{"role": "user", "content": "hi"}], "stream_options": {}})
        reply = await answer if hasattr(answer, "__await__") else answer
        assert isinstance(reply, Reply | Raw | Failure)
