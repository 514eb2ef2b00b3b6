"""The tool `agent`: the model gives a part of its work to a sub-agent, a session that starts with the task alone."""

import re
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import ToolCallUpdate
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.session.background_work import BACKGROUND
from crow_core.session.session import Session
from crow_core.text import to_line
from msgspec import Struct, ValidationError

NAME = "agent"
DESCRIPTION = """\
Give a part of the work to another agent, which has tools as you do, but knows nothing of this conversation: \
say all it needs, and what it shall report. You get its last message alone; the user sees what it does. \
For searches through much, and for work that can be done apart. Call it several times at once for parts that do not \
depend on one another and do not change the same files."""
NO_OTHERS = "You are a sub-agent, which starts no other. Do it yourself."
AGENT_NAME = re.compile(r"[A-Za-z][\w.-]{0,39}")


def make_schema(models: Sequence[str]) -> dict[str, Any]:
    """Make the schema of the tool's arguments, where these models can be chosen."""
    properties: dict[str, Any] = {
        "description": {"type": "string", "description": "the task in a few words, for the user"},
        "prompt": {"type": "string", "description": "the task, or words to one that you named before"},
        "name": {
            "type": "string",
            "description": "a new name, so that you can go on with it later, or that of an earlier one, which knows "
            "all that it did; an earlier name without a prompt waits for its report",
        },
        "tools": {
            "type": "array",
            "items": {"type": "string"},
            "description": "patterns of names of the tools it may use; all of them if left out",
        },
        "sandbox": {"type": "string", "enum": ["read-only"], "description": "it changes nothing, as in plan mode"},
    }
    if len(models) > 1:
        properties["model"] = {"type": "string", "enum": [*models], "description": "yours if left out"}
    return {"type": "object", "properties": properties, "required": ["description"]}


class AgentTask(Struct):
    """The arguments of a call of `agent`."""

    prompt: str = ""
    description: str = ""
    name: str = ""
    tools: list[str] = []
    model: str = ""
    sandbox: Literal["read-only", ""] = ""


def subagents(crow: Crow, *, sandbox: Literal["read-only", "off"] = "off") -> None:
    """Let the model give work to sub-agents, each in a session of its own.

    They share the permissions and the budget of their parent. They end with its turn, unless the user sends them to the
    background. One with a name can go on later with all that it knows. In the `sandbox` "read-only", which a call can
    also name, they work in the mode `plan`. They change no file, and their commands run only where changes can be
    discarded. Their requests begin as the parent's do, with its system prompt and all its tools, so that the server's
    cache has the beginning. A call of `agent`, or of a tool that was not given to them, is refused. Another model has
    no such cache, and is sent only tools it may use.
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
        if fault := find_fault(session, task):
            return ToolResult.error(fault)
        if sandbox == "read-only":
            task.sandbox = sandbox
        result = await run_task(crow, session, tool_call, task)
        known = session.state[BACKGROUND].agents.get(task.name)
        return ToolResult(result.content, result.is_error, {"crow/title": known.title if known else make_title(task)})

    @crow.session_start
    def restore(session: Session) -> None:
        if not session.parent and session.log.entries and session.view.find_kind("child"):
            restore_agents(crow, session)


def make_title(task: AgentTask) -> str:
    """Make the line that tells the user what a sub-agent does."""
    return to_line(task.description or task.prompt)[:80]


def restore_agents(crow: Crow, session: Session) -> None:
    """Find the sub-agents of a stored session that have a name, so that they can go on."""
    from crow_extensions.sub_agent import SubAgent  # here because few sessions have one

    agents = session.state[BACKGROUND].agents
    for entry in session.view.find_kind("child"):
        if name := (notes := entry.get("crow", {})).get("name"):
            agents[name] = agent = SubAgent(crow, session, name, notes.get("title", ""))
            agent.session_id, agent.call = notes.get("session", ""), notes.get("call", "")
            agent.only, agent.sandbox = notes.get("only", []), notes.get("sandbox", "")


def find_fault(session: Session, task: AgentTask) -> str:
    """Find the reason why a task cannot be given to an agent; empty if there is none."""
    background = session.state[BACKGROUND]
    known = background.agents.get(task.name)
    if task.model and task.model not in session.models:
        return f"There is no model {task.model!r}. Choose one of: {', '.join(session.models)}."
    if not (task.prompt or known):
        names = ", ".join(background.agents) or "none yet"
        return f"No agent was started: give a prompt, or the name of an agent that there is ({names})."
    if task.name and not known and (not AGENT_NAME.fullmatch(task.name) or task.name == "stop"):
        return f"No agent was started: {task.name[:60]!r} is no name for one. Use a word, such as 'tests'."
    if known and task.prompt and not known.over.is_set() and known in background.waiting.values():
        return f"No agent was started: the agent {task.name!r} works for another call. Choose another name."
    return ""


async def run_task(crow: Crow, session: Session, tool_call: ToolCall, task: AgentTask) -> ToolResult:
    """Give a task to a new sub-agent, or words to one that there is. Return its report, unless it goes on."""
    from crow_extensions.sub_agent import AgentGone, SubAgent  # here because few sessions have one

    agents = session.state[BACKGROUND].agents
    agent, starts = agents.get(task.name), bool(task.prompt)
    if agent is None:
        name = task.name or next(name for n in count(1) if (name := f"agent-{n}") not in agents)
        agent = agents[name] = SubAgent(crow, session, name, make_title(task))
        agent.only, agent.sandbox = task.tools, task.sandbox
    elif starts and not agent.over.is_set():
        return ToolResult.text(f"{await agent.tell(task.prompt)} Its name alone waits for its report.")
    assert isinstance(agent, SubAgent)
    await session.update(ToolCallUpdate(tool_call_id=tool_call.id, title=agent.title))
    try:
        if starts:
            agent.model = session.models.get(task.model) or agent.model
            await agent.start(task.prompt, tool_call.id)
        return await agent.wait(tool_call.id, starts=starts)
    except AgentGone as error:
        return ToolResult.error(str(error))
