"""Answers requests by handlers: each runs in a thread, with one snapshot of the database."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from crow_agent.workflows import WorkflowError
from crow_core.errors import ConfigError, ModelError, PromptError, StoreError
from crow_persistence.database import Database
from crow_persistence.export.html import replace_invalid
from crow_persistence.export.transcript import decode_media, describe_media
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from crow_web import formats, markup

HERE = Path(__file__).parent
SENTENCES = ConfigError, ModelError, PromptError, StoreError, WorkflowError
"""Errors that are sentences for a person."""

Handler = Callable[["Pages", Connection, Request], str | Response]
"""Returns a page, or another answer."""
Change = Callable[["Pages", Mapping[str, str], Request], str]
"""Changes what a form asks for, and returns the address of the page to go to."""


class Pages:
    """Makes the pages."""

    def __init__(self, database: Database, env: Mapping[str, str], *, read_only: bool, has_chats: bool = False) -> None:
        self.database = database
        self.env = env
        self.read_only = read_only
        self._templates = make_templates(read_only=read_only, has_chats=has_chats)

    def render(self, template: str, /, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    def answer(self, handler: Handler, request: Request) -> Response:
        """Answer a request by a handler; what it cannot find is a page with a sentence."""
        try:
            with self.database.begin_read() as connection:
                answer = handler(self, connection, request)
                return HTMLResponse(answer) if isinstance(answer, str) else answer
        except SENTENCES as error:
            return self.explain("Not found", str(error), 404)

    async def answer_form(self, change: Change, request: Request) -> Response:
        """Answer a form by a change; one that cannot be made is a page with a sentence."""
        body = (await request.body()).decode(errors="replace")
        form = dict(parse_qsl(body, keep_blank_values=True))
        try:
            address = await run_in_threadpool(change, self, form, request)
        except SENTENCES as error:
            return self.explain("Not done", str(error), 409)
        return RedirectResponse(address, 303)

    def explain(self, title: str, sentence: str, status: int) -> Response:
        return HTMLResponse(self.render("error.html", heading=title, sentence=sentence), status)


def make_templates(*, read_only: bool = False, has_chats: bool = False) -> Environment:
    """Load the templates, which escape all values that are not markup already."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    made.filters.update(
        markdown=markup.to_markdown,
        diff=markup.to_diff,
        json=markup.to_json,
        json_text=markup.colour_json,
        arguments=markup.to_arguments,
        id=id,
        output=markup.to_output,
        time=formats.format_time,
        moment=formats.format_moment,
        clock=formats.format_clock,
        count=formats.format_count,
        tokens=formats.format_tokens,
        cost=formats.format_cost,
        ms=formats.format_duration,
        snippet=formats.mark_snippet,
        home=formats.shorten_home,
    )
    shared: dict[str, Any] = {
        "decode_media": decode_media,
        "describe_media": describe_media,
        "read_only": read_only,
        "has_chats": has_chats,
    }
    made.globals.update(shared)
    return made


def finalize(value: Any) -> Any:
    """Replace what a page cannot hold; markup is left as it is."""
    return replace_invalid(value) if type(value) is str else value


def read_number(text: str) -> int:
    """Return the number in a parameter of an address; 0 if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
