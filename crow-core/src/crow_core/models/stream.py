"""Convert the bytes of a provider's event stream to deltas that are alike for all providers.

The bytes are read as server-sent events (WHATWG HTML), as leniently as real servers need. The deltas do not depend on
how the bytes are split into chunks.
"""

import json
import re
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, Literal, TypeVar

import msgspec

from crow_core.errors import ModelError
from crow_core.messages.message import Delta
from crow_core.models.failures import (
    MAX_PAGE_BYTES,
    describe_error,
    find_error,
    find_message,
    is_known_failure,
    parse_text,
    shorten_text,
    to_model_error,
)
from crow_core.models.reply import ObjectEnd
from crow_core.text import decode_json, is_deep

T = TypeVar("T")

LENIENT_DECODER = json.JSONDecoder(
    strict=False, parse_constant=lambda _: None, parse_float=lambda text: to_finite(text)
)
"""Accepts control characters in strings, and numbers that JSON does not have, which become null."""

COMPLETE_PATTERN = re.compile(r"(stop|eos|end)(_\w+)?|done|completed?|finish(ed)?|success|(tool|function)_(call|use)s?")
"""Matches the finish reasons of a complete answer, in lower case."""
FAILED_PATTERN = re.compile(
    r"error|abort|fail|cancel|time(d_)?_?out|overload|insufficient|interrupt|preempt|malformed|incomplete|unavailable"
    r"|unexpected|disconnect|exception|rate_?limit"
)
"""Matches the finish reasons of an answer that failed: `error`, `abort`, `insufficient_system_resource` and others."""
CUT_PATTERN = re.compile(r"length|max|limit|window|budget")
"""Matches the finish reasons of an answer that reached a limit: `length`, `model_length`, `MAX_TOKENS` and others."""
REFUSED_PATTERN = re.compile(r"filter|safety|sensitive|refus|recitation|block|prohibited|spii|guardrail|moderat|policy")
"""Matches the finish reasons of an answer that the provider withheld: `content_filter`, `SAFETY` and others."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")
CUT_CHARACTER = re.compile("(?:[\ud800-\udbff]|[\udc80-\udcff]{1,3})\\Z")
"""Matches the beginning of a character at the end of a text: half a surrogate pair, or bytes as of `ESCAPED_BYTES`."""
ESCAPED_BYTES = re.compile("[\udc80-\udcff]+")
"""Matches bytes that were not UTF-8, in the form that "surrogateescape" gives them."""

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""The most bytes of one event."""

LOG_ADVICE = "If that goes on, look into the server's log."


class EventStreamReader:
    """Converts the bytes of an event stream to deltas."""

    def __init__(self, endpoint: str, *, think_tags: bool = True, redact: Callable[[str], str] = str) -> None:
        self.endpoint = endpoint
        """The endpoint's URL, for error messages."""
        self.redact = redact
        """Removes the secrets from a text for an error message."""
        self.is_error_event = False
        """True if the current event is an error by its name."""
        self.unknown_event: dict[str, Any] = {}
        """The last event that is neither a part of an answer nor an error."""
        self.incomplete_line = bytearray()
        self.ends_in_cr = False
        """True if the last bytes end in CR: a line feed that follows belongs to it."""
        self.other_lines = bytearray()
        """The lines outside of an event stream: an error page, or an answer that is not streamed."""
        self.incomplete_json = bytearray()
        """The content of `data:` lines whose JSON continues in the next one."""
        self.json_end = ObjectEnd()
        """Finds the end of that JSON."""
        self.halves: dict[str, str] = {}
        """The first parts of characters whose rest comes in a later event, by the text to which they belong."""
        self.splitter = ThinkTagSplitter()
        self.splitter.is_over = self.splitter.has_text = not think_tags  # then all content is text
        self.is_done = False
        """True if `[DONE]` has come; nothing behind it is read."""
        self.has_finish_reason = False
        self.failure = ""
        """The finish reason, if it says that the answer failed."""
        self.unknown_reason = ""
        """The finish reason, if it means nothing known."""
        self.has_answer = False
        """True if text, reasoning or a tool call has come."""
        self.has_tool_calls = False

    def feed(self, data: bytes) -> Iterator[Delta]:
        """Yield the deltas in the next bytes of the stream, up to `[DONE]`. Raises ModelError behind the deltas."""
        lines = data.splitlines(keepends=True)
        if self.ends_in_cr and data.startswith(b"\n"):
            del lines[0]
        self.ends_in_cr = data.endswith(b"\r") if data else self.ends_in_cr
        deltas: list[Delta] = []
        try:
            for line in lines:
                if self.is_done:
                    break
                content = line.rstrip(b"\r\n")
                if len(self.incomplete_line) + len(content) + len(self.incomplete_json) > MAX_EVENT_BYTES:
                    self.is_done = self.has_finish_reason
                    self.refuse(self.to_broken_error("sent an event without an end"))
                if len(content) == len(line):
                    self.incomplete_line += content
                elif self.incomplete_line:
                    complete, self.incomplete_line = bytes(self.incomplete_line + content), bytearray()
                    self.read_line(complete, deltas)
                else:
                    self.read_line(content, deltas)
        except ModelError:
            yield from self.release(deltas)
            raise
        yield from deltas

    def refuse(self, error: ModelError) -> None:
        """Raise the error of an event that cannot be read, unless the answer is complete without it."""
        if not self.has_finish_reason:
            raise error

    def release(self, deltas: list[Delta]) -> list[Delta]:
        """Append the text that was held back, as its continuation will not come; return all deltas."""
        last: Delta = {}
        if half := self.halves.pop("reasoning", ""):
            last["reasoning_content"] = replace_halves(half)
        if half := self.halves.pop("content", ""):
            self.splitter.feed(replace_halves(half), last)
        self.splitter.finish(last)
        return [*deltas, last] if last else deltas

    def read_line(self, line: bytes, deltas: list[Delta]) -> None:
        """Read one line of the stream and append its delta, if it has one."""
        line = line.removeprefix(BYTE_ORDER_MARK)
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.is_done = True
            elif payload:
                self.read_payload(payload, deltas)
        elif not line:
            if self.incomplete_json:  # the event has ended and is not JSON
                event, self.incomplete_json = bytes(self.incomplete_json), bytearray()
                self.check_error_event(event)
                self.refuse(self.to_broken_error("sent an event that is not JSON"))
            self.is_error_event = False
        elif line.startswith(b"event:"):
            name = line[6:].lower()
            self.is_error_event = b"error" in name or b"exception" in name
        elif line.startswith(b"error:"):  # llama.cpp's own field, in older versions
            raise self.to_reported_error(parse_text(line[6:]))
        elif not line.startswith((b":", b"id:", b"retry:")) and len(self.other_lines) < MAX_PAGE_BYTES:
            self.other_lines += line + b"\n"

    def read_payload(self, payload: bytes, deltas: list[Delta]) -> None:
        if self.incomplete_json:
            self.incomplete_json += payload
            self.json_end.feed(payload.decode("latin-1"))  # brackets and quotes are the same in UTF-8
            if not self.json_end.is_reached:
                return
            payload = bytes(self.incomplete_json)
        chunk = parse_event(payload)
        if chunk is None and payload.startswith(b"{"):
            if not self.incomplete_json:
                self.incomplete_json, self.json_end = bytearray(payload), ObjectEnd()
                self.json_end.feed(payload.decode("latin-1"))
            return
        self.incomplete_json = bytearray()
        if not chunk or "choices" not in chunk:
            self.check_error_event(payload)
        if chunk is not None:  # other text only keeps the connection alive
            self.read_chunk(chunk, deltas)

    def check_error_event(self, payload: bytes) -> None:
        """Raise ModelError if an event without an answer is an error: by its name, as `[ERROR] …`, or as a list."""
        is_named = self.is_error_event or payload[:6].lower() in (b"[error", b"error:")
        if is_named or payload.startswith(b"["):
            content = parse_text(payload)
            if is_named or find_error(content):
                raise self.to_reported_error(content)

    def read_chunk(self, chunk: dict[str, Any], deltas: list[Delta]) -> None:
        """Append the delta of one parsed event, unless it is empty. Raises ModelError, for an error object also."""
        delta: Delta = {}
        choice: dict[str, Any] = {}
        fault: Exception | None = None
        try:
            choice = find_choice(chunk)
            self.read_choice(choice, delta)
        except (AttributeError, TypeError, LookupError) as error:
            fault = error
        read_usage(chunk, choice, delta)
        if progress := to_object(chunk.get("prompt_progress")):  # llama.cpp
            delta["progress"] = progress
        if delta:
            deltas.append(clean_object(delta))
        if (error := find_error(chunk)) is not None:
            raise self.to_reported_error(error)
        if fault:
            said = shorten_text(self.redact(describe_error(chunk)))
            self.refuse(ModelError(f"{self.endpoint} sent something unknown: {said}.", retry=self.has_answer))
        if not delta and not choice:
            self.unknown_event = chunk

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
            if text := self.join_halves("reasoning", reasoning):
                delta["reasoning_content"] = text
        if content:
            self.has_answer = True
            self.splitter.feed(self.join_halves("content", content), delta)
        if calls := part.get("tool_calls"):
            self.has_answer = self.has_tool_calls = True
            for fragment in calls:  # in any other form, one of these lines raises
                function: dict[str, Any] = fragment.get("function") or {}
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    function["arguments"] = self.join_halves(f"call {fragment.get('index')}", arguments)
            delta["tool_calls"] = calls
        if (reason := str(choice.get("finish_reason") or "")) and reason.lower() not in ("null", "none"):
            self.has_finish_reason = True
            self.read_finish_reason(reason, delta)

    def read_finish_reason(self, reason: str, delta: Delta) -> None:
        """Add a finish reason to a delta, unless it says that the answer failed.

        `length` and `content_filter` stand for all other reasons that mean the same.
        """
        self.failure = self.unknown_reason = ""
        known = reason.lower()
        if FAILED_PATTERN.search(known):
            self.failure = reason
            return
        if REFUSED_PATTERN.search(known):
            reason = "content_filter"
        elif CUT_PATTERN.search(known):
            reason = "length"
        elif not COMPLETE_PATTERN.fullmatch(known):
            self.unknown_reason = reason
        delta["finish_reason"] = reason

    def join_halves(self, key: str, text: str) -> str:
        """Return the next piece of a text; a character that is cut at its end is held back until its rest comes."""
        if not self.halves and text.isascii():
            return text
        text = join_surrogates(self.halves.pop(key, "") + text)
        whole = CUT_CHARACTER.sub("", text)
        if len(whole) < len(text):
            self.halves[key] = text[len(whole) :]
        return replace_halves(whole)

    def finish(self, error: ModelError | None = None) -> Iterator[Delta]:
        """Yield the deltas held back at the end of the stream. Raises ModelError if the answer is incomplete.

        `error` says how the connection broke; None if it was closed.
        """
        deltas: list[Delta] = []
        try:
            if self.incomplete_line and not self.is_done:
                self.read_line(bytes(self.incomplete_line), deltas)
            if self.other_lines and error is None and not self.has_finish_reason:
                self.read_other_lines(deltas)
            self.check_end(error)
        except ModelError:
            yield from self.release(deltas)
            raise
        yield from self.release(deltas)
        if reason := shorten_text(self.redact(self.unknown_reason)):
            yield {"notice": f"{self.endpoint} ended its answer for the reason {reason!r}; it may be cut short."}
        elif not self.has_finish_reason and not self.is_done:
            yield {"notice": f"{self.endpoint} did not say that its answer is complete; it may be cut short."}

    def check_end(self, error: ModelError | None) -> None:
        """Raise ModelError if the stream has ended in the middle of its answer."""
        if self.failure:
            sentence = f"{self.endpoint} broke off its answer ({shorten_text(self.redact(self.failure))})."
            raise ModelError(f"{sentence} Try again, or choose another model.", retry=True)
        if self.has_finish_reason:
            return
        if error is not None:
            raise error
        if self.incomplete_json or (self.has_tool_calls and not self.is_done):
            raise self.to_broken_error("broke off in the middle of its answer")
        if not self.has_answer:
            raise self.to_unanswered_error()

    def to_broken_error(self, event: str) -> ModelError:
        return ModelError(f"{self.endpoint} {event}. {LOG_ADVICE}", retry=True)

    def to_unanswered_error(self) -> ModelError:
        """Make the error for a stream without an answer, with the words that came in place of one."""
        said = shorten_text(self.redact(find_message(self.unknown_event)))
        if said and is_known_failure(self.unknown_event):
            return self.to_reported_error(self.unknown_event)
        return self.to_broken_error(f"closed the connection without an answer{said and f': {said}'}")

    def to_reported_error(self, error: Any) -> ModelError:
        return to_model_error(self.endpoint, error, redact=self.redact)

    def read_other_lines(self, deltas: list[Delta]) -> None:
        """Read an answer that is not an event stream: a whole completion, an error object, or a web page."""
        content = parse_text(bytes(self.other_lines))
        if (error := find_error(content)) is not None:
            raise self.to_reported_error(error)
        chunk = parse_event(bytes(self.other_lines))
        if chunk is not None and not self.has_answer:
            self.is_done = True
            self.read_chunk(chunk, deltas)
        if not self.has_answer and not self.has_finish_reason:
            message = shorten_text(self.redact(describe_error(content)))
            raise ModelError(
                f"{self.endpoint} did not answer as a chat-completions endpoint: {message}. Check base_url."
            )


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object as leniently as an event. Half characters become `?`."""
    parsed = parse_event(text)
    return None if parsed is None else clean_object(parsed)


def parse_event(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; return an empty one for other JSON, None for other text and for a very deep object.

    Half a surrogate pair, and bytes that are not UTF-8, become lone surrogates: the rest may be in the next event.
    """
    try:
        parsed = decode_json(text)
    except ValueError:
        try:
            parsed = LENIENT_DECODER.decode(text.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            return None
        if is_deep(parsed):
            return None
    return to_object(parsed)


def to_finite(text: str) -> float | None:
    """Convert the text of a number to a float; return None if it is too large for one."""
    return number if isfinite(number := float(text)) else None


def clean_object(parsed: T) -> T:
    """Return a JSON object whose half characters are replaced by `?`; the same object if it has none."""
    try:
        msgspec.json.encode(parsed)
    except UnicodeEncodeError:
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    return parsed


def join_surrogates(text: str) -> str:
    """Join the surrogate pairs in a text to characters; lone surrogates stay."""
    if not SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def replace_halves(text: str) -> str:
    """Join the bytes of characters in a text, and replace incomplete characters."""
    text = ESCAPED_BYTES.sub(lambda match: match[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace"), text)
    return SURROGATE.sub("\ufffd", text)


def find_choice(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return the choice of an event that continues the answer; an empty one if none does.

    A choice with an index above 0 is part of another answer. An index that is missing or odd counts as 0.
    """
    for choice in chunk.get("choices") or ():
        index = choice.get("index")
        if type(index) is not int or index <= 0:
            return choice
    return {}


def read_usage(chunk: dict[str, Any], choice: dict[str, Any], delta: Delta) -> None:
    """Add the token counts of an event to a delta. Counts in another form are left out: they are not the answer."""
    if "timings" in chunk and "cache_n" in (timings := to_object(chunk["timings"])):  # llama.cpp
        delta["cached"] = timings["cache_n"]
    inner = to_object(chunk["x_groq"]).get("usage") if "x_groq" in chunk else None
    usage = to_object(chunk.get("usage") or choice.get("usage") or inner)
    if usage and (counts := {name: count for name, count in usage.items() if count is not None}):
        delta["usage"] = counts


def to_object(value: Any) -> dict[str, Any]:
    """Return a value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


class ThinkTagSplitter:
    """Separates `<think>…</think>` from content that arrives in pieces. A part of a tag is held back."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self) -> None:
        self.pending: str = ""
        """The end of the text, which may be the beginning of a tag."""
        self.blanks: list[str] = []
        """The white space before the first other text."""
        self.is_inside = False
        """True if a tag is open."""
        self.has_text = False
        """True if content other than white space has come."""
        self.is_over = False
        """True if a tag is text from now on, because reasoning has ended or came in another field."""

    def feed(self, text: str, delta: Delta) -> None:
        """Add the next piece of content to a delta, as content or as reasoning."""
        if self.has_text and not self.is_inside and not self.pending and (self.is_over or "<" not in text):
            delta["content"] = delta.get("content", "") + text
            return
        if not self.has_text and not self.is_inside and not self.is_over and not self.pending and text.isspace():
            self.blanks.append(text)
            return
        text, self.pending, self.blanks = "".join([*self.blanks, self.pending, text]), "", []
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
        """Add the text that was held back: it is not a tag."""
        text, self.pending, self.blanks = "".join([*self.blanks, self.pending]), "", []
        self.add("reasoning_content" if self.is_inside else "content", text, delta)


def count_overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def split_parts(parts: Any) -> tuple[str, str]:
    """Return the text and the reasoning of content that is a list of parts, or one part."""
    text = reasoning = ""
    listed: list[Any] = [parts] if isinstance(parts, dict) else parts
    for part in listed:
        match part:
            case str(piece):
                text += piece
            case {"type": "text", "text": str(piece)}:
                text += piece
            case {"type": "thinking", "thinking": str(piece)}:
                reasoning += piece
            case {"type": "thinking", "thinking": pieces}:
                reasoning += split_parts(pieces)[0]
            case _:
                pass
    return text, reasoning
