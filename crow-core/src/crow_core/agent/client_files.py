"""Let the built-in tools use the client's files, including unsaved changes, and its terminals."""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, NotRequired, TypedDict, TypeVar

import crow_system as system
from msgspec import Struct

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    METHOD_NOT_FOUND,
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
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import fence, to_line

T = TypeVar("T")

ANSWER_TIMEOUT = 30.0
"""Seconds to wait for an answer of the client."""
MAX_OUTPUT_BYTES = 1024 * 1024
"""Bytes of a command's output that the client is asked to keep."""
REASON_LIMIT = 500
"""Characters of the client's reason for a refusal."""
TRUNCATION_NOTICE = (
    "[… the beginning was left out here; narrow the output with grep, head or tail, or write it to a file …]\n"
)
TERMINALS = StateKey("terminals", list[Awaitable[CreateTerminalResponse]])
"""The client's terminals that are not released yet."""
RELEASING = StateKey("releasing", set[asyncio.Task[None]])


class RequestRefused(OSError):
    """The client answered a request with an error."""

    def __init__(self, text: str, *, is_unknown_method: bool = False) -> None:
        super().__init__(text)
        self.is_unknown_method = is_unknown_method


class TerminalOutcome(TypedDict):
    """The exit status and the output of a command; has the keys that crow_mcp_server.workspace expects."""

    exit_code: int | None
    signal: str | None
    output: str
    timed_out: NotRequired[bool]
    terminal: NotRequired[str]
    refusal: NotRequired[str]
    may_run_here: NotRequired[bool]


class ClientWorkspace:
    """The files and terminals of a session's client, for one tool call.

    Implements the protocols of crow_mcp_server.workspace. Its methods raise OSError with a text for the model.
    """

    def __init__(self, session: Session, tool_call_id: str) -> None:
        self.session = session
        self.tool_call_id = tool_call_id
        """The id of the tool call."""
        capabilities = session.client.capabilities
        self.reads = capabilities.fs.read_text_file
        self.writes = capabilities.fs.write_text_file
        self.runs = capabilities.terminal
        self._turn = session.turns.tasks[0] if session.turns.tasks else None

    async def read_text(self, path: str) -> str | None:
        """Return the text of a file as the client has it; None if the client refuses."""
        try:
            request = ReadTextFileRequest(session_id=self.session.id, path=path)
            answer: ReadTextFileResponse = await self.request("fs/read_text_file", request)
        except RequestRefused:
            return None
        return answer.content

    async def write_text(self, path: str, text: str) -> None:
        """Let the client write a file."""
        request = WriteTextFileRequest(session_id=self.session.id, path=path, content=text)
        await self.request("fs/write_text_file", request)

    async def run(
        self, command: str, *, script: str, cwd: str, env: Mapping[str, str], timeout: float, output_limit: int
    ) -> TerminalOutcome:
        """Run a shell command in a terminal of the client and show the terminal; `terminals` releases it later.

        A command that the client does not start may run on this machine if the user has allowed it, or if the client
        does not know the method. If only a rule or the mode allows it, the refusal may be the user's own.
        """
        session, client = self.session.id, self.session.client
        program, *args = system.make_terminal_command(system.find_shell(), command, script)
        create = CreateTerminalRequest(
            session_id=session,
            command=program,
            args=args,
            env=[EnvVariable(name=name, value=value) for name, value in env.items()],
            cwd=cwd,
            output_byte_limit=MAX_OUTPUT_BYTES,
        )
        # Never cancelled, because a terminal that is created late has to be released, too.
        creating = asyncio.ensure_future(client.request("terminal/create", create))
        self.session.state[TERMINALS].append(creating)
        try:
            created: CreateTerminalResponse = await await_answer("terminal/create", asyncio.shield(creating))
        except RequestRefused as error:
            may_run_here = error.is_unknown_method or self.is_allowed_by_user()
            return TerminalOutcome(
                exit_code=None, signal=None, output="", refusal=str(error), may_run_here=may_run_here
            )
        terminal = created.terminal_id
        await self.show(TerminalContent(terminal_id=terminal))
        ended, timed_out = WaitForTerminalExitResponse(), False
        try:
            wait = WaitForTerminalExitRequest(session_id=session, terminal_id=terminal)
            ended = await self.request("terminal/wait_for_exit", wait, timeout=timeout)
        except TimeoutError:
            timed_out = True
            with suppress(RequestRefused):  # the command may have just ended; otherwise the release kills it
                await self.request("terminal/kill", KillTerminalRequest(session_id=session, terminal_id=terminal))
        printed: TerminalOutputResponse = await self.request(
            "terminal/output", TerminalOutputRequest(session_id=session, terminal_id=terminal)
        )
        is_cut = printed.truncated or len(printed.output) > MAX_OUTPUT_BYTES
        return TerminalOutcome(
            exit_code=ended.exit_code if isinstance(ended.exit_code, int) else None,
            signal=to_line(ended.signal) if isinstance(ended.signal, str) else None,
            output=TRUNCATION_NOTICE + printed.output[len(TRUNCATION_NOTICE) - output_limit :]
            if is_cut
            else printed.output,
            timed_out=timed_out,
            terminal=terminal,
        )

    def is_allowed_by_user(self) -> bool:
        """True if the user has allowed this call, by an answer to the question about it or about such calls."""
        notes = (entry.get("crow", {}) for entry in reversed(self.session.log))
        about = (note for note in notes if (note.get("kind"), note.get("call")) == ("decision", self.tool_call_id))
        last = next(about, dict[str, Any]())
        return last.get("is") == "allow" and str(last.get("by")).startswith("the user")

    async def show_output(self, output: str) -> None:
        """Show the output so far of a command that does not run in the client's terminal, with secrets masked."""
        text = mask(output, self.session.secrets)
        await self.show(BlockContent(content=TextBlock(text=fence(text))))

    async def show(self, content: ToolCallContent) -> None:
        """Show content of the tool call, unless its turn has ended or is being cancelled."""
        if self._turn is None or not (self._turn.done() or self._turn in self.session.turns.cancelled):
            await self.session.update(ToolCallUpdate(tool_call_id=self.tool_call_id, content=[content]))

    async def request(self, method: str, params: Struct, *, timeout: float | None = None) -> Any:
        """Send a request to the client. Raises RequestRefused, TimeoutError, ConnectionClosed."""
        return await await_answer(method, self.session.client.request(method, params), timeout=timeout)


async def await_answer(method: str, answer: Awaitable[T], *, timeout: float | None = None) -> T:
    """Wait for the client's answer; raises as `ClientWorkspace.request` does."""
    seconds = timeout or ANSWER_TIMEOUT
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise TimeoutError(
            f"the editor did not answer {method} within {seconds:g} s. Try once more, then ask the user to look at it"
        ) from None
    except RpcError as error:
        reason = to_line(error.describe())[:REASON_LIMIT].rstrip(".")
        is_unknown = error.code == METHOD_NOT_FOUND
        raise RequestRefused(f"the editor refused {method}: {reason}", is_unknown_method=is_unknown) from None


def terminals(crow: Crow) -> None:
    """Release the client's terminals after the tool calls that used them are shown as ended.

    Not earlier: a client may forget a released terminal and then refuse an update that names it.
    """

    def release(session: Session, ended: object) -> None:
        """Release terminals without waiting for the client; it kills the processes that still run in them."""
        releasing = session.state[RELEASING]
        for creating in session.state.pop(TERMINALS):
            task = asyncio.ensure_future(release_terminal(session, creating))
            releasing.add(task)
            task.add_done_callback(releasing.discard)

    crow.after_model(release)
    crow.turn_end(release)


async def release_terminal(session: Session, creating: Awaitable[CreateTerminalResponse]) -> None:
    """Release a terminal once it is created; ignore errors."""
    with suppress(RpcError, ConnectionClosed):
        request = ReleaseTerminalRequest(session_id=session.id, terminal_id=(await creating).terminal_id)
        await session.client.request("terminal/release", request)
