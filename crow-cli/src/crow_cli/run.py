"""`crow run`: send one prompt, as an ACP client in the same process as the agent."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Literal

import click
import msgspec
from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import encode
from crow_core.acp.schema import (
    NOT_FOUND,
    ClientCapabilities,
    ClientSessionCapabilities,
    ListSessionsRequest,
    ListSessionsResponse,
    NoticeCapabilities,
    PromptResponse,
    ResumeSessionRequest,
    SessionUpdate,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent import AcpAgent
from crow_core.app import Crow

from crow_cli.console import escape_controls
from crow_cli.terminal_client import TerminalClient

Format = Literal["text", "json", "stream-json"]

LAST_SESSION = "last"
"""Stands for the latest session of the folder, in place of a session's id."""

CAPABILITIES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))


class JsonLinesClient(TerminalClient):
    """An ACP client that prints every update as one line of JSON, in the form that ACP sends it."""

    def show(self, update: SessionUpdate) -> None:
        super().show(update)
        click.echo(escape_controls(encode(update).decode()))


@asynccontextmanager
async def open_client(crow: Crow, style: Format, *, interactive: bool) -> AsyncGenerator[TerminalClient]:
    """Connect a client that prints to an agent of this app, both in memory."""
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    client_class = JsonLinesClient if style == "stream-json" else TerminalClient
    client = client_class(ours, interactive=interactive, quiet=style != "text")
    try:
        async with client.serving():
            await client.initialize("crow run", CAPABILITIES)
            yield client
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()


async def run(
    crow: Crow,
    prompt: str,
    cwd: str,
    style: Format = "text",
    *,
    interactive: bool = False,
    resume: str = "",
    mode: str | None = None,
    output_schema: dict[str, Any] | None = None,
) -> int:
    """Send the prompt, print the updates, and return the exit code.

    `resume` is the id of a session to continue, or LAST_SESSION; `mode` is then set in that session. `output_schema` is
    the JSON schema of the result, which is then printed alone. Raises BrokenPipeError when the reader of the output has
    closed it.
    """
    meta = {"crow": {"outputSchema": output_schema}} if output_schema is not None else None
    async with open_client(crow, style, interactive=interactive) as client:
        client.answer_apart = meta is not None
        outcome: dict[str, Any] = {}
        try:
            id = outcome["sessionId"] = await open_session(client, cwd, resume)
            if resume and mode:
                await client.set_mode(id, mode)
            with cancel_on_interrupt(client, id):
                response = await client.prompt(id, prompt, meta)
            outcome["stopReason"] = response.stop_reason
            if meta and response.stop_reason == "end_turn":
                outcome |= read_output(response)
        except RpcError as error:
            outcome["error"] = describe_error(error)
        if client.output_closed:
            raise client.output_closed
        client.end_line()
        print_outcome(client, outcome, style)
    stop_reason = outcome.get("stopReason") if "error" not in outcome else "error"
    return {"end_turn": 0, "cancelled": 130}.get(str(stop_reason), 1)


async def open_session(client: TerminalClient, cwd: str, resume: str) -> str:
    """Open a new session, or the session to continue, and return its id. Raises RpcError."""
    if not resume:
        return (await client.new_session(cwd)).session_id
    if resume == LAST_SESSION:
        found: ListSessionsResponse = await client.request("session/list", ListSessionsRequest(cwd=cwd))
        if not found.sessions:
            raise RpcError(NOT_FOUND, "No session yet", details=f"There is no session in {cwd} to go on with.")
        resume = found.sessions[0].session_id
    await client.request("session/resume", ResumeSessionRequest(session_id=resume, cwd=cwd))
    return resume


def read_output(response: PromptResponse) -> dict[str, Any]:
    """Return the result of a turn as `output`, or a sentence as `error` if there is none that fits."""
    match response.meta:
        case {"crow": {"output": value}}:
            return {"output": value}
        case {"crow": {"outputFaults": [*faults]}} if faults:
            times = f"{len(faults)} attempts" if len(faults) > 1 else "1 attempt"
            return {"error": f"The result did not fit --output-schema in {times}: {faults[-1]}"}
        case _:
            return {"error": "There is no result for --output-schema: the turn ended without one."}


def print_outcome(client: TerminalClient, outcome: dict[str, Any], style: Format) -> None:
    """Print how the prompt ended: a JSON object, or in the style `text` a message unless it ended normally."""
    if style != "text":
        outcome["text"] = client.text
        if client.denied:
            outcome["denied"] = client.denied
        if client.usage:
            outcome["usage"] = {"used": client.usage.used, "size": client.usage.size}
        click.echo(escape_controls(msgspec.json.encode(outcome).decode()))
        return
    sentences = {
        "max_tokens": "The model's answer was cut at its length limit.",
        "max_turn_requests": "Stopped: the prompt took as many model requests as allowed (--max-requests).",
        "refusal": "The model refused.",
        "cancelled": "Cancelled.",
    }
    if "output" in outcome:
        click.echo(escape_controls(msgspec.json.encode(outcome["output"]).decode()))
    sentence = outcome.get("error") or sentences.get(outcome["stopReason"])
    if sentence:
        click.secho(f"crow: {escape_controls(sentence)}", fg="red", err=True)


def describe_error(error: RpcError) -> str:
    """Return the message for a person in an error answer."""
    match error.data:
        case {"details": str(text)}:
            return text
        case _:
            return error.message


@contextmanager
def cancel_on_interrupt(client: TerminalClient, session_id: str) -> Generator[None]:
    """Let the first Ctrl-C cancel the turn. The second one interrupts the process as usual."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        tasks.append(asyncio.ensure_future(client.cancel(session_id)))

    with suppress(NotImplementedError, RuntimeError, ValueError):  # not on this platform, or not in this thread
        loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        yield
    finally:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


def is_interactive() -> bool:
    """Tell whether a person can be asked: standard input and standard error are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()
