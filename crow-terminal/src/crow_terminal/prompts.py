"""Make the content of a prompt of what the user has typed: text, images, files, commands that were run."""

import base64
import mimetypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

from crow_core.acp.schema import ContentBlock, ImageBlock, ResourceLinkBlock, TextBlock

from crow_terminal.blocks import CommandOutput
from crow_terminal.state import Abilities

MENTION = re.compile(r"(?:^|(?<=\s))@(\S+)")
PATH = re.compile(r"(?:^|(?<=\s))(?:@|file://)?('[^']+'|\"[^\"]+\"|(?:\\.|\S)+\.(?:png|jpe?g|gif|webp))(?=\s|$)", re.I)
IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
MAX_IMAGE_BYTES = 10_000_000
MAX_OUTPUT = 20_000
"""Characters of a command's output that the agent is told: the last ones."""


def make_prompt(text: str, outputs: Sequence[CommandOutput], cwd: str, abilities: Abilities) -> list[ContentBlock]:
    """Make the content of a prompt. Reads the images that it names."""
    blocks: list[ContentBlock] = [TextBlock(text=describe_output(output)) for output in outputs]
    blocks.append(TextBlock(text=text))
    if abilities.images:
        blocks += [image for path in find_images(text, cwd) if (image := read_image(path))]
    if abilities.name.lower() != "crow":  # which reads what a prompt mentions itself
        for name in dict.fromkeys(MENTION.findall(text)):
            path = Path(cwd, name)
            if path.exists():
                blocks.append(ResourceLinkBlock(name=name, uri=path.resolve().as_uri()))
    return blocks


def describe_output(output: CommandOutput) -> str:
    """Tell the agent of a command that the user ran."""
    text = output.output[-MAX_OUTPUT:].rstrip()
    end = f", which ended with exit code {output.code}" if output.code else ""
    marks = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
    return f"I ran this command{end}:\n\n{marks}\n$ {output.command}\n{text}\n{marks}\n\n"


def find_images(text: str, cwd: str) -> list[Path]:
    """Find the paths of images in a text, also quoted or escaped, as terminals paste what is dropped on them."""
    found: dict[Path, None] = {}
    for word in PATH.findall(text):
        name = word[1:-1] if word[:1] in "'\"" else re.sub(r"\\(.)", r"\1", word)
        path = Path(cwd, os.path.expanduser(name))
        if mimetypes.guess_type(path.name)[0] in IMAGES and path.is_file():
            found[path] = None
    return [*found]


def read_image(path: Path) -> ImageBlock | None:
    """Read an image; None if it cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            return None
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
    return ImageBlock(data=data, mime_type=str(mimetypes.guess_type(path.name)[0]), uri=path.resolve().as_uri())
