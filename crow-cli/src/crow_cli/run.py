"""`crow run`: one prompt, as an ACP client in the same process."""

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
    ResumeSessionRequest,
    SessionUpdate,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent import Agent
from crow_core.app import Crow

from crow_cli.screen import Screen, spelled_out

Format = Literal["text", "json", "stream-json"]

LAST = "last"
"""Stands for the latest session of the folder."""

CAPABILITIES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))


class Lines(Screen):
    """Prints every update as it came over the wire, a JSON object a line."""

    def show(self, update: SessionUpdate) -> None:
        super().show(update)
        click.echo(spelled_out(encode(update).decode()))


@asynccontextmanager
async def screen(crow: Crow, style: Format, *, interactive: bool) -> AsyncGenerator[Screen]:
    """A screen in conversation with an agent of this app."""
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(Agent(theirs, crow).serve())
    kind = Lines if style == "stream-json" else Screen
    client = kind(ours, interactive=interactive, quiet=style != "text")
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
) -> int:
    """Say the prompt and print what comes; gives the exit code.

    `resume` is the id of the session to go on with, or LAST for the last one in this folder; `mode` is set there.
    Raises BrokenPipeError when nobody reads on.
    """
    async with screen(crow, style, interactive=interactive) as client:
        outcome: dict[str, Any] = {}
        try:
            id = outcome["sessionId"] = await open_session(client, cwd, resume)
            if resume and mode:
                await client.set_mode(id, mode)
            with cancelling_on_interrupt(client, id):
                response = await client.prompt(id, prompt)
            outcome["stopReason"] = response.stop_reason
        except RpcError as error:
            outcome["error"] = details(error)
        if client.unread:
            raise client.unread
        client.end_line()
        report(client, outcome, style)
    stop_reason = outcome.get("stopReason")
    return {"end_turn": 0, "cancelled": 130}.get(str(stop_reason), 1)


async def open_session(client: Screen, cwd: str, resume: str) -> str:
    """The id of a new session, or of the one to go on with. Raises RpcError."""
    if not resume:
        return (await client.new_session(cwd)).session_id
    if resume == LAST:
        found: ListSessionsResponse = await client.request("session/list", ListSessionsRequest(cwd=cwd))
        if not found.sessions:
            raise RpcError(NOT_FOUND, "No session yet", details=f"There is no session in {cwd} to go on with.")
        resume = found.sessions[0].session_id
    await client.request("session/resume", ResumeSessionRequest(session_id=resume, cwd=cwd))
    return resume


def report(client: Screen, outcome: dict[str, Any], style: Format) -> None:
    """How it ended: a JSON object, or a sentence where it did not end well."""
    if style != "text":
        outcome["text"] = client.text
        if client.usage:
            outcome["usage"] = {"used": client.usage.used, "size": client.usage.size}
        click.echo(spelled_out(msgspec.json.encode(outcome).decode()))
        return
    sentences = {
        "max_tokens": "The model's answer was cut at its length limit.",
        "max_turn_requests": "Stopped: the prompt took as many model requests as allowed (--max-requests).",
        "refusal": "The model refused.",
        "cancelled": "Cancelled.",
    }
    sentence = outcome.get("error") or sentences.get(outcome["stopReason"])
    if sentence:
        click.secho(f"crow: {sentence}", fg="red", err=True)


def details(error: RpcError) -> str:
    """The words for a person in an error answer."""
    match error.data:
        case {"details": str(text)}:
            return text
        case _:
            return error.message


@contextmanager
def cancelling_on_interrupt(client: Screen, session_id: str) -> Generator[None]:
    """The first Ctrl-C cancels the turn; the second ends the process as usual."""
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
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()
