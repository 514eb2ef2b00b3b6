"""File formats other than text that the file editor shows: images, PDF, Office files and Jupyter notebooks."""

import base64
import json
from collections.abc import Iterator
from typing import Any

from anyio import fail_after
from mcp_types import ImageContent

from crow_mcp_server.files import office
from crow_mcp_server.files.office import OfficeKind
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.web import page_text

MAX_IMAGE_BYTES = 5 * 1024 * 1024  # no model takes more
READ_TIMEOUT = 30.0  # seconds to convert a PDF or an Office file
MAX_CELL_OUTPUT = 2_000  # characters of one output of a notebook's cell
IMAGE_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}


def detect_image_format(data: bytes) -> str:
    """Return the format of an image that models accept; "" for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for start, name in IMAGE_SIGNATURES.items() if data.startswith(start)), "")


def to_image_block(path: str, data: bytes, name: str) -> ImageContent:
    """Convert an image to MCP content; `name` is its format. Raises ToolRefusal when it is too large for a model."""
    if len(data) > MAX_IMAGE_BYTES:
        raise ToolRefusal(
            f"{path} is an image of {len(data):,} bytes; at most {MAX_IMAGE_BYTES:,} can be shown. "
            "Make a smaller copy in the terminal and view that."
        )
    return ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type=f"image/{name}")


async def read_pdf(path: str, data: bytes) -> str:
    """Return the text of a PDF, page by page. Raises ToolRefusal when it cannot be read."""
    return await _read(path, data, "pdf", "a PDF", "Try pdftotext in the terminal.")


async def read_office(path: str, data: bytes, kind: OfficeKind) -> str:
    """Return an Office file as Markdown. Raises ToolRefusal when it cannot be read."""
    name = office.NAMES[kind]
    if not office.is_readable(kind):
        raise ToolRefusal(
            f"{path} is {name}, and the libraries that read it (the extra `office`) are not installed. "
            f"Tell the user how to install them: {office.make_install_command()}"
        )
    return await _read(path, data, kind, name, "unzip -l in the terminal lists its parts.")


async def _read(path: str, data: bytes, kind: page_text.PageKind, name: str, advice: str) -> str:
    try:
        with fail_after(READ_TIMEOUT):
            return await page_text.to_text(data, kind, None, "")
    except (page_text.UnreadablePage, TimeoutError) as error:
        reason = str(error) or "it takes too long"
        raise ToolRefusal(f"{path} is {name} that cannot be read: {reason}. {advice}") from None


def format_notebook(text: str) -> str | None:
    """Return the cells of a Jupyter notebook with their output; None when the text is not a notebook."""
    try:
        notebook = json.loads(text)
        return "\n".join(
            line for number, cell in enumerate(notebook["cells"], 1) for line in _format_cell(cell, number)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _format_cell(cell: dict[str, Any], number: int) -> Iterator[str]:
    yield f"# %% cell {number}, {cell['cell_type']}"
    yield _join_source(cell["source"])
    for output in cell.get("outputs", ()):
        data: dict[str, Any] = output.get("data", {})
        text = _join_source(output.get("text") or data.get("text/plain") or output.get("evalue") or "").rstrip()
        if (left_out := len(text) - MAX_CELL_OUTPUT) > 0:
            text = f"{text[:MAX_CELL_OUTPUT]} [… {left_out:,} more]"
        yield from (f"# > {line}" for line in text.splitlines())
        yield from (f"# > ({kind})" for kind in data if kind.startswith("image/"))


def _join_source(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
