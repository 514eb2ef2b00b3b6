"""Export a session as Markdown, JSON lines, an HTML page, or an ATIF trajectory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from crow_persistence.export.atif import to_atif
from crow_persistence.export.html import to_html
from crow_persistence.export.jsonl import to_jsonl
from crow_persistence.export.markdown_export import to_markdown
from crow_persistence.export.transcript import Transcript

Format = Literal["markdown", "jsonl", "html", "atif"]


@dataclass
class Export:
    """A session in one format."""

    text: str
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files that the text refers to, by path relative to the text: the images of a trajectory."""

    def write(self, path: Path) -> None:
        """Write the text to a file, and the other files next to it. Raises OSError."""
        path.write_text(self.text, "utf-8")
        for name, data in self.files.items():
            (path.parent / name).parent.mkdir(exist_ok=True)
            (path.parent / name).write_bytes(data)


def export(transcript: Transcript, format: Format) -> Export:
    """Export a transcript. Nothing is masked here; see `Transcript.redact`."""
    if format == "atif":
        return Export(*to_atif(transcript))
    formats: dict[str, Callable[[Transcript], str]] = {"markdown": to_markdown, "jsonl": to_jsonl, "html": to_html}
    return Export(formats[format](transcript))
