"""Convert the bytes of a provider's event stream to deltas that are alike for all providers.

The bytes are read as server-sent events (WHATWG HTML), as leniently as real servers need. The deltas do not depend on
how the bytes are split into chunks.
"""

import json
import re
from typing import Any, Literal, TypedDict

import msgspec

from crow_core.errors import ModelError
from crow_core.messages import Delta

OBJECT_DECODER = msgspec.json.Decoder(dict[str, Any])

TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses of failures that a retry may solve."""

TOO_LONG_PATTERN = re.compile(
    r"context[ _](length|size|window|limit)|model token limit|maximum prompt length|input length should be"
    r"|\b(prompt|inputs?|request|messages)`?( token)?( count)?( \([^)]*\))?( of \d+)?"
    r" ((is )?(too (long|large)|longer than)|exceed)"
    r"|(prompt|input|request|`inputs`) (contains|must have less than) \d+ (\w+ )?tokens"
    r"|too many tokens|reduce the length of the (messages|prompt)",
    re.I,
)
"""Matches the messages of servers that refuse a request as longer than the window."""

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""The most bytes of one event."""
MAX_PAGE_BYTES = 1024 * 1024
"""The most bytes that are read of a response that is no event stream, such as an error page."""

LOG_ADVICE = "If that goes on, look into the server's log."


class ToolCallFragment(TypedDict, total=False):
    """The required form of a part of a tool call. `merge` accepts its other keys in any form."""

    function: dict[str, Any] | None


class EventStreamReader:
    """Converts the bytes of an event stream to deltas."""

    def __init__(self, endpoint: str, *, think_tags: bool = True) -> None:
        self.endpoint = endpoint
        """The endpoint's URL, for error messages."""
        self.incomplete_line = b""
        self.other_lines = b""
        """The lines that are no event stream: an error page, or an answer that is not streamed."""
        self.incomplete_json = b""
        """The content of a `data:` line whose JSON continues in the next one."""
        self.splitter = ThinkTagSplitter()
        self.splitter.is_over = self.splitter.has_text = not think_tags  # then all content is text
        self.is_done = False
        """Whether `[DONE]` has come."""
        self.has_finish_reason = False
        self.has_answer = False
        """Whether text, reasoning or a tool call has come."""
        self.has_tool_calls = False

    def feed(self, data: bytes) -> list[Delta]:
        """Return the deltas in the next bytes of the stream. Raises ModelError."""
        lines = (self.incomplete_line + data).split(b"\n")
        self.incomplete_line = lines.pop()
        if len(self.incomplete_line) + len(self.incomplete_json) > MAX_EVENT_BYTES:
            raise self.to_broken_error("sent an event without an end")
        deltas: list[Delta] = []
        for line in lines:
            self.read_line(line, deltas)
        return deltas

    def read_line(self, line: bytes, deltas: list[Delta]) -> None:
        """Read one line of the stream and append its delta, if it has one."""
        line = line.rstrip(b"\r")
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.is_done = True
            elif payload:
                self.read_payload(payload, deltas)
        elif not line:
            if self.incomplete_json:  # the event has ended and is not JSON
                raise self.to_broken_error("sent an event that is not JSON")
        elif line.startswith(b"error:"):  # llama.cpp's own field, in older versions
            raise self.to_reported_error(describe_body(line[6:], ""))
        elif not line.startswith((b":", b"event:", b"id:", b"retry:")) and len(self.other_lines) < MAX_PAGE_BYTES:
            self.other_lines += line + b"\n"

    def read_payload(self, payload: bytes, deltas: list[Delta]) -> None:
        chunk = parse_object(self.incomplete_json + payload)
        if chunk is not None:
            self.incomplete_json = b""
            self.read_chunk(chunk, deltas)
        elif self.incomplete_json or payload.startswith(b"{"):  # other text only keeps the connection alive
            self.incomplete_json += payload

    def read_chunk(self, chunk: dict[str, Any], deltas: list[Delta]) -> None:
        """Append the delta of one parsed event, unless it is empty."""
        try:
            delta = self.to_delta(chunk)
        except (AttributeError, TypeError, LookupError, msgspec.ValidationError) as error:
            raise ModelError(f"{self.endpoint} sent something unknown: {describe_error(chunk)}.") from error
        if delta:
            deltas.append(delta)

    def to_delta(self, chunk: dict[str, Any]) -> Delta:
        """Convert one parsed event to a delta, which may be empty. Raises ModelError for an error object."""
        delta: Delta = {}
        choices = chunk.get("choices")
        choice: dict[str, Any] = choices[0] if choices else {}
        if error := chunk.get("error") or choice.get("error") or (chunk.get("object") == "error" and chunk):
            raise self.to_reported_error(describe_error(error), retry=is_transient(error))
        self.read_choice(choice, delta)
        x_groq = chunk.get("x_groq")
        usage: dict[str, Any] | None = chunk.get("usage") or choice.get("usage") or (x_groq and x_groq.get("usage"))
        if isinstance(timings := chunk.get("timings"), dict) and "cache_n" in timings:  # llama.cpp
            delta["cached"] = timings["cache_n"]
        if usage and (counts := {name: count for name, count in usage.items() if count is not None}):
            delta["usage"] = counts
        return delta

    def read_choice(self, choice: dict[str, Any], delta: Delta) -> None:
        """Add the reasoning, text, tool calls and finish reason of a choice to a delta."""
        part: dict[str, Any] = choice.get("delta", choice.get("message")) or {}
        content = part.get("content") or part.get("refusal")
        reasoning = part.get("reasoning_content") or part.get("reasoning")
        if content and not isinstance(content, str):
            content, inner = split_parts(content)
            reasoning = reasoning or inner
        if reasoning and isinstance(reasoning, str):
            self.has_answer = True
            self.splitter.is_over = True
            delta["reasoning_content"] = reasoning
        if content:
            self.has_answer = True
            self.splitter.feed(content, delta)
        if calls := part.get("tool_calls"):
            self.has_answer = self.has_tool_calls = True
            msgspec.convert(calls, list[ToolCallFragment])
            delta["tool_calls"] = calls
        if reason := choice.get("finish_reason"):
            self.has_finish_reason = True
            delta["finish_reason"] = str(reason)

    def finish(self) -> list[Delta]:
        """Return the deltas held back at the end of the stream. Raises ModelError if the answer is incomplete."""
        deltas: list[Delta] = []
        if self.incomplete_line:
            self.read_line(self.incomplete_line, deltas)
        if self.other_lines and not (self.has_answer or self.has_finish_reason):
            self.read_other_lines(deltas)
        if not self.has_finish_reason and (self.incomplete_json or (self.has_tool_calls and not self.is_done)):
            raise self.to_broken_error("broke off in the middle of its answer")
        if not self.has_answer and not self.has_finish_reason:
            raise self.to_broken_error("closed the connection without an answer")
        last: Delta = {}
        self.splitter.finish(last)
        if not self.has_finish_reason and not self.is_done:
            last["notice"] = f"{self.endpoint} did not say that its answer is complete; it may be cut short."
        return [*deltas, last] if last else deltas

    def to_broken_error(self, event: str) -> ModelError:
        return ModelError(f"{self.endpoint} {event}. {LOG_ADVICE}", retry=True)

    def to_reported_error(self, message: str, retry: bool = False) -> ModelError:
        if TOO_LONG_PATTERN.search(message):
            return to_too_long_error(self.endpoint, message)
        sentence = f"{self.endpoint} reported an error: {message}. Try again, or choose another model."
        return ModelError(sentence, retry=retry)

    def read_other_lines(self, deltas: list[Delta]) -> None:
        """Read an answer that is no event stream: a whole completion, an error object, or a web page."""
        chunk = parse_object(self.other_lines)
        if chunk is not None:
            self.is_done = True
            self.read_chunk(chunk, deltas)
        if not self.has_answer and not self.has_finish_reason:
            message = describe_body(self.other_lines, "")
            raise ModelError(
                f"{self.endpoint} did not answer as a chat-completions endpoint: {message}. Check base_url."
            )


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; return an empty one for other JSON, None for other text. Half characters become `?`."""
    try:
        return OBJECT_DECODER.decode(text)
    except msgspec.ValidationError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        convert_leniently = json.dumps(json.loads(text.decode("utf-8", "replace")), ensure_ascii=False)
        return OBJECT_DECODER.decode(convert_leniently.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


class ThinkTagSplitter:
    """Separates `<think>…</think>` from content that arrives in pieces. A part of a tag is held back."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self) -> None:
        self.pending: str = ""
        """The end of the text, which may be the beginning of a tag."""
        self.is_inside = False
        """Whether a tag is open."""
        self.has_text = False
        """Whether content other than white space has come."""
        self.is_over = False
        """Whether a tag is text from now on, because reasoning has ended or came in another field."""

    def feed(self, text: str, delta: Delta) -> None:
        """Add the next piece of content to a delta, as content or as reasoning."""
        if self.has_text and not self.is_inside and not self.pending and (self.is_over or "<" not in text):
            delta["content"] = delta.get("content", "") + text
            return
        text, self.pending = self.pending + text, ""
        if not self.has_text and not self.is_inside and not self.is_over:
            bare = text.lstrip()
            if bare.startswith(self.OPEN):
                self.is_inside, text = True, bare[len(self.OPEN) :]
            elif self.OPEN.startswith(bare):
                self.pending = text
                return
        self.split(text, delta)

    def split(self, text: str, delta: Delta) -> None:
        """Split a text at the closing tag; the text before it is reasoning, even if no opening tag was sent."""
        before, tag, after = text.partition(self.CLOSE) if not self.is_over else (text, "", "")
        if self.OPEN in before and not self.is_inside and not self.is_over:
            self.is_over, self.has_text, tag = True, True, ""  # a tag after other text is quoted
        if tag:
            self.add("reasoning_content", before, delta)
            if not self.is_inside:
                delta["thought_ends"] = True
            self.is_inside, self.is_over, self.has_text = False, True, False
            self.add("content", after, delta)
            return
        keep = 0 if self.is_over else max(count_overlap(text, self.CLOSE), count_overlap(text, self.OPEN))
        self.pending = text[len(text) - keep :]
        self.add("reasoning_content" if self.is_inside else "content", text[: len(text) - keep], delta)

    def add(self, key: Literal["content", "reasoning_content"], text: str, delta: Delta) -> None:
        if key == "content" and self.is_over and not self.has_text:
            text = text.lstrip()  # white space between reasoning and answer
        if text:
            self.has_text = self.has_text or (key == "content" and not text.isspace())
            delta[key] = delta.get(key, "") + text

    def finish(self, delta: Delta) -> None:
        """Add the text that was held back: it is no tag."""
        self.add("reasoning_content" if self.is_inside else "content", self.pending, delta)
        self.pending = ""


def count_overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def split_parts(parts: Any) -> tuple[str, str]:
    """Return the text and the reasoning of content that is a list of parts."""
    text = reasoning = ""
    for part in parts:
        match part:
            case {"type": "text", "text": str(piece)}:
                text += piece
            case {"type": "thinking", "thinking": str(piece)}:
                reasoning += piece
            case {"type": "thinking", "thinking": pieces}:
                reasoning += split_parts(pieces)[0]
            case _:
                pass
    return text, reasoning


def to_too_long_error(endpoint: str, message: str) -> ModelError:
    advice = "Take the prompt back (/undo), go on in a new session, or choose a model with a larger window."
    return ModelError(f"{endpoint} refused the request as too long: {message}. {advice}", too_long=True)


def describe_body(body: bytes, kind: str) -> str:
    """Return the message of an error body, as a part of a sentence."""
    text = body.decode("utf-8", "replace").strip()
    try:
        return describe_error(json.loads(text))
    except (ValueError, RecursionError):
        if "html" in kind or text[:1] == "<":
            return "it sent a web page instead of JSON; base_url usually ends in /v1"
        return shorten_text(text) or "it sent nothing"


def describe_error(error: Any) -> str:
    """Return the message in an error object, under any provider's keys."""
    match error:
        case str(text):
            return shorten_text(text)
        case {"error": {} | [*_] as inner} if inner:
            return describe_error(inner)
        case {"message": str(text), "metadata": {"raw": str(raw)}}:
            return f"{shorten_text(text)}: {describe_body(raw.encode(), '')}"
        case {"loc": [*path], "msg": str(text)}:
            return f"{'.'.join(map(str, path))}: {shorten_text(text)}"
        case {"message": inner} | {"detail": inner} | {"msg": inner} | {"error": inner} if inner:
            return describe_error(inner)
        case [first, *_]:
            return describe_error(first)
        case _:
            return shorten_text(json.dumps(error))


def shorten_text(text: str) -> str:
    """Return the first 300 characters of a text in one line, without control characters."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:300].rstrip(" .")


def is_transient(error: Any) -> bool:
    """Return whether an error object has a status of a failure that a retry may solve."""
    match error:
        case {"code": code} | {"status": code}:
            return str(code) in map(str, TRANSIENT_STATUSES)
        case _:
            return False
