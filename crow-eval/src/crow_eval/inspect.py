"""crow as an agent for tasks of Inspect (https://inspect.aisi.org.uk). It needs the extra `inspect`.

Inspect's agent bridge takes every model call to the model of the task, so that Inspect counts, limits and logs it.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Literal

from crow_agent.agent import Agent
from crow_agent.content import Part
from crow_agent.errors import AgentError
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.messages.message import Delta
from crow_core.models.model_call import ModelRequest
from crow_core.session.session import Session

try:
    from anyio import CancelScope
    from inspect_ai.agent import Agent as InspectAgent
    from inspect_ai.agent import AgentState, agent, agent_bridge
    from inspect_ai.log import transcript
    from inspect_ai.model import ChatMessage, ContentImage, ContentText, get_model, get_model_info
    from inspect_ai.util import sandbox, store
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # the class of the sandbox "local", for as_type
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"crow_eval.inspect needs {error.name}: install crow-eval[inspect].") from error

STORE_KEY = "crow"
"""The key of a sample's store under which the session is named."""


@agent(description="A coding agent with tools for files, commands and the web.")
def crow(mode: Literal["accept-edits", "plan", "yolo"] = "accept-edits") -> InspectAgent:
    """Solve a sample with crow, in the folder of its sandbox `local`, or in an empty one if it has no sandbox.

    The model is that of the task; tools, permissions, extensions and the database are those of crow's configuration.
    Calls that need a permission are denied. The store of the sample names the session: `crow sessions show ID` shows
    it. `mode`: which tool calls may run. Raises AgentError for a sample that crow cannot solve, such as one with
    another sandbox, and whatever error Inspect raises for a model call.
    """

    async def execute(state: AgentState) -> AgentState:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise AgentError("crow runs on asyncio only: set Inspect's async backend to asyncio.") from None
        work = asyncio.create_task(solve(state, mode))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.cancel()
            with CancelScope(shield=True):  # anyio cancels each further wait of this task, too
                await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # marks it as retrieved
            raise
        return work.result()

    return execute


async def solve(state: AgentState, mode: Literal["accept-edits", "plan", "yolo"]) -> AgentState:
    """Send the messages of a sample to a new session, and return the state that the bridge has kept.

    Raises AgentError, and the error that a model call has raised.
    """
    instructions, prompt = split_input(state.messages)

    def instruct(crow: Crow) -> None:
        @crow.instructions
        def give(session: Session) -> str:
            return "" if session.parent else instructions

    with find_folder() as folder:
        async with agent_bridge(state) as bridge:
            model = BridgedModel()
            async with (
                Agent(model, mode=mode, extensions=[instruct], cwd=folder, env=os.environ) as own,
                await own.session() as session,
            ):
                notes: dict[str, Any] = {"session": session.id}
                store().set(STORE_KEY, notes)
                result = await session.prompt(prompt)
            notes |= {"stop_reason": result.stop_reason, "denied": [call.title for call in result.denied]}
            store().set(STORE_KEY, notes)
            transcript().info(notes, source="crow")
    if model.fault is not None:
        raise model.fault
    if result.stop_reason == "cancelled":
        raise AgentError("The turn was cancelled.")
    return bridge.state


class BridgedModel:
    """The model of the task, behind Inspect's agent bridge."""

    def __init__(self) -> None:
        self.name = str(get_model())
        info = get_model_info(self.name)
        self.window: int | None = info.context_length if info else None
        self.fault: Exception | None = None
        """The error that a model call has ended with, which is Inspect's to handle: a limit, or one of the endpoint."""
        self._client = AsyncOpenAI(api_key="none", base_url="http://inspect.invalid", max_retries=0)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta]:
        """Yield the reply, which the bridge returns as a whole. Raises EndTurn after an error, which is in `fault`."""
        body = {"model": "inspect", **request}  # the name that the bridge takes for the model of the task
        yield {"sent": {**body, "model": self.name}}
        try:
            completion = await self._client.post("/chat/completions", body=body, cast_to=ChatCompletion)
        except Exception as error:  # whatever Inspect raises, such as a limit, is raised again when the turn has ended
            self.fault = error
            raise EndTurn("max_turn_requests", f"Inspect ended the turn: {error}") from error
        self.fault = None  # that of a sub-agent, which its session was told
        choice, usage = completion.choices[0], completion.usage
        reply: Any = choice.message.model_dump(exclude_none=True, exclude={"role"})
        for index, call in enumerate(reply.get("tool_calls", ())):
            call["index"] = index
        if reply:
            yield reply
        yield {"finish_reason": choice.finish_reason, "usage": usage.model_dump(exclude_none=True) if usage else {}}


def split_input(messages: Sequence[ChatMessage]) -> tuple[str, list[Part]]:
    """Split the messages of a sample into instructions for the system prompt and the parts of the prompt.

    Raises AgentError for a conversation that has begun, and for content that crow does not take.
    """
    instructions: list[str] = []
    parts: list[Part] = []
    for message in messages:
        match message.role:
            case "system":
                instructions.append(message.text)
            case "user":
                content = [ContentText(text=message.content)] if isinstance(message.content, str) else message.content
                parts += map(to_part, content)
            case role:
                raise AgentError(f"crow begins a conversation: a sample with a message of the role {role} is not run.")
    if not parts:
        raise AgentError("crow needs a message of the user, and the sample has none.")
    return "\n\n".join(instructions), parts


def to_part(content: Any) -> Part:
    """Convert a part of a message to a part of a prompt. Raises AgentError."""
    match content:
        case ContentText(text=text):
            return text
        case ContentImage(image=image) if image.startswith("data:"):
            from base64 import b64decode

            return b64decode(image.partition(",")[2])
        case _:
            raise AgentError(f"crow takes texts and images with their data, and the sample has a part {content.type}.")


@contextmanager
def find_folder() -> Generator[str]:
    """Find the folder of the sample's sandbox, or make one that lasts for the block. Raises AgentError."""
    try:
        environment = sandbox()
    except ProcessLookupError:  # the sample has none
        with TemporaryDirectory(prefix="crow-inspect-", ignore_cleanup_errors=True) as folder:
            yield folder
        return
    try:
        local = environment.as_type(LocalSandboxEnvironment)
    except TypeError:
        raise AgentError(
            'crow works in the sandbox "local" or in none, as its tools use the files of this machine: the sample has '
            "another sandbox."
        ) from None
    yield local.directory.name
