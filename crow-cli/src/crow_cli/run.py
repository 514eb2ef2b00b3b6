"""`crow run`: send one prompt, as an ACP client in the same process as the agent."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click
import crow_system as system
import msgspec
from crow_core.acp.client import OPTION_NAMES
from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import encode
from crow_core.acp.schema import (
    AUTH_REQUIRED,
    INVALID_PARAMS,
    NOT_FOUND,
    ClientCapabilities,
    ClientSessionCapabilities,
    ListSessionsRequest,
    ListSessionsResponse,
    McpServer,
    NewSessionRequest,
    NewSessionResponse,
    NoticeCapabilities,
    PromptResponse,
    ResumeSessionRequest,
    SessionUpdate,
    SystemPrompt,
    TextBlock,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.text import escape_controls
from crow_system.repository import find_folder_to_continue
from crow_system.signals import RECEIVED

from crow_cli.outcome import FAILED, SCHEMA_VERSION, USAGE, ContextUse, Outcome, TurnWatch
from crow_cli.terminal_client import TerminalClient

if TYPE_CHECKING:
    from crow_agent import Budget

Format = Literal["text", "json", "stream-json"]

LAST_SESSION = "last"
"""Stands for the latest session of the folder, in place of a session's id."""

CAPABILITIES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()), meta=OPTION_NAMES)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `crow run`."""

    style: Format = "text"
    terminal: int | None = None
    """The descriptor from which answers of a user are read; None if nobody can be asked."""
    resume: str = ""
    """The id of a session to continue, or LAST_SESSION."""
    mode: str | None = None
    """The mode of a session that is continued."""
    output_schema: dict[str, Any] | None = None
    """The JSON schema of the result, which is then printed alone."""
    timeout: float | None = None
    """Seconds after which the turn is cancelled."""
    servers: Sequence[McpServer] = ()
    roots: Sequence[str] = ()
    """Additional folders."""
    system: SystemPrompt | None = None
    budget: "Budget | None" = None
    """The limits that the app keeps to, for the sentence about one that was reached."""
    is_stored: bool = True


class JsonLinesClient(TerminalClient):
    """An ACP client that prints every update as one line of JSON, in the form that ACP sends it."""

    def show(self, update: SessionUpdate) -> None:
        super().show(update)
        click.echo(escape_controls(encode(update).decode()))


@asynccontextmanager
async def open_client(crow: Crow, options: RunOptions) -> AsyncGenerator[TerminalClient]:
    """Connect a client that prints to an agent of this app, both in memory."""
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow, unstable=options.system is not None).serve())
    client_class = JsonLinesClient if options.style == "stream-json" else TerminalClient
    client = client_class(ours, terminal=options.terminal, quiet=options.style != "text")
    try:
        async with client.serving():
            await client.initialize("crow run", CAPABILITIES)
            yield client
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()


async def run(crow: Crow, prompt: str, cwd: str, options: RunOptions | None = None) -> int:
    """Send the prompt, print the updates and the outcome, and return the exit code. Raises BrokenPipeError when the
    reader of the output has closed it."""
    options = options or RunOptions()
    crow.use(watch := TurnWatch())
    outcome, limit = watch.outcome, ""
    outcome.model = next((model.name for model in crow.models.values()), None)
    try:
        async with open_client(crow, options) as client:
            client.answer_apart = options.output_schema is not None
            try:
                limit = await take_turn(client, prompt, cwd, options, outcome)
            except RpcError as error:
                outcome.error = error.details or error.message
                outcome.exit_code = USAGE if error.code in (AUTH_REQUIRED, INVALID_PARAMS, NOT_FOUND) else FAILED
            if client.output_closed:
                raise client.output_closed
            client.end_line()
            if client.usage:
                outcome.context = ContextUse(client.usage.used, client.usage.size)
            outcome.text = client.text
            watch.conclude(limit=limit)
            print_outcome(outcome, options.style, is_told=outcome.error == client.last_notice)
    except asyncio.CancelledError:
        received = RECEIVED.get()  # without one it is Ctrl-C, which the command reports
        if options.style != "text" and received:
            outcome.stop_reason = "cancelled"
            watch.conclude(limit="")
            outcome.exit_code = 128 + received[0]
            outcome.error = f"Ended by the signal {signal.Signals(received[0]).name}."
            outcome.print()
        raise
    return outcome.exit_code


async def take_turn(client: TerminalClient, prompt: str, cwd: str, options: RunOptions, outcome: Outcome) -> str:
    """Open the session and send the prompt. Return a sentence about a limit that was reached, "" for none. Raises
    RpcError."""
    id = await open_session(client, cwd, options)
    outcome.session_id = id if options.is_stored else None
    if options.style == "stream-json":
        start = {"type": "start", "schema_version": SCHEMA_VERSION, "session_id": outcome.session_id, "cwd": cwd}
        start |= {"model": outcome.model}
        click.echo(escape_controls(msgspec.json.encode(start).decode()))
    if options.resume and options.mode:
        await client.set_mode(id, options.mode)
    schema = options.output_schema
    meta = {"crow": {"outputSchema": schema}} if schema is not None else None
    limit = ""
    with cancel_on_interrupt(client, id):
        turn = asyncio.ensure_future(client.prompt(id, prompt, meta))
        try:
            if not (await asyncio.wait([turn], timeout=options.timeout))[0]:
                limit = f"Stopped after {options.timeout:g} seconds (--timeout)."
                await client.cancel(id)
            response = await turn
        finally:
            turn.cancel()  # it has ended, unless a signal ends the process
    outcome.stop_reason = response.stop_reason
    match response.meta:
        case {"crow": {"stopped": {"by": str(stopped_by), "reason": str(reason)}}}:
            outcome.stopped_by, outcome.error = stopped_by, reason
            return limit
        case _:
            pass
    if meta and response.stop_reason == "end_turn":
        read_output(response, outcome)
    if response.stop_reason == "max_turn_requests" and options.budget:
        limit = limit or options.budget.describe_reached()
    return limit


async def open_session(client: TerminalClient, cwd: str, options: RunOptions) -> str:
    """Open a new session, or the session to continue, and return its id. Raises RpcError."""
    given: dict[str, Any] = {"cwd": cwd, "mcp_servers": [*options.servers]}
    given |= {"additional_directories": [*options.roots], "system_prompt": options.system or msgspec.UNSET}
    if not (resume := options.resume):
        opened: NewSessionResponse = await client.request("session/new", NewSessionRequest(**given))
        return opened.session_id
    if resume == LAST_SESSION:
        found: ListSessionsResponse = await client.request("session/list", ListSessionsRequest(cwd=cwd))
        if not found.sessions:
            raise RpcError(NOT_FOUND, "No session yet", details=f"There is no session in {cwd} to go on with.")
        last = next((one for one in found.sessions if one.cwd == cwd), found.sessions[0])
        resume, given["cwd"] = last.session_id, find_folder_to_continue(last.cwd, cwd)
    await client.request("session/resume", ResumeSessionRequest(session_id=resume, **given))
    return resume


def make_system_prompt(text: str, *, alone: bool) -> SystemPrompt:
    """Make a system prompt that is used `alone`, or added to crow's own."""
    return SystemPrompt(mode="override" if alone else "append", content=[TextBlock(text=text)])


def read_output(response: PromptResponse, outcome: Outcome) -> None:
    """Put the result of a turn into its outcome, or a sentence if there is none that fits."""
    match response.meta:
        case {"crow": {"output": value}}:
            outcome.output = value
        case {"crow": {"outputFaults": [*faults]}} if faults:
            times = f"{len(faults)} attempts" if len(faults) > 1 else "1 attempt"
            outcome.error = f"The result did not fit --output-schema in {times}: {faults[-1]}"
        case _:
            outcome.error = "There is no result for --output-schema: the turn ended without one."


def print_outcome(outcome: Outcome, style: Format, *, is_told: bool = False) -> None:
    """Print how the prompt ended: a JSON object, or in the style `text` a message unless it ended normally.

    With `is_told`, a notice has said already why it did not.
    """
    if style != "text":
        outcome.print()
        return
    if outcome.output is not msgspec.UNSET:
        click.echo(escape_controls(msgspec.json.encode(outcome.output).decode()))
    if outcome.error and not is_told:
        click.secho(f"crow: {escape_controls(outcome.error)}", fg="red", err=True)


@contextmanager
def cancel_on_interrupt(client: TerminalClient, session_id: str) -> Generator[None]:
    """Let the first Ctrl-C cancel the turn. The second one interrupts the process as usual."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    def cancel() -> None:
        system.stop_signal(loop, signal.SIGINT)
        tasks.append(asyncio.ensure_future(client.cancel(session_id)))

    with suppress(RuntimeError, ValueError):  # not in this thread
        system.on_signal(loop, signal.SIGINT, cancel)
    try:
        yield
    finally:
        with suppress(RuntimeError, ValueError):
            system.stop_signal(loop, signal.SIGINT)


def find_terminal() -> int | None:
    """Return a descriptor from which a person's answers can be read; None if nobody can be asked.

    It is standard input, or the terminal of the process where something else is piped into that. The questions are on
    standard error, so that has to be a terminal, too.
    """
    if not sys.stderr.isatty():
        return None
    if sys.stdin is not None and sys.stdin.isatty():
        return sys.stdin.fileno()
    with suppress(OSError):
        return system.open_terminal()
    return None
