"""A session's client as the place where tools work: its files, with changes not saved yet, and its terminals."""

import asyncio
import shutil
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, NotRequired, TypedDict, TypeVar

from msgspec import Struct

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    BlockContent,
    CreateTerminalRequest,
    CreateTerminalResponse,
    EnvVariable,
    KillTerminalRequest,
    ReadTextFileRequest,
    ReadTextFileResponse,
    ReleaseTerminalRequest,
    TerminalContent,
    TerminalOutputRequest,
    TerminalOutputResponse,
    TextBlock,
    ToolCallContent,
    ToolCallUpdate,
    WaitForTerminalExitRequest,
    WaitForTerminalExitResponse,
    WriteTextFileRequest,
)
from crow_core.app import Crow
from crow_core.masking import mask
from crow_core.models.chat import ModelCall
from crow_core.session import Session
from crow_core.text import fence, to_line

T = TypeVar("T")

ANSWER_WITHIN = 30.0
"""Seconds a client may take for an answer."""
OUTPUT_BYTES = 1024 * 1024
"""Of what a command prints, how much a client is asked to keep."""
LEFT_OUT = "[… the beginning was left out here; narrow the output with grep, head or tail, or write it to a file …]\n"


class Refused(OSError):
    """The client answered with an error."""


class Outcome(TypedDict):
    """How a command ended and what it printed, in the words of crow_mcp_server.workspace."""

    exit_code: int | None
    signal: str | None
    output: str
    timed_out: NotRequired[bool]
    terminal: NotRequired[str]


class Editor:
    """What a client offers to one tool call; fits `Files`, `Terminals` and `Watch` of crow_mcp_server.workspace.

    What it raises is an OSError whose text is for the model.
    """

    def __init__(self, session: Session, call: str) -> None:
        self.session = session
        self.call = call
        """The id of the tool call."""
        capabilities = session.client.capabilities
        self.reads = capabilities.fs.read_text_file
        self.writes = capabilities.fs.write_text_file
        self.runs = capabilities.terminal
        self._turn = session.turns.tasks[0] if session.turns.tasks else None

    async def read_text(self, path: str) -> str | None:
        """A file as the client has it; None when it does not say."""
        try:
            request = ReadTextFileRequest(session_id=self.session.id, path=path)
            answer: ReadTextFileResponse = await self.ask("fs/read_text_file", request)
        except Refused:
            return None
        return answer.content

    async def write_text(self, path: str, text: str) -> None:
        """Have the client write a file."""
        request = WriteTextFileRequest(session_id=self.session.id, path=path, content=text)
        await self.ask("fs/write_text_file", request)

    async def run(
        self, command: str, *, cwd: str, env: Mapping[str, str], timeout: float, output_limit: int
    ) -> Outcome:
        """Run a shell command in a terminal of the client's, and show that. `terminals` gives it back."""
        session, client = self.session.id, self.session.client
        create = CreateTerminalRequest(
            session_id=session,
            command="bash" if shutil.which("bash") else "sh",
            args=["-c", command],
            env=[EnvVariable(name=name, value=value) for name, value in env.items()],
            cwd=cwd,
            output_byte_limit=OUTPUT_BYTES,
        )
        # Never cancelled: a terminal that comes late has to be given back, too.
        creating = asyncio.ensure_future(client.request("terminal/create", create))
        self.session.state.setdefault("terminals", []).append(creating)
        created: CreateTerminalResponse = await answered("terminal/create", asyncio.shield(creating))
        terminal = created.terminal_id
        await self.show(TerminalContent(terminal_id=terminal))
        ended, timed_out = WaitForTerminalExitResponse(), False
        try:
            wait = WaitForTerminalExitRequest(session_id=session, terminal_id=terminal)
            ended = await self.ask("terminal/wait_for_exit", wait, within=timeout)
        except TimeoutError:
            timed_out = True
            with suppress(Refused):  # it may have ended at this very moment; else the release ends it
                await self.ask("terminal/kill", KillTerminalRequest(session_id=session, terminal_id=terminal))
        said: TerminalOutputResponse = await self.ask(
            "terminal/output", TerminalOutputRequest(session_id=session, terminal_id=terminal)
        )
        cut = said.truncated or len(said.output) > OUTPUT_BYTES
        return Outcome(
            exit_code=ended.exit_code if isinstance(ended.exit_code, int) else None,
            signal=to_line(ended.signal) if isinstance(ended.signal, str) else None,
            output=LEFT_OUT + said.output[len(LEFT_OUT) - output_limit :] if cut else said.output,
            timed_out=timed_out,
            terminal=terminal,
        )

    async def watch(self, output: str) -> None:
        """Show what a command has printed so far that runs in no terminal of the client's."""
        text = mask(output, self.session.secrets)
        await self.show(BlockContent(content=TextBlock(text=fence(text))))

    async def show(self, content: ToolCallContent) -> None:
        """Show something of the call while it runs, not when its turn is over."""
        if self._turn is None or not (self._turn.done() or self._turn.cancelling()):
            await self.session.update(ToolCallUpdate(tool_call_id=self.call, content=[content]))

    async def ask(self, method: str, params: Struct, *, within: float | None = None) -> Any:
        """Ask the client. Raises Refused, TimeoutError after `within` seconds, ConnectionClosed."""
        return await answered(method, self.session.client.request(method, params), within=within)


async def answered(method: str, answer: Awaitable[T], *, within: float | None = None) -> T:
    """An answer of the client's; see `Editor.ask`."""
    seconds = within or ANSWER_WITHIN
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise TimeoutError(
            f"the editor did not answer {method} within {seconds:g} s. Try once more, then ask the user to look at it"
        ) from None
    except RpcError as error:
        match error.data:
            case {"details": str(details)}:
                pass
            case _:
                details = error.message
        raise Refused(f"the editor refused {method}: {to_line(details)[:200].rstrip('.')}") from None


def terminals(crow: Crow) -> None:
    """Give a client its terminals back when the calls that ran in them have been shown to their end.

    Not before: a client may forget a terminal that was given back, and then refuse an update that names it.
    """

    @crow.after_model
    def shown(session: Session, model_call: ModelCall) -> None:
        give_back(session)

    @crow.turn_end
    def over(session: Session, outcome: object) -> None:
        give_back(session)


def give_back(session: Session) -> None:
    """Release a session's terminals without waiting for the client, which kills what still runs in them."""
    releasing: set[asyncio.Task[None]] = session.state.setdefault("releasing", set())
    for creating in session.state.pop("terminals", ()):
        task = asyncio.ensure_future(release(session, creating))
        releasing.add(task)
        task.add_done_callback(releasing.discard)


async def release(session: Session, creating: Awaitable[CreateTerminalResponse]) -> None:
    with suppress(RpcError, ConnectionClosed):
        request = ReleaseTerminalRequest(session_id=session.id, terminal_id=(await creating).terminal_id)
        await session.client.request("terminal/release", request)
