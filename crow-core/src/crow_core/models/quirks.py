"""The differences between endpoints, and the changes that make a request fit one of them.

`quirks.toml` lists the differences of hosts and model families. A model's own settings override them. A clear refusal
of an endpoint changes them while crow runs.
"""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from crow_core.models.endpoint import is_on_private_network

Body = dict[str, Any]


class Quirks(Struct, frozen=True, forbid_unknown_fields=True):
    """The differences of one endpoint; the defaults fit most endpoints."""

    reasoning: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    """The key of earlier reasoning that is sent back."""
    echo: Literal["never", "tool_calls", "always", "tags"] = "never"
    """The earlier reasoning that is sent back: none, that of replies with tool calls, all of it, or all of it inside
    `<think>` tags in the text."""
    think_tags: bool = True
    """True if `<think>…</think>` in the text is reasoning."""
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The parameter that limits the length of a reply."""
    stream_usage: bool = True
    """True if the endpoint takes `stream_options.include_usage`."""
    parallel_calls: bool = True
    """True if a reply may hold several tool calls; false sends `parallel_tool_calls: false`."""
    profile: Literal["auto", "full", "small"] = "auto"
    """The tools and the system prompt: `small` has few and simple ones. `auto` is small for a window
    of up to 8,192 tokens, and for a model of up to 9 billion parameters if the server tells its size."""
    printed_calls: bool = False
    """True if tool calls that the server sends as text are run; the default on this machine and private networks."""
    call_form: Literal["native", "json", "fences", "tools", "schema"] = "native"
    """The form of tool calls: `native` is the server's own; the others are text, which crow describes in the prompt.
    Under `schema`, the server holds each reply to a JSON schema: a call, or an answer."""
    schemas: Literal["full", "plain"] = "full"
    """The form of tool schemas; `plain` has no `$ref`, `$defs`, `anyOf`, `oneOf` and `allOf`."""
    content: Literal["text", "parts"] = "text"
    """The form of text-only content: a string, or a list of parts."""
    images: bool = True
    """True if the model takes images; if not, a note replaces each."""
    audio: bool = False
    """True if the model takes audio; if not, a note replaces each."""
    system_role: Literal["system", "developer", "user"] = "system"
    """The role of the system prompt; `user` puts it at the beginning of the first user message."""
    temperature: bool = True
    """True if the endpoint takes `temperature` and `top_p`."""
    effort: str = ""
    """The parameter for the reasoning effort, `reasoning_effort` or `reasoning.effort`; empty if there is none."""
    efforts: tuple[str, ...] = ("low", "medium", "high")
    """The values of that parameter."""
    structured_output: Literal["off", "alone", "with_tools"] = "off"
    """The requests in which a `response_format` with a JSON schema works: none, those without tools, or all."""
    call_ids: Literal["any", "nine"] = "any"
    """The form of tool call ids; `nine` means exactly nine letters and digits."""
    window: int = 0
    """Tokens that fit, for servers that do not report it; 0 if unknown."""


class QuirksRule(Struct, forbid_unknown_fields=True):
    """An entry of `quirks.toml`: quirks of every endpoint whose host and model both match."""

    quirks: dict[str, Any]
    host: str = "*"
    model: str = "*"


class QuirksFile(Struct, forbid_unknown_fields=True):
    """The content of `quirks.toml`."""

    rule: list[QuirksRule]


@cache
def load_rules() -> list[QuirksRule]:
    """Load the rules of `quirks.toml`, in which the general ones come before the particular ones."""
    text = (files("crow_core.models") / "quirks.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), QuirksFile).rule


def find_quirks(base_url: str, model: str, overrides: Mapping[str, Any] | None = None) -> Quirks:
    """Return the quirks of a model at an endpoint: those of every rule that matches, then `overrides`.

    On this machine and on private networks, calls that the server sends as text are run. Raises
    msgspec.ValidationError for unknown keys or wrong values in `overrides`.
    """
    host, name = urlsplit(base_url).netloc.lower(), model.lower()
    is_private = bool(base_url) and is_on_private_network(base_url)
    quirks: dict[str, Any] = {"printed_calls": is_private}
    for rule in load_rules():
        if fnmatchcase(host, rule.host) and any(fnmatchcase(n, rule.model) for n in (name, name.rpartition("/")[2])):
            quirks |= rule.quirks
    if not is_private:
        quirks.pop("call_form", None)  # other servers of the same model may have a parser for its calls
    return msgspec.convert({**quirks, **(overrides or {})}, Quirks)
