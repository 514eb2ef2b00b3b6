"""Stop a model that repeats a tool call without progress: it is told first, then it answers without tools."""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import msgspec
from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import to_content
from crow_core.errors import EndTurn
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, marker_kind, to_parts
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.printed import find_printed_calls
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_system.shortening import leave_out

REMARK = "[You have this already: you made this very call {} times, and it gave the same each time.] "
NEXT = "Go on with the next step, or answer."
ANSWER = "Do not call tools any more. Answer now with what you know, and say what is missing."
MAX_GIST = 1_000
"""Characters of a repeated result that the model is sent again."""

STOPPED_BY = "repeated_calls"
"""Says to programs that the loop guard has ended the turn."""
ADVICE = (
    "If the tool polls, declare it: @tool(repeats=True), crow/repeats in its _meta, [extensions.loop_guard] repeats."
)
COUNTS = StateKey("loop_guard", Counter[tuple[str, bytes]])
"""The number of times that each call gave the same result: (tool, digest of arguments and result) to a number."""
STUCK = StateKey("loop_guard_stuck", str)
"""A sentence on the call that the model repeats if its next request has no tools; "" otherwise."""


def loop_guard(crow: Crow, *, tell: int = 2, answer: int = 3, repeats: Sequence[str] = ()) -> None:
    """Tell the model after `tell` equal calls with equal results, and let it answer without tools after `answer`.

    A model that calls tools nevertheless ends the turn: its stop reason is `max_turn_requests`, and the answer to the
    prompt has the reason. A call or a result that is new in the turn is progress: the count starts again. Calls of
    tools that poll do not count: tools whose definition says so (`Tool.repeats`), and those whose name matches a
    pattern in `repeats`. Use this before extensions that write the name of a new file into results, since no two of
    these results are equal.
    """

    def counts(tool_call: ToolCall) -> bool:
        """Tell whether equal calls of the tool are a loop."""
        polls = tool_call.tool is not None and tool_call.tool.repeats
        return not polls and not any(fnmatchcase(tool_call.name, pattern) for pattern in repeats)

    @crow.turn_resume
    def count_again(session: Session, entries: Sequence[Message]) -> None:
        session.state[COUNTS].clear()
        uses = {use["id"]: use for entry in entries for use in entry.get("tool_calls", ())}
        results: dict[tuple[str, bytes], Any] = {}
        for entry in entries:
            use = uses.get(entry.get("tool_call_id", ""))
            if use and counts(tool_call := session.toolbox.parse(use)):
                key = make_key(tool_call, None)
                if not is_remark(content := entry.get("content")):
                    results[key] = content
                add_call(session, tool_call, results.get(key, content))

    @crow.message
    def start_again(session: Session, entry: Message) -> None:
        if marker_kind(entry) in ("compaction", "shrink"):  # the model may not have the result any more
            session.state[COUNTS].clear()

    @crow.before_tool
    def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
        return ToolResult.error(ANSWER) if session.state[STUCK] else None

    @crow.after_tool
    async def count(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        if session.state[STUCK] or not counts(tool_call):
            return None
        if (times := add_call(session, tool_call, to_content(result))) < tell:
            return None
        text = REMARK.format(times) + (NEXT if times < answer else ANSWER)
        gist = "\n\n".join(part["text"] for part in result.content if part.get("type") == "text")
        gist = leave_out(gist, MAX_GIST, "the call above gave all of it")
        return ToolResult([{"type": "text", "text": f"{text}\n\n{gist}".strip()}], result.is_error, result.meta)

    @crow.before_model
    def take_tools(request: ModelRequest, session: Session) -> ModelRequest | None:
        if not session.state[STUCK]:
            return None
        if isinstance(session.model, ChatModel) and session.model.quirks.call_form != "native":
            return {"tool_choice": "none", **request}  # the prompt, which describes the tools, stays in the cache
        return {key: value for key, value in request.items() if key != "tools"}

    @crow.after_model
    async def watch(session: Session, model_call: ModelCall) -> None:
        if stuck := session.state[STUCK]:
            if calls_on(session, model_call):
                raise EndTurn("max_turn_requests", f"crow ended the turn. {stuck} {ADVICE}", stopped_by=STOPPED_BY)
            return
        for (name, _), times in session.state[COUNTS].most_common(1):
            if times >= answer:
                session.state[STUCK] = f"The model called {name} {times} times and it gave the same each time."
                await session.notice(
                    f"The model repeats a call of {name}. crow asks it to answer without tools.", "warning"
                )

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state[COUNTS].clear()
        session.state.pop(STUCK)


def calls_on(session: Session, model_call: ModelCall) -> bool:
    """Return whether a reply to a request without tools has a call nevertheless, also as text."""
    functions = (schema["function"] for schema in session.toolbox.sent or ())
    tools: dict[str, dict[str, Any]] = {f["name"]: f.get("parameters") or {} for f in functions}
    text = model_call.reply.get("content")
    return bool(
        model_call.reply.get("tool_calls") or (isinstance(text, str) and find_printed_calls(text, tools) is not None)
    )


def make_key(tool_call: ToolCall, content: Any) -> tuple[str, bytes]:
    """Make the key of a call: its tool, and a digest of its arguments and the content of its answer."""
    digest = sha256(msgspec.json.encode([tool_call.arguments, content], order="sorted")).digest()
    return tool_call.name, digest


def add_call(session: Session, tool_call: ToolCall, content: Any) -> int:
    """Count a call by its tool, its arguments and the content of its answer; return how often it was made."""
    counts = session.state[COUNTS]
    key = make_key(tool_call, content)
    if key not in counts:
        for other in counts:
            counts[other] = 0
    counts[key] += 1
    return counts[key]


def is_remark(content: Any) -> bool:
    """Return whether the content of an answer says that the model has it already."""
    start = REMARK.partition("{")[0]
    return any(str(part.get("text", "")).startswith(start) for part in to_parts(content))
