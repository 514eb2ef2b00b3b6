"""Play one side of a recording against a real client or agent."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import click
import msgspec
from crow_core.acp.transports import LineTooLong, Transport, spawn, stdio
from crow_core.text import escape_controls

from crow_acp_tools.check.validation import get_path, str_or_empty, to_short_json
from crow_acp_tools.recording.file import OTHER_SIDE, Message, RecordedLine, Side, parse_message
from crow_acp_tools.recording.viewer import RecordingViewer


class Deviation(Exception):
    """The other side ended before it sent what the recording expects."""


class RecordingPlayer:
    """Sends the lines of one side of a recording again, and waits for those of the other side.

    The other side may choose other ids for its requests and sessions: they are replaced in the lines that are sent. It
    may also send more messages than recorded, and its requests and answers in another order.
    """

    def __init__(self, side: Side, transport: Transport, on_line: Callable[[Side, bytes], None]) -> None:
        self.side: Side = side
        self.transport = transport
        self.on_line = on_line
        """Called with the side and the bytes of every line."""
        self.request_ids: dict[str, Any] = {}
        """The other side's recorded request ids, with its present ids."""
        self.session_ids: dict[str, str] = {}
        """The recorded session ids, with the present ids."""
        self.unmatched: list[Message] = []
        """Received messages that no recorded line has matched yet."""

    async def play(self, recording: Iterable[RecordedLine], speed: float = 0.0) -> None:
        """Send this side's lines and wait for the other side's. `speed` divides the recorded pauses; 0 omits them.

        Raises Deviation.
        """
        before = 0.0
        for line in recording:
            if speed:
                await asyncio.sleep(max(0.0, line.at - before) / speed)
            before = line.at
            if line.side == self.side:
                self.send(line)
            elif line.message is not None and self.is_awaited(line.message):
                self.map_ids(line.message, await self.wait_for_match(line.message))
        await self.transport.drain()

    def send(self, line: RecordedLine) -> None:
        raw = line.raw
        if line.message is not None:
            message = self.translate(line.message)
            if "method" not in message and to_short_json(message.get("id")) in self.request_ids:
                message = {**message, "id": self.request_ids[to_short_json(message.get("id"))]}
            raw = raw if message == line.message else msgspec.json.encode(message)
        self.transport.write(raw + b"\n")
        self.on_line(self.side, raw)

    def is_awaited(self, message: Message) -> bool:
        """Tell whether to wait for a recorded message of the other side. An agent's notifications vary too much."""
        return self.side == "agent" or "id" in message

    async def wait_for_match(self, message: Message) -> Message:
        """Wait for the first message that is the same request, notification or answer. Raises Deviation."""
        wanted = match_key(message)
        while not (found := next((received for received in self.unmatched if match_key(received) == wanted), None)):
            try:
                received = parse_message(await self.read_line())
            except EOFError:
                name = str_or_empty(message.get("method")) or f"the answer to #{to_short_json(message.get('id'))}"
                raise Deviation(f"the {OTHER_SIDE[self.side]} ended before {name} came") from None
            if received is not None and self.is_awaited(received):
                self.unmatched.append(received)
        self.unmatched.remove(found)
        return found

    async def read_line(self) -> bytes:
        """Read the next line of the other side. Raises EOFError."""
        while True:
            try:
                line = bytes(await self.transport.readline()).rstrip(b"\n")
            except LineTooLong:
                continue
            if not line:
                raise EOFError
            self.on_line(OTHER_SIDE[self.side], line)
            return line

    def map_ids(self, recorded: Message, present: Message) -> None:
        if "method" in recorded:
            if "id" in recorded:
                self.request_ids[to_short_json(recorded["id"])] = present["id"]
        elif (old := str_or_empty(get_path(recorded, "result", "sessionId"))) and (
            new := str_or_empty(get_path(present, "result", "sessionId"))
        ):
            self.session_ids[old] = new

    def translate(self, value: Any) -> Any:
        """Replace the recorded session ids in any JSON by the present ids."""
        if isinstance(value, list):
            return [self.translate(item) for item in cast("list[Any]", value)]
        if not isinstance(value, dict):
            return value
        translated = {key: self.translate(item) for key, item in cast("Message", value).items()}
        if session := self.session_ids.get(str_or_empty(translated.get("sessionId"))):
            translated["sessionId"] = session
        return translated

    async def read_to_end(self) -> None:
        """Read and report lines until the other side closes."""
        try:
            while True:
                await self.read_line()
        except EOFError:
            pass


def match_key(message: Message) -> tuple[Any, ...]:
    """Return a key that is equal for messages with the same place in a conversation."""
    if "method" in message:
        return message["method"], "id" in message
    return None, to_short_json(message.get("id"))


async def play_side(
    recording: Sequence[RecordedLine], side: Side, command: Sequence[str], viewer: RecordingViewer, speed: float
) -> int:
    """Play one side, print the conversation, and return the exit code.

    When playing the agent, print on standard error: standard output goes to the client.
    """
    began = time.monotonic()

    def on_line(speaker: Side, raw: bytes) -> None:
        if line := viewer.render(RecordedLine(time.monotonic() - began, speaker, raw, parse_message(raw))):
            click.echo(line, err=side == "agent")

    transport = await stdio() if side == "agent" else await spawn(command[0], command[1:])
    player = RecordingPlayer(side, transport, on_line)
    try:
        await player.play(recording, speed)
        if side == "agent":
            await player.read_to_end()
    except (Deviation, OSError) as deviation:
        text = f"crow: the conversation differs from the recording: {deviation}."
        click.secho(escape_controls(text), fg="red", err=True)
        return 1
    finally:
        await transport.close()
    return 0
