"""A recording in the terminal, and one side of it played back against the other."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import click
import msgspec
from crow_core.acp.transports import LineTooLong, Transport, spawn, stdio

from crow_cli.check.validity import at, brief
from crow_cli.screen import spelled_out
from crow_cli.wire import Message, Said, Side, message_of

WIDTH = 160
"""Characters of what a message holds that are shown."""
OTHER: dict[Side, Side] = {"client": "agent", "agent": "client"}


@dataclass(eq=False)
class Asked:
    """A request that was seen."""

    at: float
    title: str
    method: str
    session: str
    answers: int = 0


@dataclass
class Viewer:
    """Turns the lines of a conversation, one after the other, into lines for a person; none of theirs can steer it."""

    method: str = "*"
    """A pattern, as the shell has it, of the methods to show; an answer belongs to its request's."""
    session: str = ""
    """How the id of the session to show begins; with the empty one, all is shown."""
    full: bool = False
    """Show messages whole."""
    asked: dict[tuple[Side, str], Asked] = field(default_factory=dict[tuple[Side, str], Asked])

    def view(self, said: Said) -> str:
        """What to print of a line; nothing where it was not asked for."""
        if said.message is None:
            wanted = self.method == "*" and not self.session
            words = said.raw.decode(errors="backslashreplace")[:WIDTH]
            return self.show(said, click.style("no message", fg="red"), words) if wanted else ""
        if "method" in said.message:
            asked, title = self.call(said, said.message), ""
            words = about(said.message.get("params"))
        else:
            asked, title = self.answer(said, said.message)
            failed = "error" in said.message
            words = ("error " if failed else "") + brief(said.message.get("error" if failed else "result"), WIDTH)
        return "" if not self.wants(asked) else self.show(said, spelled_out(asked.title) + title, words)

    def wants(self, asked: Asked) -> bool:
        return fnmatchcase(asked.method, self.method) and asked.session.startswith(self.session)

    def call(self, said: Said, message: Message) -> Asked:
        method, session = text(message["method"]), text(at(message, "params", "sessionId"))
        if "id" not in message:
            return Asked(said.at, method, method, session)
        asked = Asked(said.at, f"{method} #{brief(message['id'])}", method, session)
        self.asked[said.side, brief(message["id"])] = asked
        return asked

    def answer(self, said: Said, message: Message) -> tuple[Asked, str]:
        """What was asked, and our remark on the answer."""
        id = brief(message.get("id"))
        if (asked := self.asked.get((OTHER[said.side], id))) is None:
            return Asked(said.at, "", "", ""), click.style(f"an answer to nothing, #{spelled_out(id)}", fg="red")
        asked.answers += 1
        asked.session = asked.session or text(at(message, "result", "sessionId"))
        again = click.style(" once more", fg="red") if asked.answers > 1 else ""
        return asked, f"{again} after {took(said.at - asked.at)}"

    def show(self, said: Said, title: str, words: str) -> str:
        arrow = click.style("→", fg="cyan") if said.side == "client" else click.style("←", fg="green")
        first = f"{said.at:10.3f} {arrow} {title}"
        if not self.full:
            return f"{first}  {click.style(spelled_out(words), dim=True)}"
        try:
            whole = msgspec.json.format(said.raw, indent=2)
        except (msgspec.DecodeError, RecursionError):
            whole = said.raw
        parts = whole.decode(errors="backslashreplace").split("\n")
        return "\n".join([first, *(f"{'':13}{spelled_out(part)}" for part in parts)])

    def unanswered(self) -> list[str]:
        """The requests that got no answer by now."""
        return [
            f"{asked.at:10.3f} {spelled_out(asked.title)} was not answered"
            for asked in self.asked.values()
            if not asked.answers and self.wants(asked)
        ]


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def took(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def about(params: Any) -> str:
    """What a call is about; of an update, its kind and text."""
    update = at(params, "update")
    kind, words = text(at(update, "sessionUpdate")), at(update, "content", "text")
    if not kind:
        return brief(params, WIDTH)
    return f"{kind} {brief(words if isinstance(words, str) else update, WIDTH)}"


# Playing one side


class Deviation(Exception):
    """The other side does not say what it said when it was recorded."""


class Player:
    """One side of a recording, said again to whoever plays the other.

    What the other side chose then and chooses anew now, ids of its requests and of its sessions, is exchanged in what
    we say. It may say more than it did, and its requests and answers in another order.
    """

    def __init__(self, side: Side, transport: Transport, hear: Callable[[Side, bytes], None]) -> None:
        self.side: Side = side
        self.transport = transport
        self.hear = hear
        """Told of every line, and who said it."""
        self.ids: dict[str, Any] = {}
        """Their requests' ids now, by those then."""
        self.sessions: dict[str, str] = {}
        """The same of sessions."""
        self.waiting: list[Message] = []
        """What they said that was not called for yet."""

    async def play(self, recording: Iterable[Said], speed: float = 0.0) -> None:
        """Say our lines and wait for theirs; with the pauses of then, so many times shorter. Raises Deviation."""
        before = 0.0
        for said in recording:
            if speed:
                await asyncio.sleep(max(0.0, said.at - before) / speed)
            before = said.at
            if said.side == self.side:
                self.say(said)
            elif said.message is not None and self.waits_for(said.message):
                self.learn(said.message, await self.await_like(said.message))
        await self.transport.drain()

    def say(self, said: Said) -> None:
        raw = said.raw
        if said.message is not None:
            message = self.translated(said.message)
            if "method" not in message and brief(message.get("id")) in self.ids:
                message = {**message, "id": self.ids[brief(message.get("id"))]}
            raw = raw if message == said.message else msgspec.json.encode(message)
        self.transport.write(raw + b"\n")
        self.hear(self.side, raw)

    def waits_for(self, message: Message) -> bool:
        """An agent's updates come as its model has it; all else has its place."""
        return self.side == "agent" or "id" in message

    async def await_like(self, message: Message) -> Message:
        """The first thing they say that is the same request, notification, or answer. Raises Deviation."""
        wanted = like(message)
        while not (found := next((heard for heard in self.waiting if like(heard) == wanted), None)):
            try:
                heard = message_of(await self.line())
            except EOFError:
                name = text(message.get("method")) or f"the answer to #{brief(message.get('id'))}"
                raise Deviation(f"the {OTHER[self.side]} ended before {name} came") from None
            if heard is not None and self.waits_for(heard):
                self.waiting.append(heard)
        self.waiting.remove(found)
        return found

    async def line(self) -> bytes:
        """Their next line. Raises EOFError."""
        while True:
            try:
                line = bytes(await self.transport.readline()).rstrip(b"\n")
            except LineTooLong:
                continue
            if not line:
                raise EOFError
            self.hear(OTHER[self.side], line)
            return line

    def learn(self, then: Message, now: Message) -> None:
        if "method" in then:
            if "id" in then:
                self.ids[brief(then["id"])] = now["id"]
        elif (session := text(at(then, "result", "sessionId"))) and (new := text(at(now, "result", "sessionId"))):
            self.sessions[session] = new

    def translated(self, value: Any) -> Any:
        """The same with the sessions of now."""
        if isinstance(value, list):
            return [self.translated(item) for item in cast("list[Any]", value)]
        if not isinstance(value, dict):
            return value
        translated = {key: self.translated(item) for key, item in cast("Message", value).items()}
        if session := self.sessions.get(text(translated.get("sessionId"))):
            translated["sessionId"] = session
        return translated

    async def listen_on(self) -> None:
        """Hear them out."""
        try:
            while True:
                await self.line()
        except EOFError:
            pass


def like(message: Message) -> tuple[Any, ...]:
    """What two messages have in common that have the same place in a conversation."""
    if "method" in message:
        return message["method"], "id" in message
    return None, brief(message.get("id"))


# What the command does


def show(recording: Iterable[Said], viewer: Viewer, speed: float, *, step: bool) -> None:
    """Print a recording; what was never answered comes last."""
    before = 0.0
    for said in recording:
        if speed:
            time.sleep(max(0.0, said.at - before) / speed)
        before = said.at
        if not (line := viewer.view(said)):
            continue
        click.echo(line)
        if step and click.getchar() == "q":
            return
    for line in viewer.unanswered():
        click.secho(line, fg="red")


async def play(recording: Sequence[Said], side: Side, command: Sequence[str], viewer: Viewer, speed: float) -> int:
    """Play one side, and show the conversation: an agent on standard error, since its output is the client's."""
    began = time.monotonic()

    def hear(speaker: Side, raw: bytes) -> None:
        if line := viewer.view(Said(time.monotonic() - began, speaker, raw, message_of(raw))):
            click.echo(line, err=side == "agent")

    transport = await stdio() if side == "agent" else await spawn(command[0], command[1:])
    player = Player(side, transport, hear)
    try:
        await player.play(recording, speed)
        if side == "agent":
            await player.listen_on()
    except (Deviation, OSError) as deviation:
        click.secho(f"crow: it goes another way: {deviation}.", fg="red", err=True)
        return 1
    finally:
        await transport.close()
    return 0
