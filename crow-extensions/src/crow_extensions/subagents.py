"""The tool `agent`: the model gives a part of its work to a sub-agent, a session that starts with the task alone."""

from collections.abc import Sequence
from typing import Any, Literal

from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import ToolCallUpdate
from crow_core.app import Crow
from crow_core.errors import EndTurn, ModelError
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, marker_kind
from crow_core.session.output import STOPPED, TURN_NOTES
from crow_core.session.session import Session
from crow_core.text import to_line
from msgspec import Struct, ValidationError

from crow_extensions.nested import NestedClient

NAME = "agent"
DESCRIPTION = """\
Give a part of the work to another agent, which has tools as you do, but knows nothing of this conversation: \
say all it needs, and what it shall report. You get its last message alone; the user sees what it does. \
For searches through much, and for work that can be done apart. Call it several times at once for parts that do not \
depend on one another and do not change the same files."""
NO_OTHERS = "You are a sub-agent, which starts no other. Do it yourself."
ONLY = "\n\nUse only these of your tools: {}."
"""Is appended to the task where the sub-agent may not use all tools."""
READ_ONLY = "\n\nYou may read and run commands, but you change nothing: what your commands change is discarded."
"""Is appended to the task of a sub-agent that may change nothing."""
UNLIMITED = "No agent was started: there are no permissions here, so nothing would keep it from changing files."
REPORT = """

---
Another agent gave you this task, and nobody else reads along. Your last message is your report to it, and all that it \
gets: say what you found or did, with paths and lines, and what is left."""
"""Is appended to the task."""


def make_schema(models: Sequence[str]) -> dict[str, Any]:
    """Make the schema of the tool's arguments, where these models can be chosen."""
    properties: dict[str, Any] = {
        "description": {"type": "string", "description": "the task in a few words, for the user"},
        "prompt": {"type": "string", "description": "the task"},
        "tools": {
            "type": "array",
            "items": {"type": "string"},
            "description": "patterns of names of the tools it may use; all of them if left out",
        },
        "sandbox": {"type": "string", "enum": ["read-only"], "description": "it changes nothing, as in plan mode"},
    }
    if len(models) > 1:
        properties["model"] = {"type": "string", "enum": [*models], "description": "yours if left out"}
    return {"type": "object", "properties": properties, "required": ["description", "prompt"]}


class AgentTask(Struct):
    """The arguments of a call of `agent`."""

    prompt: str
    description: str = ""
    tools: list[str] = []
    model: str = ""
    sandbox: Literal["read-only", ""] = ""


def subagents(crow: Crow, *, sandbox: Literal["read-only", "off"] = "off") -> None:
    """Let the model give work to sub-agents, each in a session of its own.

    They share the permissions and the budget of their parent, and end when its turn does. In the `sandbox` "read-only",
    which a call can name, too, they work in the mode `plan`: they change no file, and their commands run only where
    what these change can be discarded. Their requests begin as the parent's do, with its system prompt and all its
    tools, so that a server has that in its cache; a call of `agent`, or of a tool that they were not given, is refused.
    Another model has no such cache, and is sent only tools it may use.
    """

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        definition = {
            "name": NAME,
            "description": DESCRIPTION,
            "inputSchema": make_schema(list(session.models)),
            "_meta": {"crow/kind": "think"},
        }
        return [Server(NAME, definitions=[definition], handlers={NAME: run}, built_in=True)]

    @crow.tools
    def share(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]] | None:
        if session.parent is None:
            return None
        schemas = session.parent.toolbox.sent or []
        if session.model is session.parent.model:
            return schemas
        return [schema for schema in schemas if session.toolbox.is_allowed(schema["function"]["name"])]

    async def run(session: Session, tool_call: ToolCall) -> ToolResult:
        if session.parent:
            return ToolResult.error(NO_OTHERS)
        try:
            task = convert_leniently(tool_call.arguments, AgentTask)
        except ValidationError as error:
            return ToolResult.error(f"No agent was started: {error}.")
        if task.model and task.model not in session.models:
            return ToolResult.error(f"There is no model {task.model!r}. Choose one of: {', '.join(session.models)}.")
        if sandbox == "read-only":
            task.sandbox = sandbox
        result = await run_task(crow, session, tool_call, task)
        return ToolResult(result.content, result.is_error, {"crow/title": make_title(task)})


def share_system_prompt(parent: Session, child: Session) -> None:
    """Give a sub-agent the system prompt of its parent, and append the marker of its rendering to its log."""
    child.prompts.system = parent.prompts.system
    renders = [entry.get("crow", {}) for entry in parent.log if marker_kind(entry) == "render"]
    for notes in [notes.copy() for notes in renders if notes.get("purpose") == "system"][-1:]:
        notes.pop("id", None)
        child.log.append({"crow": notes})


def make_title(task: AgentTask) -> str:
    """Make the line that tells the user what a sub-agent does."""
    return to_line(task.description or task.prompt)[:80]


async def run_task(crow: Crow, session: Session, tool_call: ToolCall, task: AgentTask) -> ToolResult:
    """Run a task in a session of its own; return its report."""
    title = make_title(task)
    await session.update(ToolCallUpdate(tool_call_id=tool_call.id, title=title))
    client = NestedClient(session, tool_call.id)
    child = await crow.open(
        client,
        session.cwd,
        roots=session.folders.roots[1:],
        servers=session.toolbox.client_servers,
        models=session.models,
        parent=session,
    )
    try:
        child.model = session.models.get(task.model, session.model)
        child.toolbox.allowed = task.tools
        child.folders.current = session.folders.current
        session.log.append({"crow": {"kind": "child", "session": child.id, "call": tool_call.id}})
        child.log.append({"crow": {"kind": "parent", "session": session.id, "call": tool_call.id}})
        share_system_prompt(session, child)
        await child.set_title(title)
        only = ONLY.format(", ".join(task.tools)) if task.tools else ""
        if task.sandbox:
            if not (mode := child.options.find_mode()):
                return ToolResult.error(UNLIMITED)
            await child.options.choose(mode, "plan")
            only += READ_ONLY
        notes_before = TURN_NOTES.set(notes := dict[str, Any]())  # those of the sub-agent's turn are its own
        try:
            stop_reason = await crow.prompt(child, {"role": "user", "content": task.prompt + only + REPORT})
        finally:
            TURN_NOTES.reset(notes_before)
    except ModelError as error:
        return ToolResult.error(f"The agent failed: {error}\n\n{client.text}".strip())
    finally:
        await crow.close(child)
    if stop_reason == "cancelled":
        raise EndTurn("cancelled")
    last = next((entry for entry in reversed(child.log) if entry.get("role") == "assistant"), Message())
    if stop_reason == "end_turn" and STOPPED not in notes and last.get("content") and not last.get("tool_calls"):
        return ToolResult.text(str(last.get("content")))
    why = notes.get(STOPPED, {}).get("reason") or f"The agent did not come to its end ({stop_reason})."
    return ToolResult.error(f"{why} Its last words:\n\n{client.text}")
