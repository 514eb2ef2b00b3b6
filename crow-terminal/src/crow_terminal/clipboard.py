"""Read an image from the system's clipboard, by the programs that can."""

import asyncio
import base64
import re
import shutil
from collections.abc import Sequence

import crow_system as system
from crow_core.acp.schema import ImageBlock

from crow_terminal.prompt_content import MAX_IMAGE_BYTES

TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("wl-paste", "--no-newline", "--type", each) for each in TYPES),
    *(("xclip", "-selection", "clipboard", "-target", each, "-out") for each in TYPES),
    ("pngpaste", "-"),
    ("osascript", "-e", "get the clipboard as «class PNGf»"),
)
"""The commands that print the image, in the order in which they are tried: Wayland, X11, macOS."""
TIMEOUT = 5.0
"""Seconds for all commands together: the program that owns the clipboard may not answer."""
APPLE_DATA = re.compile(rb"\s*\xc2\xabdata PNGf([0-9A-Fa-f]+)\xc2\xbb\s*")
"""The output of osascript."""


class NoImage(Exception):
    """There is no image to paste; the message is a sentence for the user."""


async def read_clipboard() -> ImageBlock:
    """Read the image from the clipboard. Raises NoImage."""
    commands = [command for command in COMMANDS if shutil.which(command[0])]
    if not commands:
        raise NoImage("To paste images, install wl-clipboard (Wayland) or xclip (X11).")
    try:
        async with asyncio.timeout(TIMEOUT):
            for command in commands:
                data = await read_output(command, 2 * MAX_IMAGE_BYTES + 100)  # osascript takes two characters a byte
                if apple := APPLE_DATA.fullmatch(data):
                    data = bytes.fromhex(apple[1].decode())
                if mime_type := detect_type(data):
                    if len(data) > MAX_IMAGE_BYTES:
                        raise NoImage(f"The image in the clipboard is larger than {MAX_IMAGE_BYTES // 1_000_000} MB.")
                    return ImageBlock(data=base64.b64encode(data).decode(), mime_type=mime_type)
    except TimeoutError:
        raise NoImage(f"The clipboard did not answer within {TIMEOUT:g} seconds.") from None
    raise NoImage("There is no image in the clipboard.")


def detect_type(data: bytes) -> str:
    """Return the media type of an image by its first bytes; empty for anything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


async def read_output(command: Sequence[str], limit: int) -> bytes:
    """Run a command without a shell and return its output, up to some more than `limit` bytes; empty if it fails."""
    output = Output(limit)
    try:
        process, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: output,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            creationflags=system.NEW_GROUP,
        )
    except OSError:
        return b""
    try:
        await output.complete.wait()
        if len(output.data) <= limit:
            await output.exited.wait()
        return b"" if process.get_returncode() else bytes(output.data)
    finally:
        system.kill_group(process.get_pid())
        await output.exited.wait()
        process.close()  # also the pipe, whose other end another process may hold open


class Output(asyncio.SubprocessProtocol):
    """The output of a process, until it ends or is longer than a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()
        self.complete = asyncio.Event()
        self.exited = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.data += data
        if len(self.data) > self.limit:
            self.complete.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.complete.set()

    def process_exited(self) -> None:
        self.exited.set()
