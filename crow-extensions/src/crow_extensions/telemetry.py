"""Trace turns, model calls and tool calls as OpenTelemetry spans, named as its conventions for generative AI say.

Spans are made only where OpenTelemetry is loaded already (`opentelemetry-instrument crow acp`, or a program that uses
crow): this module never loads it by itself. No span holds text of the conversation.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.trace import TRACE

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

TURN, CHAT = "turn", "chat"

SPANS = StateKey("spans", dict[str, "Span"])
"""The open spans of a session: TURN, CHAT, or the id of a tool call to its span."""


def telemetry(crow: Crow, *, tracer: "Tracer | None" = None) -> None:
    """Trace sessions with a tracer, the one of the process if none is given.

    Use it before other extensions, so that what they do in a turn becomes part of the turn's span.
    """

    def start(session: Session, key: str, name: str, operation: str, **more: Any) -> None:
        if tracer is None and "opentelemetry.trace" not in sys.modules:
            return
        from opentelemetry import context, propagate, trace  # never at the top: see the module

        used_tracer = tracer or trace.get_tracer("crow")
        parent = propagate.extract(TRACE.get()) if key == TURN else None
        attributes = {"gen_ai.operation.name": operation, "gen_ai.conversation.id": session.id, **more}
        kind = trace.SpanKind.CLIENT if key == CHAT else trace.SpanKind.INTERNAL
        session.state[SPANS][key] = span = used_tracer.start_span(name, parent, kind, attributes)
        if key == CHAT:
            return
        # Everything that the current task does from here on is inside the span; the task ends with it.
        inside = trace.set_span_in_context(span, parent)
        context.attach(inside)
        carrier = dict(TRACE.get())
        propagate.inject(carrier, inside)
        TRACE.set(carrier)

    def end(session: Session, key: str, attributes: Mapping[str, Any], error: str = "") -> None:
        if (span := session.state[SPANS].pop(key, None)) is None:
            return
        span.set_attributes({**attributes, **({"error.type": error} if error else {})})
        if error:
            from opentelemetry.trace import Status, StatusCode  # never at the top: see the module

            span.set_status(Status(StatusCode.ERROR))
        span.end()

    @crow.before_prompt
    def turn(message: Message, session: Session) -> None:
        if not message.get("crow", {}).get("steer"):
            start(session, TURN, "invoke_agent crow", "invoke_agent", **{"gen_ai.agent.name": "crow"})

    @crow.turn_resume
    def resume(session: Session, entries: Sequence[Message]) -> None:
        turn(entries[0], session)

    @crow.before_model
    def chat(request: ModelRequest, session: Session) -> None:
        name = session.model.name
        attributes = {"gen_ai.request.model": name, "gen_ai.provider.name": "openai"}  # the protocol is OpenAI's
        start(session, CHAT, f"chat {name}", "chat", **attributes)

    @crow.model_call
    def answered(session: Session, model_call: ModelCall) -> None:
        if not model_call.ended or model_call.purpose != "turn":
            return
        counted = {"input": model_call.usage.get("prompt_tokens"), "output": model_call.usage.get("completion_tokens")}
        attributes: dict[str, Any] = {f"gen_ai.usage.{n}_tokens": c for n, c in counted.items() if isinstance(c, int)}
        if model_call.finish_reason:
            attributes["gen_ai.response.finish_reasons"] = [model_call.finish_reason]
        end(session, CHAT, attributes, "model_error" if model_call.error else "")

    @crow.before_tool
    def tool(session: Session, tool_call: ToolCall) -> None:
        if tool_call.id in session.state[SPANS]:
            return  # called again, as the user has changed the call
        name = tool_call.name
        attributes = {"gen_ai.tool.name": name, "gen_ai.tool.call.id": tool_call.id, "gen_ai.tool.type": "function"}
        start(session, tool_call.id, f"execute_tool {name}", "execute_tool", **attributes)

    @crow.after_tool
    def returned(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        end(session, tool_call.id, {}, "tool_error" if result.is_error else "")

    @crow.turn_end
    def over(session: Session, outcome: StopReason | Exception) -> None:
        for key in [key for key in session.state[SPANS] if key != TURN]:
            end(session, key, {}, "cancelled")
        end(session, TURN, {}, type(outcome).__name__ if isinstance(outcome, Exception) else "")
