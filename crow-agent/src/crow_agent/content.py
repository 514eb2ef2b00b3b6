"""Conversion of a program's values to the content blocks of a prompt."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
from crow_core.acp.schema import (
    AudioBlock,
    ContentBlock,
    ImageBlock,
    PromptCapabilities,
    ResourceBlock,
    ResourceContents,
    ResourceLinkBlock,
    TextBlock,
)

Part: TypeAlias = str | Path | bytes | ContentBlock
"""A text, a file, the bytes of an image, or a content block of ACP."""
PromptContent: TypeAlias = Part | Sequence[Part]

IMAGE_STARTS = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
"""The first bytes of image files, and their types."""


def to_blocks(prompt: PromptContent, capabilities: PromptCapabilities) -> list[ContentBlock]:
    """Convert a prompt to content blocks that the agent takes.

    Raises OSError for an unreadable file, ValueError for bytes that are not an image, TypeError for anything else.
    """
    parts = [prompt] if isinstance(prompt, (str, Path, bytes)) or not isinstance(prompt, Sequence) else prompt
    return [to_block(part, capabilities) for part in parts]


def to_block(part: Part, capabilities: PromptCapabilities) -> ContentBlock:
    """Convert one part of a prompt. A file is sent whole where the agent takes that, else as a link."""
    if isinstance(part, str):
        return TextBlock(text=part)
    if isinstance(part, bytes):
        kind = next((kind for start, kind in IMAGE_STARTS.items() if part.startswith(start)), None)
        if kind is None:
            raise ValueError("These bytes are no image. Give a file as a pathlib.Path, a text as a str.")
        return ImageBlock(data=base64.b64encode(part).decode(), mime_type=kind)
    if not isinstance(part, Path):
        if not isinstance(part, msgspec.Struct):
            raise TypeError(
                f"{part!r} cannot be part of a prompt. Give a text, a pathlib.Path, the bytes of an image, a content "
                "block of ACP, or a list of these."
            )
        return part
    import mimetypes  # imported here because few prompts have files

    path = part.expanduser().absolute()
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    content = path.read_bytes()
    if kind.startswith("image/") and capabilities.image:
        return ImageBlock(data=base64.b64encode(content).decode(), mime_type=kind, uri=path.as_uri())
    if kind.startswith("audio/") and capabilities.audio:
        return AudioBlock(data=base64.b64encode(content).decode(), mime_type=kind)
    if not capabilities.embedded_context:
        return ResourceLinkBlock(name=path.name, uri=path.as_uri(), mime_type=kind, size=len(content))
    try:
        contents = ResourceContents(uri=path.as_uri(), mime_type=kind, text=content.decode())
    except UnicodeDecodeError:
        contents = ResourceContents(uri=path.as_uri(), mime_type=kind, blob=base64.b64encode(content).decode())
    return ResourceBlock(resource=contents)
