"""The record of a decision about a tool call, in the log."""

import hashlib
from collections.abc import Sequence

import msgspec
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import find_markers_of_call
from crow_core.messages.notes import Notes
from crow_core.session.session import Session
from crow_core.text import to_line

from crow_permissions.judgement import Judgement
from crow_permissions.kept_answers import KeptAnswer


def record(session: Session, tool_call: ToolCall, judgement: Judgement, changed: Sequence[str] = ()) -> None:
    """Append a decision to the log, unless the last one on this call since the reply is the same.

    `changed` names the files that a command in the sandbox changed, if the decision is about these.
    """
    scope = to_scope(judgement.answer) if judgement.answer else "once"
    decision: Notes = {"kind": "decision", "is": judgement.verdict, "by": judgement.reason, "scope": scope}
    decision |= identify(tool_call)
    if judgement.writes:
        decision["writes"] = True
    if changed:
        decision["changed"] = [*changed]
    notes = find_markers_of_call(session.log, tool_call.id)
    last = next((note for note in notes if note.get("kind") == "decision"), None)
    if last is None or not decision.items() <= last.items():
        session.log.append({"crow": decision})


def to_scope(answer: KeptAnswer) -> str:
    """Convert an answer to the scope of a decision in the log."""
    place = f"folder {to_line(answer.folder)}" if answer.scope == "folder" else answer.scope
    return f"{place}: {answer.rule.describe()}"


def identify(tool_call: ToolCall) -> Notes:
    """Identify a tool call in a decision: its id, its tool, and a digest of its arguments, as they run."""
    use = tool_call.use
    name, arguments = use["function"]["name"], use["function"]["arguments"]
    if tool_call.is_changed:
        arguments = msgspec.json.encode(tool_call.arguments).decode()
    digest = hashlib.sha256(arguments.encode(errors="surrogatepass")).hexdigest()
    return {"call": use["id"], "tool": name, "arguments": digest}
