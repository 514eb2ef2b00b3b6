"""What is no plain text and can be shown all the same: images, PDF, notebooks."""

import base64
import json
from collections.abc import Iterator
from typing import Any

from anyio import fail_after
from mcp_types import ImageContent

from crow_mcp_server.refusal import Refusal
from crow_mcp_server.web import page_text

MAX_IMAGE = 5 * 1024 * 1024  # bytes; no model takes more
PDF_TIMEOUT = 30.0  # seconds
MAX_OUTPUT = 2_000  # characters of what a notebook's cell printed
IMAGES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}


def image_format(data: bytes) -> str:
    """The format of an image that models can look at; "" for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for start, name in IMAGES.items() if data.startswith(start)), "")


def image(path: str, data: bytes, name: str) -> ImageContent:
    """An image as a block of content. Raises Refusal when it is too large for a model."""
    if len(data) > MAX_IMAGE:
        raise Refusal(
            f"{path} is an image of {len(data):,} bytes; at most {MAX_IMAGE:,} can be shown. "
            "Make a smaller copy in the terminal and view that."
        )
    return ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type=f"image/{name}")


async def pdf_text(path: str, data: bytes) -> str:
    """The text of a PDF, page after page. Raises Refusal when it cannot be read."""
    try:
        with fail_after(PDF_TIMEOUT):
            return await page_text.read(data, "pdf", None, "")
    except (page_text.Unreadable, TimeoutError) as error:
        raise Refusal(
            f"{path} is a PDF that cannot be read: {error or 'it takes too long'}. Try pdftotext in the terminal."
        ) from None


def notebook_text(text: str) -> str | None:
    """The cells of a Jupyter notebook and what they printed; None when it is none."""
    try:
        notebook = json.loads(text)
        return "\n".join(line for number, cell in enumerate(notebook["cells"], 1) for line in _cell(cell, number))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _cell(cell: dict[str, Any], number: int) -> Iterator[str]:
    yield f"# %% cell {number}, {cell['cell_type']}"
    yield _joined(cell["source"])
    for output in cell.get("outputs", ()):
        data: dict[str, Any] = output.get("data", {})
        said = _joined(output.get("text") or data.get("text/plain") or output.get("evalue") or "").rstrip()
        shown = said if len(said) <= MAX_OUTPUT else f"{said[:MAX_OUTPUT]} [… {len(said) - MAX_OUTPUT:,} more]"
        yield from (f"# > {line}" for line in shown.splitlines())
        yield from (f"# > ({kind})" for kind in data if kind.startswith("image/"))


def _joined(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
