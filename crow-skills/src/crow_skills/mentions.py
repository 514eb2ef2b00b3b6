"""Attach the files that a prompt mentions as `@path`, for clients that send only text: `crow.use(mentions)`."""

import asyncio
import base64
import mimetypes
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import crow_system as system
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import ContentBlock, ResourceBlock
from crow_core.agent.client_files import ClientWorkspace
from crow_core.app import Crow
from crow_core.content import attach_blocks, path_from_uri, to_blocks
from crow_core.masking import mask
from crow_core.messages.message import Message
from crow_core.session.session import Session
from crow_system.shortening import leave_out

from crow_skills.log_entries import get_user_text

MAX_MENTIONS = 50
"""Mentions of one prompt that are attached."""
MAX_TEXT = 200_000
"""Characters of text that the mentions of one prompt attach together."""
MAX_FILE_BYTES = 5_000_000
"""Bytes read from a file, and of the largest image that is attached."""
MAX_NAMES = 200
"""Names listed of a folder."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")

MENTION = re.compile(r"""(?<![\w@/.`])@(?:"([^"\n]+)"|'([^'\n]+)'|([^\s"'`@]+))""")
LINE_RANGE = re.compile(r"(?::(\d{1,7})(?:-(\d{1,7}))?|#L(\d{1,7})(?:-L?(\d{1,7}))?)\Z")
TRAILING_PUNCTUATION = ".,;:!?)]}>'\""
"""Characters behind a path that may belong to the sentence instead."""


@dataclass(frozen=True)
class Mention:
    """A mentioned file or folder that exists, or a new file that the client may have open."""

    path: str
    """The absolute path, links resolved, inside one of the session's roots."""
    first: int = 0
    """The first line that is mentioned, from 1; 0 for all lines."""
    last: int = 0
    """The last line that is mentioned; 0 for all lines."""

    @property
    def uri(self) -> str:
        """The `file:` URI, with its lines as the fragment `#L10-L20`."""
        lines = f"#L{self.first}" + (f"-L{self.last}" if self.last != self.first else "")
        return f"file://{quote(os.fsencode(self.path))}{lines if self.first else ''}"


def mentions(crow: Crow) -> None:
    """Attach to each prompt what it mentions: files, lines of files (`@a.py:10-20`), folders, images.

    A mention stays as typed if nothing exists there or if it is outside of the session's roots. Use it after
    `commands`.
    """

    @crow.before_prompt
    async def attach_mentions(message: Message, session: Session) -> Message | None:
        if "@" not in (text := get_user_text(message)):
            return None
        # Some clients send a file both as text and as a block.
        sent = {path_from_uri(block.resource.uri) for block in to_blocks(message) if isinstance(block, ResourceBlock)}
        mentioned = await asyncio.to_thread(lambda: dict.fromkeys(find_mentions(text, session)))
        new = [mention for mention in mentioned if path_from_uri(mention.uri) not in sent]
        blocks: list[dict[str, Any]] = []
        room = MAX_TEXT
        for mention in new[:MAX_MENTIONS]:
            if (block := await to_block(mention, session, room)) is None:
                continue
            room -= len(str(block.get("resource", {}).get("text", "")))
            blocks.append(block)
        return attach_blocks(message, convert_leniently(mask(blocks, session.secrets), list[ContentBlock]))


def find_mentions(text: str, session: Session) -> Iterator[Mention]:
    """Yield the mentions in a text that exist, in the order of the text, and those that the client may have open."""
    reads = session.client.capabilities.fs.read_text_file
    roots = [os.path.realpath(root) for root in session.folders.roots]
    for match in MENTION.finditer(text):
        target = match[1] or match[2] or match[3]
        for spelling in dict.fromkeys((target, target.rstrip(TRAILING_PUNCTUATION))):
            if mention := resolve_mention(spelling, session.cwd, roots):
                yield mention
                break
        else:
            spelling = target.rstrip(TRAILING_PUNCTUATION)
            if reads and (mention := resolve_mention(spelling, session.cwd, roots, may_be_new=True)):
                yield mention


def resolve_mention(target: str, cwd: str, roots: list[str], *, may_be_new: bool = False) -> Mention | None:
    """Return the file or folder at a path, which may end with lines. Return None if it is outside of `roots`, or
    neither exists nor is a new file in an existing folder."""
    lines = LINE_RANGE.search(target)
    spellings = [(target, 0, 0)]
    if lines:
        first = int(lines[1] or lines[3])
        spellings.append((target[: lines.start()], first, int(lines[2] or lines[4] or first)))
    for path, first, last in reversed(spellings) if may_be_new else spellings:
        try:
            real = os.path.realpath(os.path.join(cwd, os.path.expanduser(path)))
            is_inside = any(PurePath(real).is_relative_to(root) for root in roots)
            if path and is_inside and os.path.exists(os.path.dirname(real) if may_be_new else real) and first <= last:
                return Mention(real, first, last)
        except (OSError, ValueError):  # the name is too long or has a NUL character
            continue
    return None


async def to_block(mention: Mention, session: Session, room: int) -> dict[str, Any] | None:
    """Read a mention, from the client where it can, into a content block with at most `room` characters of text.

    Returns None for a file that neither the disk nor the client has.
    """
    workspace = ClientWorkspace(session, "")
    exists = await asyncio.to_thread(os.path.exists, mention.path)
    if workspace.reads and (not exists or await asyncio.to_thread(os.path.isfile, mention.path)):
        try:
            text = await workspace.read_text(mention.path)
        except OSError:
            text = None
        if text is not None:
            return to_resource_block(mention, text, room)
    return await asyncio.to_thread(read_from_disk, mention, room) if exists else None


def read_from_disk(mention: Mention, room: int) -> dict[str, Any]:
    """Read a mention from the disk into a content block: text, an image, or a note on why it is neither."""
    path = Path(mention.path)
    try:
        if path.is_dir():
            return to_resource_block(mention, list_folder(path), room)
        opened = os.open(path, os.O_RDONLY | system.NO_WAIT | system.NO_LINKS)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                return to_note(path, "a device, pipe or socket")
            size = os.fstat(opened).st_size
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        return to_note(path, f"cannot be read: {error.strerror}")
    kind = mimetypes.guess_type(path.name)[0]
    if kind in IMAGE_TYPES and size <= MAX_FILE_BYTES:
        return {"type": "image", "mimeType": kind, "data": base64.b64encode(data).decode(), "uri": mention.uri}
    if b"\0" in data[:8_192]:
        return to_note(path, f"{size:,} bytes that are not text")
    more = f"\n[{size - MAX_FILE_BYTES:,} bytes more]" if size > MAX_FILE_BYTES else ""
    return to_resource_block(mention, data.decode("utf-8-sig", "replace") + more, room)


def list_folder(folder: Path) -> str:
    """Return the sorted names in a folder, one a line, those of folders with a slash."""
    with os.scandir(folder) as entries:
        names = sorted(f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in entries)
    more = [f"({len(names) - MAX_NAMES:,} more)"] if len(names) > MAX_NAMES else []
    return "\n".join([*(os.fsencode(name).decode("utf-8", "replace") for name in names[:MAX_NAMES]), *more])


def to_resource_block(mention: Mention, text: str, room: int) -> dict[str, Any]:
    """Make a resource block of the mentioned lines of a text, cut after `room` characters."""
    if mention.first:
        text = "\n".join(text.split("\n")[mention.first - 1 : mention.last])
    return {"type": "resource", "resource": {"uri": mention.uri, "text": leave_out(text, max(room, 0))}}


def to_note(path: Path, about: str) -> dict[str, Any]:
    """Make a text block that says something about a file instead of its content."""
    return {"type": "text", "text": f"[{path}: {about}]"}
