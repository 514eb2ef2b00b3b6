"""The trace context from the client through the agent to its tools."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.telemetry import telemetry
from crow_permissions.extension import permissions
from fastmcp import Context, FastMCP
from opentelemetry import context, trace

pytestmark = pytest.mark.anyio

ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{ID}-{PARENT}-01", "tracestate": "vendor=x", "baggage": "user=ada"}


class Noted(trace.NonRecordingSpan):
    """A span that records its attributes and its end."""

    def __init__(self, name: str, parent: Any, number: int, attributes: Any) -> None:
        super().__init__(trace.SpanContext(parent.trace_id or number, number, False, trace.TraceFlags(1)))
        self.name, self.parent, self.attributes = name, parent.span_id, dict(attributes)
        self.kind: Any = None
        self.ended, self.failed = False, False

    def set_attributes(self, attributes: Any) -> None:
        self.attributes |= attributes

    def set_status(self, status: Any, description: Any = None) -> None:
        self.failed = True

    def end(self, end_time: Any = None) -> None:
        self.ended = True


class Notes(trace.NoOpTracer):
    """A tracer that records its spans."""

    def __init__(self) -> None:
        self.spans: list[Noted] = []

    def start_span(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, name: str, context: Any = None, kind: Any = None, attributes: Any = None, **_: Any
    ) -> Noted:
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append(Noted(name, parent, len(self.spans) + 1, attributes))
        self.spans[-1].kind = kind
        return self.spans[-1]


class Tools:
    """A server that records the `_meta` of its calls."""

    def __init__(self) -> None:
        self.metas: list[dict[str, Any]] = []

    def server(self, *, built_in: bool) -> Server:
        return Server("tools", self.make, built_in=built_in)

    def make(self) -> Any:
        mcp = FastMCP("tools")

        @mcp.tool
        def look(context: Context) -> str:  # pyright: ignore[reportUnusedFunction]
            request = context.request_context
            self.metas.append(dict((request and request.meta) or {}))
            return "seen"

        return mcp


def model(name: str) -> ScriptedModel:
    return ScriptedModel([Reply(tool_calls=[Use(name=name, arguments={})]), Reply("Done.")])


@asynccontextmanager
async def session_of(crow: Crow) -> AsyncGenerator[tuple[RawClient, str]]:
    async with connect_raw(crow) as wire:
        yield wire, (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]


async def prompt(wire: RawClient, session: str, meta: Any = None) -> dict[str, Any]:
    said = [{"type": "text", "text": "go"}]
    return await wire.ask("session/prompt", {"sessionId": session, "prompt": said, "_meta": meta})


@pytest.mark.parametrize(("built_in", "name"), [(True, "look"), (False, "tools_look")])
async def test_every_server_gets_the_trace_and_only_built_in_ones_get_more(built_in: bool, name: str):
    tools = Tools()
    crow = Crow(model(name), servers=[tools.server(built_in=built_in)]).use(permissions, mode="yolo")
    async with session_of(crow) as (wire, session):
        await prompt(wire, session, {**CONTEXT, "editor": "private"})
    (meta,) = tools.metas
    assert {key: meta.get(key) for key in CONTEXT} == CONTEXT
    assert "editor" not in meta
    assert any(key.startswith("crow/") for key in meta) == built_in


@pytest.mark.parametrize(
    "meta",
    [
        None,
        [],
        {"traceparent": 7, "baggage": None},
        {"traceparent": "00-0-0-00", "tracestate": "vendor=x"},
        {"traceparent": f"ff-{ID}-{PARENT}-01"},
        {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
        {"baggage": "a\r\nX-Evil: 1"},
        {"baggage": "a" * 10_000},
    ],
)
async def test_malformed_trace_is_not_sent(meta: Any):
    tools = Tools()
    crow = Crow(model("tools_look"), servers=[tools.server(built_in=False)]).use(permissions, mode="yolo")
    async with session_of(crow) as (wire, session):
        assert (await prompt(wire, session, meta))["result"] == {"stopReason": "end_turn"}
    (seen,) = tools.metas
    assert not seen.keys() & CONTEXT.keys()


async def test_the_next_prompt_has_its_own_trace():
    tools = Tools()
    call = Reply(tool_calls=[Use(name="tools_look", arguments={})])
    crow = Crow(ScriptedModel([call, Reply("1"), call, Reply("2")]), servers=[tools.server(built_in=False)])
    async with session_of(crow.use(permissions, mode="yolo")) as (wire, session):
        await prompt(wire, session, CONTEXT)
        await prompt(wire, session)
    first, second = tools.metas
    assert first["traceparent"] == CONTEXT["traceparent"]
    assert "traceparent" not in second


async def test_turn_model_calls_and_tool_calls_are_spans_of_the_clients_trace():
    tools, notes = Tools(), Notes()
    crow = Crow(model("tools_look"), servers=[tools.server(built_in=False)])
    async with session_of(crow.use(telemetry, tracer=notes).use(permissions, mode="yolo")) as (wire, session):
        await prompt(wire, session, CONTEXT)
    turn, chat, tool, again = notes.spans
    assert [span.name for span in notes.spans] == [
        "invoke_agent crow",
        "chat scripted",
        "execute_tool tools_look",
        "chat scripted",
    ]
    assert turn.get_span_context().trace_id == int(ID, 16)
    assert turn.parent == int(PARENT, 16)
    assert {chat.parent, tool.parent, again.parent} == {turn.get_span_context().span_id}
    assert all(span.ended and not span.failed for span in notes.spans)
    assert all(span.attributes["gen_ai.conversation.id"] == session for span in notes.spans)
    assert [span.kind.name for span in notes.spans] == ["INTERNAL", "CLIENT", "INTERNAL", "CLIENT"]
    assert chat.attributes["gen_ai.provider.name"] == "openai"
    assert chat.attributes["gen_ai.request.model"] == "scripted"
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert chat.attributes["gen_ai.usage.input_tokens"] > 0
    assert tool.attributes["gen_ai.tool.name"] == "tools_look"
    (meta,) = tools.metas
    assert meta["traceparent"] == f"00-{ID}-{tool.get_span_context().span_id:016x}-01"
    assert meta["baggage"] == CONTEXT["baggage"]
    assert trace.get_current_span(context.get_current()) is trace.INVALID_SPAN


async def test_model_call_beside_the_turn_ends_no_span_of_the_turn():
    notes = Notes()
    replies = [Reply("A bird.", usage={"prompt_tokens": 1}), Reply("Done.", usage={"prompt_tokens": 2})]
    crow = Crow(ScriptedModel(replies)).use(telemetry, tracer=notes)

    @crow.before_model
    async def ask(request: Any, session: Session) -> None:
        await session.ask_model({"messages": []}, "name")

    async with session_of(crow) as (wire, session):
        await prompt(wire, session)
    _, chat = notes.spans
    assert chat.attributes["gen_ai.usage.input_tokens"] == 2


async def test_span_ends_with_every_end_of_a_turn():
    notes = Notes()
    broken = ScriptedModel([Reply("Hel", error=ModelError("It broke."))])
    async with session_of(Crow(broken).use(telemetry, tracer=notes)) as (wire, session):
        assert "error" in await prompt(wire, session)
    assert [(span.name, span.ended, span.failed) for span in notes.spans] == [
        ("invoke_agent crow", True, True),
        ("chat scripted", True, True),
    ]


async def test_span_of_a_failed_tool_call_has_an_error():
    notes, tools = Notes(), Tools()
    crow = Crow(model("tools_look"), servers=[tools.server(built_in=False)]).use(telemetry, tracer=notes)

    @crow.before_tool
    def fail(session: Session, call: Any) -> Any:
        raise RuntimeError("no")

    async with session_of(crow) as (wire, session):
        assert "error" in await prompt(wire, session)
    tool = notes.spans[2]
    assert (tool.name, tool.ended, tool.failed) == ("execute_tool tools_look", True, True)


def test_no_module_imports_opentelemetry_by_itself():
    import crow_core

    files = Path(str(crow_core.__file__)).parent.rglob("*.py")
    lines = [line for file in files for line in file.read_text("utf-8").splitlines() if "import" in line]
    assert not [line for line in lines if line.startswith(("import opentelemetry", "from opentelemetry"))]
