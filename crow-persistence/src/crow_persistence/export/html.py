"""Export a session as one HTML page without scripts, and without styles, images or sounds from other places."""

from functools import cache
from importlib.resources import files
from typing import Any

from crow_persistence.export.transcript import Transcript, decode_media, describe_media, format_time


def to_html(transcript: Transcript) -> str:
    """Return the page. All content is escaped: no markup in it is interpreted, nothing is loaded or run."""
    return load_template().render(
        title=transcript.summary.title or "Session",
        facts=transcript.facts(),
        parts=transcript.parts(),
        decode_media=decode_media,
        describe_media=describe_media,
        format_time=format_time,
    )


@cache
def load_template() -> Any:
    """Load the page's template."""
    from jinja2 import Environment, StrictUndefined  # slow to import, as in crow_core.session.prompts

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["replace_invalid"] = replace_invalid
    return environment.from_string((files("crow_persistence.export") / "session.html.j2").read_text("utf-8"))


def replace_invalid(text: str) -> str:
    """Return text without characters that a page cannot hold: NUL characters and unpaired surrogates."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
