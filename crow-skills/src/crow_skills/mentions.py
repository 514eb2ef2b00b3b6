"""`crow.use(mentions)`: `@path` in a prompt brings the file along, for clients that send only text."""

import asyncio
import base64
import mimetypes
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from crow_core.acp.decoding import lenient
from crow_core.acp.schema import ContentBlock, ResourceBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks, path_from_uri, to_blocks
from crow_core.editor import Editor
from crow_core.masking import mask
from crow_core.messages import Message
from crow_core.session import Session

from crow_skills.extension import said

MOST = 50
"""Mentions that one prompt may have."""
ROOM = 200_000
"""Characters of text that they take in together."""
LARGEST = 5_000_000
"""Bytes of a file that is read, and of an image."""
ENTRIES = 200
"""Names of a folder."""
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")

MENTION = re.compile(r"""(?<![\w@/.`])@(?:"([^"\n]+)"|'([^'\n]+)'|([^\s"'`@]+))""")
RANGE = re.compile(r"(?::(\d{1,7})(?:-(\d{1,7}))?|#L(\d{1,7})(?:-L?(\d{1,7}))?)\Z")
STUCK = ".,;:!?)]}>'\""
"""What the end of a sentence may leave behind a path."""


@dataclass(frozen=True)
class Mention:
    """A file or a folder that is there."""

    path: str
    """Absolute, links resolved, inside one of the session's roots."""
    first: int = 0
    """The lines that are meant, from 1; 0 for all of them."""
    last: int = 0

    @property
    def uri(self) -> str:
        lines = f"#L{self.first}" + (f"-L{self.last}" if self.last != self.first else "")
        return f"file://{quote(os.fsencode(self.path))}{lines if self.first else ''}"


def mentions(crow: Crow) -> None:
    """Put what a prompt mentions behind it: files, lines of them (`@a.py:10-20`), folders, images. What is not there,
    or not inside the session's roots, stays as it was typed.

    To be used after `commands`.
    """

    @crow.before_prompt
    async def embed(message: Message, session: Session) -> Message | None:
        if "@" not in (text := said(message)):
            return None
        here = {path_from_uri(block.resource.uri) for block in to_blocks(message) if isinstance(block, ResourceBlock)}
        mentioned = await asyncio.to_thread(lambda: dict.fromkeys(find(text, session)))
        found = [mention for mention in mentioned if path_from_uri(mention.uri) not in here]  # some clients send both
        blocks: list[dict[str, Any]] = []
        room = ROOM
        for mention in found[:MOST]:
            block = await content(mention, session, room)
            room -= len(str(block.get("resource", {}).get("text", "")))
            blocks.append(block)
        return attach_blocks(message, lenient(mask(blocks, session.secrets), list[ContentBlock]))


def find(text: str, session: Session) -> Iterator[Mention]:
    """What a text mentions that is there."""
    roots = [os.path.realpath(root) for root in session.folders.roots]
    for match in MENTION.finditer(text):
        word = match[1] or match[2] or match[3]
        for each in dict.fromkeys((word, word.rstrip(STUCK))):
            if mention := resolve(each, session.cwd, roots):
                yield mention
                break


def resolve(word: str, cwd: str, roots: list[str]) -> Mention | None:
    """The file that a word means, perhaps with lines behind it."""
    lines = RANGE.search(word)
    spellings = [(word, 0, 0)]
    if lines:
        first = int(lines[1] or lines[3])
        spellings.append((word[: lines.start()], first, int(lines[2] or lines[4] or first)))
    for path, first, last in spellings:
        try:
            real = os.path.realpath(os.path.join(cwd, os.path.expanduser(path)))
            inside = any(os.path.commonpath([root, real]) == root for root in roots)
            if path and inside and os.path.exists(real) and first <= last:
                return Mention(real, first, last)
        except (OSError, ValueError):  # a name too long, a NUL
            continue
    return None


async def content(mention: Mention, session: Session, room: int) -> dict[str, Any]:
    """What stands there, as a block, with at most `room` characters of text."""
    editor = Editor(session, "")
    if editor.reads and await asyncio.to_thread(os.path.isfile, mention.path):
        try:
            text = await editor.read_text(mention.path)
        except OSError:
            text = None
        if text is not None:
            return as_block(mention, text, room)
    return await asyncio.to_thread(from_disk, mention, room)


def from_disk(mention: Mention, room: int) -> dict[str, Any]:
    path = Path(mention.path)
    try:
        if path.is_dir():
            return as_block(mention, listing(path), room)
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                return note(path, "a device, pipe or socket")
            size = os.fstat(opened).st_size
            data = file.read(LARGEST)
    except OSError as error:
        return note(path, f"cannot be read: {error.strerror}")
    kind = mimetypes.guess_type(path.name)[0]
    if kind in IMAGES and size <= LARGEST:
        return {"type": "image", "mimeType": kind, "data": base64.b64encode(data).decode(), "uri": mention.uri}
    if b"\0" in data[:8_192]:
        return note(path, f"{size:,} bytes that are not text")
    more = f"\n[{size - LARGEST:,} bytes more]" if size > LARGEST else ""
    return as_block(mention, data.decode("utf-8-sig", "replace") + more, room)


def listing(folder: Path) -> str:
    """The names in a folder, sorted, folders with a slash."""
    with os.scandir(folder) as found:
        names = sorted(entry.name + "/" * entry.is_dir(follow_symlinks=False) for entry in found)
    more = [f"({len(names) - ENTRIES:,} more)"] if len(names) > ENTRIES else []
    return "\n".join([*(os.fsencode(name).decode("utf-8", "replace") for name in names[:ENTRIES]), *more])


def as_block(mention: Mention, text: str, room: int) -> dict[str, Any]:
    if mention.first:
        text = "\n".join(text.split("\n")[mention.first - 1 : mention.last])
    room = max(room, 0)
    if len(text) > room:
        text = f"{text[:room]}\n[{len(text) - room:,} characters left out]"
    return {"type": "resource", "resource": {"uri": mention.uri, "text": text}}


def note(path: Path, about: str) -> dict[str, Any]:
    return {"type": "text", "text": f"[{path}: {about}]"}
