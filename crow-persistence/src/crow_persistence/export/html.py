"""A session as one page of HTML that needs nothing else: no script, no style, image or sound from elsewhere."""

from functools import cache
from importlib.resources import files
from typing import Any

from crow_persistence.export.transcript import Story, caption, embedded, in_words


def html(story: Story) -> str:
    """The page. What was said stands in it as text: nothing of it is markup, and nothing is loaded or run."""
    return template().render(
        title=story.summary.title or "Session",
        facts=story.facts(),
        parts=story.parts(),
        embedded=embedded,
        caption=caption,
        in_words=in_words,
    )


@cache
def template() -> Any:
    from jinja2 import Environment, StrictUndefined  # as in crow_core.prompts

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    return environment.from_string((files("crow_persistence.export") / "session.html.j2").read_text("utf-8"))


def shown(text: str) -> str:
    """Text that a page can hold: HTML has no place for a NUL, nor UTF-8 for half a character."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
