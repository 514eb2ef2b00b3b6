"""The tool `plan`: show the user the model's plan and its progress."""

from typing import Annotated, Literal, NotRequired

from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ToolAnnotations
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from crow_mcp_server.tool_options import ToolOptions

DESCRIPTION = """\
Show the user your plan for work of several steps, and how far you are. Give the whole list each time.
One step is in progress at a time; mark it completed before you go on. Not for work of one or two steps."""
STATUS_MARKS = {"pending": "[ ]", "in_progress": "[>]", "completed": "[x]"}


class PlanStep(TypedDict):
    content: Annotated[str, Field(description="the step, in a few words", min_length=1)]
    status: Literal["pending", "in_progress", "completed"]
    priority: NotRequired[Annotated[Literal["high", "medium", "low"], Field(default="medium")]]


class PlanResult(TypedDict):
    entries: list[PlanStep]
    completed: int


def register(server: FastMCP, options: ToolOptions) -> None:
    @server.tool(
        description=DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
        meta={"crow/kind": "think"},
        output_schema=TypeAdapter(PlanResult).json_schema(),
    )
    async def plan(entries: list[PlanStep]) -> ToolResult:
        steps = [
            PlanStep(content=e["content"], status=e["status"], priority=e.get("priority", "medium")) for e in entries
        ]
        done = sum(step["status"] == "completed" for step in steps)
        lines = [f"{STATUS_MARKS[step['status']]} {step['content']}" for step in steps]
        text = "\n".join([f"{done} of {len(steps)} steps completed.", *lines])
        return ToolResult(text, structured_content=PlanResult(entries=steps, completed=done), meta={"crow/plan": steps})
