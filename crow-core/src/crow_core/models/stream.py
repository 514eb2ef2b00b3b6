"""From the bytes of a provider's event stream to deltas of one spelling.

Read as the WHATWG's server-sent events, as leniently as real servers need; any split into pieces gives the same deltas.
"""

import json
import re
from typing import Any, Literal, TypedDict

import msgspec

from crow_core.errors import ModelError
from crow_core.messages import Delta

OBJECT = msgspec.json.Decoder(dict[str, Any])

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses of troubles that may be over in a moment."""

TOO_LONG = re.compile(
    r"context[ _](length|size|window|limit)|model token limit|maximum prompt length|input length should be"
    r"|\b(prompt|inputs?|request|messages)`?( token)?( count)?( \([^)]*\))?( of \d+)?"
    r" ((is )?(too (long|large)|longer than)|exceed)"
    r"|(prompt|input|request|`inputs`) (contains|must have less than) \d+ (\w+ )?tokens"
    r"|too many tokens|reduce the length of the (messages|prompt)",
    re.I,
)
"""How servers say that a request is longer than the window."""

LONGEST = 16 * 1024 * 1024
"""Bytes of one event; what sends more has no end."""
PAGE = 1024 * 1024
"""Bytes that are read of what is no event stream, such as an error page."""

LOOK = "If that goes on, look into the server's log."


class Fragment(TypedDict, total=False):
    """The shape a piece of a tool call must have; `merge` makes sense of any other."""

    function: dict[str, Any] | None


class Reader:
    """Turns the bytes of an event stream into deltas, whatever the provider's spelling. Fed in any split."""

    def __init__(self, where: str, *, think_tags: bool = True) -> None:
        self.where = where
        """The endpoint as a person would name it."""
        self.rest = b""
        self.stray = b""
        """What was no event: an error page, or an answer that is not streamed."""
        self.half = b""
        """A `data:` line whose JSON goes on in the next one."""
        self.thoughts = Thoughts()
        self.thoughts.seen = self.thoughts.begun = not think_tags  # then all is text, as it comes
        self.done = False
        self.finished = False
        self.answered = False
        self.called = False

    def feed(self, data: bytes) -> list[Delta]:
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        if len(self.rest) + len(self.half) > LONGEST:
            raise self.broken("sent an event without an end")
        deltas: list[Delta] = []
        for line in lines:
            self.read_line(line, deltas)
        return deltas

    def read_line(self, line: bytes, deltas: list[Delta]) -> None:
        line = line.rstrip(b"\r")
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
            elif payload:
                self.read_payload(payload, deltas)
        elif not line:
            if self.half:  # the event has ended, and is no JSON
                raise self.broken("sent an event that is not JSON")
        elif line.startswith(b"error:"):  # llama.cpp's own field, in older versions
            raise self.reported(explain(line[6:], ""))
        elif not line.startswith((b":", b"event:", b"id:", b"retry:")) and len(self.stray) < PAGE:
            self.stray += line + b"\n"

    def read_payload(self, payload: bytes, deltas: list[Delta]) -> None:
        chunk = parse(self.half + payload)
        if chunk is not None:
            self.half = b""
            self.read_chunk(chunk, deltas)
        elif self.half or payload.startswith(b"{"):  # anything else is a server's way to say that it is still there
            self.half += payload

    def read_chunk(self, chunk: dict[str, Any], deltas: list[Delta]) -> None:
        """One parsed event becomes at most one delta."""
        try:
            delta = self.delta_of(chunk)
        except (AttributeError, TypeError, LookupError, msgspec.ValidationError) as error:
            raise ModelError(f"{self.where} sent something unknown: {sentence_of(chunk)}.") from error
        if delta:
            deltas.append(delta)

    def delta_of(self, chunk: dict[str, Any]) -> Delta:
        delta: Delta = {}
        choices = chunk.get("choices")
        choice: dict[str, Any] = choices[0] if choices else {}
        if error := chunk.get("error") or choice.get("error") or (chunk.get("object") == "error" and chunk):
            raise self.reported(sentence_of(error), retry=is_passing(error))
        self.read_choice(choice, delta)
        x_groq = chunk.get("x_groq")
        usage: dict[str, Any] | None = chunk.get("usage") or choice.get("usage") or (x_groq and x_groq.get("usage"))
        if isinstance(timings := chunk.get("timings"), dict) and "cache_n" in timings:  # llama.cpp
            delta["cached"] = timings["cache_n"]
        if usage and (told := {name: count for name, count in usage.items() if count is not None}):
            delta["usage"] = told
        return delta

    def read_choice(self, choice: dict[str, Any], delta: Delta) -> None:
        part: dict[str, Any] = choice.get("delta", choice.get("message")) or {}
        content = part.get("content") or part.get("refusal")
        thought = part.get("reasoning_content") or part.get("reasoning")
        if content and not isinstance(content, str):
            content, inner = flatten(content)
            thought = thought or inner
        if thought and isinstance(thought, str):
            self.answered = True
            self.thoughts.seen = True
            delta["reasoning_content"] = thought
        if content:
            self.answered = True
            self.thoughts.feed(content, delta)
        if calls := part.get("tool_calls"):
            self.answered = self.called = True
            msgspec.convert(calls, list[Fragment])
            delta["tool_calls"] = calls
        if reason := choice.get("finish_reason"):
            self.finished = True
            delta["finish_reason"] = str(reason)

    def end(self) -> list[Delta]:
        """What was held back; raises ModelError when the stream was no whole answer."""
        deltas: list[Delta] = []
        if self.rest:
            self.read_line(self.rest, deltas)
        if self.stray and not (self.answered or self.finished):
            self.read_stray(deltas)
        if not self.finished and (self.half or (self.called and not self.done)):
            raise self.broken("broke off in the middle of its answer")
        if not self.answered and not self.finished:
            raise self.broken("closed the connection without an answer")
        held: Delta = {}
        self.thoughts.end(held)
        if not self.finished and not self.done:
            held["notice"] = f"{self.where} did not say that its answer is complete; it may be cut short."
        return [*deltas, held] if held else deltas

    def broken(self, what: str) -> ModelError:
        return ModelError(f"{self.where} {what}. {LOOK}", retry=True)

    def reported(self, said: str, retry: bool = False) -> ModelError:
        if TOO_LONG.search(said):
            return too_long(self.where, said)
        return ModelError(f"{self.where} reported an error: {said}. Try again, or choose another model.", retry=retry)

    def read_stray(self, deltas: list[Delta]) -> None:
        """An answer that was no event stream: one whole completion, an error object, or some web page."""
        chunk = parse(self.stray)
        if chunk is not None:
            self.done = True
            self.read_chunk(chunk, deltas)
        if not self.answered and not self.finished:
            said = explain(self.stray, "")
            raise ModelError(f"{self.where} did not answer as a chat-completions endpoint: {said}. Check base_url.")


def parse(text: bytes) -> dict[str, Any] | None:
    """A JSON object; an empty one for other JSON, None for what is none. Characters cut in two become `?`."""
    try:
        return OBJECT.decode(text)
    except msgspec.ValidationError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        convert_leniently = json.dumps(json.loads(text.decode("utf-8", "replace")), ensure_ascii=False)
        return OBJECT.decode(convert_leniently.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


class Thoughts:
    """Splits `<think>…</think>` off content that arrives in pieces; a tag cut in two is held back."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self) -> None:
        self.held: str = ""
        self.inside = False
        self.begun = False
        """Something other than white space has been content."""
        self.seen = False
        """Reasoning has come by another way, or has ended: what looks like a tag now is text."""

    def feed(self, text: str, delta: Delta) -> None:
        if self.begun and not self.inside and not self.held and (self.seen or "<" not in text):
            delta["content"] = delta.get("content", "") + text
            return
        text, self.held = self.held + text, ""
        if not self.begun and not self.inside and not self.seen:
            bare = text.lstrip()
            if bare.startswith(self.OPEN):
                self.inside, text = True, bare[len(self.OPEN) :]
            elif self.OPEN.startswith(bare):
                self.held = text
                return
        self.split(text, delta)

    def split(self, text: str, delta: Delta) -> None:
        """Look for the closing tag: what stands before it was thought, also when no opening tag was sent."""
        before, tag, after = text.partition(self.CLOSE) if not self.seen else (text, "", "")
        if self.OPEN in before and not self.inside and not self.seen:
            self.seen, self.begun, tag = True, True, ""  # in the middle of a text: it speaks about such tags
        if tag:
            self.add("reasoning_content", before, delta)
            if not self.inside:
                delta["thought_ends"] = True
            self.inside, self.seen, self.begun = False, True, False
            self.add("content", after, delta)
            return
        keep = 0 if self.seen else max(overlap(text, self.CLOSE), overlap(text, self.OPEN))
        self.held = text[len(text) - keep :]
        self.add("reasoning_content" if self.inside else "content", text[: len(text) - keep], delta)

    def add(self, key: Literal["content", "reasoning_content"], text: str, delta: Delta) -> None:
        if key == "content" and self.seen and not self.begun:
            text = text.lstrip()  # the white space between thinking and answer
        if text:
            self.begun = self.begun or (key == "content" and not text.isspace())
            delta[key] = delta.get(key, "") + text

    def end(self, delta: Delta) -> None:
        """Give out what was held back: it was no tag after all."""
        self.add("reasoning_content" if self.inside else "content", self.held, delta)
        self.held = ""


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def flatten(parts: Any) -> tuple[str, str]:
    """Content sent as a list of parts: its text, and its thoughts."""
    text = thought = ""
    for part in parts:
        match part:
            case {"type": "text", "text": str(piece)}:
                text += piece
            case {"type": "thinking", "thinking": str(piece)}:
                thought += piece
            case {"type": "thinking", "thinking": pieces}:
                thought += flatten(pieces)[0]
            case _:
                pass
    return text, thought


def too_long(where: str, said: str) -> ModelError:
    advice = "Take the prompt back (/undo), go on in a new session, or choose a model with a larger window."
    return ModelError(f"{where} refused the request as too long: {said}. {advice}", too_long=True)


def explain(body: bytes, kind: str) -> str:
    """What an error body says, as part of one sentence."""
    text = body.decode("utf-8", "replace").strip()
    try:
        return sentence_of(json.loads(text))
    except (ValueError, RecursionError):
        if "html" in kind or text[:1] == "<":
            return "it sent a web page instead of JSON; base_url usually ends in /v1"
        return one_line(text) or "it sent nothing"


def sentence_of(error: Any) -> str:
    """The words inside an error object, wherever the provider put them."""
    match error:
        case str(text):
            return one_line(text)
        case {"error": {} | [*_] as inner} if inner:
            return sentence_of(inner)
        case {"message": str(text), "metadata": {"raw": str(raw)}}:
            return f"{one_line(text)}: {explain(raw.encode(), '')}"
        case {"loc": [*path], "msg": str(text)}:
            return f"{'.'.join(map(str, path))}: {one_line(text)}"
        case {"message": inner} | {"detail": inner} | {"msg": inner} | {"error": inner} if inner:
            return sentence_of(inner)
        case [first, *_]:
            return sentence_of(first)
        case _:
            return one_line(json.dumps(error))


def one_line(text: str) -> str:
    """The beginning of a text from elsewhere, without what a terminal might obey."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:300].rstrip(" .")


def is_passing(error: Any) -> bool:
    """Whether an error object speaks of a trouble that may be over in a moment."""
    match error:
        case {"code": code} | {"status": code}:
            return str(code) in map(str, PASSING)
        case _:
            return False
