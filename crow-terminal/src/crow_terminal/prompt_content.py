"""Make the content of a prompt of what the user has typed: text, images, files, commands that were run."""

import base64
import mimetypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from crow_core.acp.schema import ContentBlock, ImageBlock, ResourceLinkBlock, TextBlock

from crow_terminal.abilities import Abilities
from crow_terminal.blocks import CommandOutput
from crow_terminal.told_outputs import describe_output

MENTION = re.compile(r"""(?:^|(?<=\s))@(?:"([^"\n]+)"|'([^'\n]+)'|(\S+))""")
PATH = re.compile(
    r"(?:^|(?<=\s))(@|file://(?:localhost)?)?('[^']+'|\"[^\"]+\"|(?:\\.|\S)+\.(?:png|jpe?g|gif|webp))(?=\s|$)", re.I
)
IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
MAX_IMAGE_BYTES = 10_000_000


def make_prompt(
    text: str, outputs: Sequence[CommandOutput], cwd: str, abilities: Abilities, images: Sequence[ImageBlock] = ()
) -> list[ContentBlock]:
    """Make the content of a prompt with images of the clipboard. Reads the images that it names."""
    blocks: list[ContentBlock] = [
        TextBlock(text=describe_output(output.command, output.output, output.code)) for output in outputs
    ]
    blocks.append(TextBlock(text=text))
    if abilities.images:
        blocks += images
        blocks += [image for path in find_images(text, cwd) if (image := read_image(path))]
    if abilities.name.lower() != "crow":  # which reads what a prompt mentions itself
        for name in dict.fromkeys("".join(groups) for groups in MENTION.findall(text)):
            path = Path(cwd, name)
            if path.exists():
                blocks.append(ResourceLinkBlock(name=name, uri=path.resolve().as_uri()))
    return blocks


def find_images(text: str, cwd: str) -> list[Path]:
    """Find the paths of images in a text, also quoted or escaped, as terminals paste dropped files."""
    found: dict[Path, None] = {}
    for scheme, word in PATH.findall(text):
        if scheme.lower().startswith("file:"):
            name = unquote(word)
        else:
            name = word[1:-1] if word[:1] in "'\"" else re.sub(r"\\(.)", r"\1", word)
        if is_image(path := Path(cwd, os.path.expanduser(name))):
            found[path] = None
    return [*found]


def find_large_images(text: str, cwd: str) -> list[str]:
    """Return the names of the images in a text that are too large to be sent."""
    found: list[str] = []
    for path in find_images(text, cwd):
        with suppress(OSError):
            if path.stat().st_size > MAX_IMAGE_BYTES:
                found.append(path.name)
    return found


def find_pasted_image(text: str, cwd: str) -> str:
    """Return the path of an image as a prompt names it, if a paste is that: a path or a file URL; else nothing."""
    text = text.strip()
    if not text or len(text) > 4_096 or "\n" in text:
        return ""
    whole = Path(cwd, os.path.expanduser(text))  # which may have blanks
    found = [whole] if is_image(whole) else find_images(text, cwd) if PATH.fullmatch(text) else []
    name = re.sub(r"""([\s\\'"])""", r"\\\1", str(found[0])) if found else ""
    return name if find_images(name, cwd) == found else ""


def is_image(path: Path) -> bool:
    """Return whether a path is that of an image file, by its name."""
    try:
        return mimetypes.guess_type(path.name)[0] in IMAGES and path.is_file()
    except (OSError, ValueError):  # such as a name that is too long, or has a null character
        return False


def read_image(path: Path) -> ImageBlock | None:
    """Read an image; None if it cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            return None
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
    return ImageBlock(data=data, mime_type=str(mimetypes.guess_type(path.name)[0]), uri=path.resolve().as_uri())
