"""The tool `plan`: the model shows the user the steps of its work (ACP, `plan` updates)."""

from typing import Any

from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import PlanEntry, PlanUpdate
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from msgspec import Struct, ValidationError

DESCRIPTION = """\
Show the user your plan for work of several steps, and how far you are. Give the whole list each time.
One step is in progress at a time; mark it completed before you go on. Not for what takes a step or two."""

PLAN_OF_PARENT = (
    "You are a sub-agent: the plan that the user sees is that of the agent which gave you the task. Go on without."
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "entries": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "description": "the step, in a few words"},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    "priority": {"type": "string", "enum": ["high", "medium", "low"], "default": "medium"},
                },
                "required": ["content", "status"],
            },
        }
    },
    "required": ["entries"],
}

DEFINITION: dict[str, Any] = {
    "name": "plan",
    "description": DESCRIPTION,
    "inputSchema": SCHEMA,
    "_meta": {
        "crow/kind": "think",
        "crow/replaces": ["todo_write", "todowrite", "update_plan", "write_todos", "update_todo_list", "todo", "todos"],
        "crow/arguments": {
            "synonyms": {
                "entries": ["todos", "plan", "steps", "items", "tasks", "todo_list", "task_list"],
                "content": ["step", "title", "text", "task", "name"],
                "status": ["state"],
            },
            "values": {
                "pending": ["todo", "not_started", "open", "planned"],
                "in_progress": ["active", "doing", "started", "current", "ongoing", "wip"],
                "completed": ["done", "complete", "finished"],
            },
        },
    },
}


class PlanArguments(Struct):
    """The arguments of a call of `plan`."""

    entries: list[PlanEntry]


def plan(crow: Crow) -> None:
    """Let the model show a plan. A stored session shows its plans again when it is loaded."""
    server = Server("plan", definitions=[DEFINITION], handlers={"plan": show_plan}, built_in=True, shared=True)
    crow.servers.append(server)


async def show_plan(session: Session, tool_call: ToolCall) -> ToolResult:
    """Show the user the plan of a call."""
    if session.parent:
        return ToolResult.error(PLAN_OF_PARENT)
    try:
        entries = parse_entries(tool_call.arguments)
    except ValidationError as error:
        return ToolResult.error(f"The plan was not shown: {error}.")
    await session.update(PlanUpdate(entries=entries))
    done = sum(entry.status == "completed" for entry in entries)
    shown = [{"content": e.content, "priority": e.priority, "status": e.status} for e in entries]
    text = {"type": "text", "text": f"The user sees the plan: {done} of {len(entries)} steps completed."}
    return ToolResult([text], meta={"crow/plan": shown})


def parse_entries(arguments: dict[str, Any]) -> list[PlanEntry]:
    """Parse the entries of a call's arguments. Raises ValidationError."""
    match arguments:
        case {"entries": [*entries]} if all(isinstance(entry, dict) for entry in entries):
            return convert_leniently(
                {"entries": [{"priority": "medium", **entry} for entry in entries]}, PlanArguments
            ).entries
        case _:
            raise ValidationError("entries is a list of objects")
