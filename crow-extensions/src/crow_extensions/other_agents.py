"""Other ACP agents as tools: the model gives a task to a program such as `opencode acp`.

The client sees through the call what the program does. Each call starts the program anew, and ends it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os.path import expanduser as expand_user
from time import monotonic
from typing import Any, NamedTuple

from crow_core import __version__
from crow_core.acp.agent_process import START_TIMEOUT, AgentProcess, start_agent_process
from crow_core.acp.client import AcpClient
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import AUTH_REQUIRED, PromptResponse, ToolCallUpdate
from crow_core.app import Crow
from crow_core.masking import find_secrets, mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Handler, Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Delta
from crow_core.messages.tool_names import make_legal_name
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session.session import Session
from crow_core.text import to_line
from msgspec import UNSET

from crow_extensions.agent_requests import AgentRequests
from crow_extensions.agent_settings import AgentSettings
from crow_extensions.nested import NestedClient

NAME = "other_agents"
DESCRIPTION = """\
{about}

Give this agent a part of the work. It has tools of its own and works in the same folder, but knows nothing of this \
conversation: say all it needs, and what it shall report. You get its last message alone; the user sees what it does."""
SCHEMA = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "description": "the task"}},
    "required": ["prompt"],
}
CANCEL_GRACE = 3.0
"""Seconds that an agent may take to end a turn that was cancelled, before its process is ended."""
TITLE_LIMIT = 80
"""Characters of a call's title."""
ENDED = ("completed", "failed")


class AgentTool(NamedTuple):
    """Another agent, as a tool."""

    agent: str
    """Its name in the configuration."""
    settings: AgentSettings


class ForeignModel:
    """The model of another agent, which is known only by the agent's name and is never asked from here."""

    window: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        raise NotImplementedError  # `Model` requires the method; the other agent asks its own model


def other_agents(
    crow: Crow,
    *,
    find: Callable[[Session], Mapping[str, AgentSettings]],
    env: Mapping[str, str],
    hidden: Sequence[str] = (),
) -> None:
    """Offer other ACP agents to the model, each as the tool `ask_NAME`.

    `find` returns the settings of the agents of a session, by name. `env` is the environment of their processes; the
    variables that `hidden` names are left out.
    """
    given = {name: value for name, value in env.items() if name not in hidden}

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server] | None:
        tools = {
            make_legal_name(f"ask_{name}"): AgentTool(name, settings)
            for name, settings in find(session).items()
            if not settings.disabled
        }
        if not tools:
            return None
        definitions = [to_definition(name, tool) for name, tool in tools.items()]
        secrets = find_secrets(*(tool.settings for tool in tools.values()))
        handlers: dict[str, Handler] = {name: partial(run, tool) for name, tool in tools.items()}
        return [Server(NAME, definitions=definitions, handlers=handlers, built_in=True, secrets=secrets)]

    async def run(tool: AgentTool, session: Session, tool_call: ToolCall) -> ToolResult:
        prompt = tool_call.arguments.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            return ToolResult.error("No agent was started: the prompt is empty.")
        return await OtherAgentTask(session, tool_call, tool, prompt).run(given)


def to_definition(name: str, tool: AgentTool) -> dict[str, Any]:
    """Make the definition of the tool that stands for an agent."""
    words = [tool.settings.command, *tool.settings.args]
    about = tool.settings.description or f"{tool.agent} is another agent, the program {' '.join(words)!r}."
    return {
        "name": name,
        "description": DESCRIPTION.format(about=about),
        "inputSchema": SCHEMA,
        "_meta": {"crow/kind": "execute"},
    }


class OtherAgentTask:
    """A task that another agent works on for a tool call."""

    def __init__(self, session: Session, tool_call: ToolCall, tool: AgentTool, prompt: str) -> None:
        self.session, self.tool_call, self.prompt = session, tool_call, prompt
        self.name, self.settings = tool
        self.title = to_line(f"{self.name}: {prompt.strip().splitlines()[0]}")[:TITLE_LIMIT]
        self.words = [expand_user(tool.settings.command), *tool.settings.args]
        self.cwd = os.path.join(session.cwd, expand_user(tool.settings.cwd))
        self.client = NestedClient(session, tool_call.id, f"The agent {self.name}")
        self.record = TurnRecord()
        self.requests = AgentRequests(session, tool_call, self.name, self.client, self.record)

    async def run(self, env: Mapping[str, str]) -> ToolResult:
        """Start the agent, let it work, and end it. Returns its last message, or why there is none."""
        update = ToolCallUpdate(tool_call_id=self.tool_call.id, title=self.title)
        await self.session.update(update)
        try:
            process = await start_agent_process(self.words, {**env, **self.settings.env}, self.cwd)
            acp = AcpClient(process, self.requests.list_handlers())
            async with acp.serving():
                result = await self.work(acp, process)
        except OSError as error:
            result = self.fail(f"{self.words[0]} cannot be started: {error.strerror or error}.")
        finally:
            await self.settle()
        return ToolResult(result.content, result.is_error, {"crow/title": self.title})

    async def work(self, acp: AcpClient, process: AgentProcess) -> ToolResult:
        """Open a session and run its only turn."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await acp.initialize(f"crow {__version__}", self.client.capabilities)
                id = (await acp.new_session(self.session.cwd)).session_id
            response = await self.take_turn(acp, id)
        except TimeoutError:
            return self.fail(process.describe_silence(START_TIMEOUT))
        except ConnectionClosed:
            return self.fail(await process.describe_end())
        except RpcError as error:
            if error.code == AUTH_REQUIRED:
                return self.fail(acp.describe_login(error))
            return self.fail(f"{error.describe().rstrip('.')}.{process.quote_stderr()}")
        if response is None:
            return self.fail(f"it was not done within {self.settings.timeout:g} seconds, and was cancelled.")
        if response.stop_reason != "end_turn":
            return self.fail(f"it did not come to its end ({response.stop_reason}).")
        return ToolResult.text(self.record.text or "The agent has ended its turn without a message.")

    async def take_turn(self, acp: AcpClient, id: str) -> PromptResponse | None:
        """Send the task and wait for the end of the turn; None if the time was up. A cancel ends the turn, too."""
        request: ModelRequest = {"messages": [{"role": "user", "content": self.prompt}]}
        model_call = ModelCall(ForeignModel(self.name), request, NAME, started=monotonic())
        self.session.log.record(model_call)
        turn = asyncio.ensure_future(acp.prompt(id, self.prompt))
        turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())  # a second cancel leaves it alone
        try:
            await asyncio.wait([turn], timeout=self.settings.timeout)
            return turn.result() if turn.done() else None
        finally:
            if not turn.done():
                await self.cancel(acp, id, turn)
            self.count(model_call, turn)

    async def cancel(self, acp: AcpClient, id: str, turn: "asyncio.Task[PromptResponse]") -> None:
        """Cancel the turn, and wait a moment for its end."""
        self.requests.end_questions()
        with suppress(ConnectionClosed):
            await acp.cancel(id)
        await asyncio.wait([turn], timeout=CANCEL_GRACE)
        turn.cancel()
        await asyncio.wait([turn])

    def count(self, model_call: ModelCall, turn: "asyncio.Task[PromptResponse]") -> None:
        """Record what the turn has used, like a model call, so that budgets and totals count it."""
        failed = turn.cancelled() or turn.exception()
        usage = UNSET if failed else turn.result().usage
        if usage:
            model_call.usage = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}
        if self.record.cost is not None:
            model_call.cost = self.record.cost, self.record.currency
        model_call.ended, model_call.error = monotonic(), str(failed or "")
        model_call.reply = {"role": "assistant", "content": mask(self.record.text, self.session.secrets)}
        self.session.log.record(model_call)

    def fail(self, reason: str) -> ToolResult:
        """Make the result of a task that was not done, with the end of what the agent wrote."""
        words = f"\n\nIts last words:\n\n{self.client.text}" if self.client.text else ""
        return ToolResult.error(f"The agent {self.name} failed: {reason}{words}")

    async def settle(self) -> None:
        """Show the calls that the agent left open as failed, and release its terminals."""
        for id, call in self.record.calls.items():
            if call.status not in ENDED:
                failed = ToolCallUpdate(tool_call_id=self.client.to_parent_id(id), status="failed")
                await self.session.send(failed)
        await self.requests.release_terminals()
