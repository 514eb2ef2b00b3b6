"""A session to give away: as Markdown, JSON lines, a page of HTML, or an ATIF trajectory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from crow_persistence.export.atif import atif
from crow_persistence.export.html import html
from crow_persistence.export.jsonl import jsonl
from crow_persistence.export.markdown import markdown
from crow_persistence.export.transcript import Story

Format = Literal["markdown", "jsonl", "html", "atif"]


@dataclass
class Export:
    """A session in one format."""

    text: str
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What the text refers to, by its path relative to the text's: the images of a trajectory."""

    def write(self, path: Path) -> None:
        """Put the text into a file, and beside it what it refers to. Raises OSError."""
        path.write_text(self.text, "utf-8")
        for name, data in self.files.items():
            (path.parent / name).parent.mkdir(exist_ok=True)
            (path.parent / name).write_bytes(data)


def export(story: Story, format: Format) -> Export:
    """A session in a format. Nothing is masked here: see `Story.redacted`."""
    if format == "atif":
        return Export(*atif(story))
    formats: dict[str, Callable[[Story], str]] = {"markdown": markdown, "jsonl": jsonl, "html": html}
    return Export(formats[format](story))
