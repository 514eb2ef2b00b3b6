"""Requests to a model: what was asked, what came of it, and the exact body once more.

A body is stored as what came before its messages, once, and as references: to the messages of an earlier call that it
begins with, then to the rows of the log. Only what is in no row is written out.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic, time
from typing import Any

import crow_core
import msgspec
from crow_core.errors import StoreError
from crow_core.masking import mask
from crow_core.messages import Message
from crow_core.models.chat import ChatModel, ModelCall, Request
from crow_core.models.chat import encode as as_sent
from crow_core.models.usage import count_tokens, find_price
from sqlalchemy import Connection, Row, bindparam, insert, select, update

from crow_persistence import blobs
from crow_persistence.entries import LARGE, Damaged, decode, encode, mapped, names, plain, unpack
from crow_persistence.tables import calls, messages, prompts, renders, sessions

TEXT = 200
"""Characters from which a text that is also in a row is not written out."""
SIGNS = ("blob:", "row:", "text:")
"""What a string in a written-out message begins with when it stands for a blob, for the content of a row, or for what
follows."""
ADD = insert(calls)
CHANGE = update(calls).where(calls.c.id == bindparam("of"))
WRITTEN = select(calls.c.id).where(calls.c.id == bindparam("of"))


@dataclass
class Sent:
    """A request, as far as the next one can begin like it."""

    call: str
    body: Request
    head: bytes
    """The body's JSON up to its messages."""
    hashes: dict[int, Any]
    """The running hash of the body's JSON, after so many messages; of the last few."""
    described: dict[str, Any]
    """What a row of `calls` says of the body but for its messages."""
    secrets: Collection[str]
    """What was masked in that."""


@dataclass
class Trail:
    """What the requests of one open session are made of. Not for two threads at once."""

    log: Sequence[Message]
    rows: Sequence[int]
    """The messages rows of the log's first entries, in their order; both grow."""
    secrets: Collection[str] = ()
    """What is masked before it is written."""
    _read: int = 0
    """Entries of the log that the following know."""
    _entries: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Which entry is sent as these bytes, by their digest; without its reasoning."""
    _texts: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Which entry's content is this long text, by its digest."""
    _renders: dict[str, int] = field(default_factory=dict[str, int])
    """The row of the latest render, by its purpose."""
    _sent: dict[str, Sent] = field(default_factory=dict[str, Sent])
    """The latest request, by its purpose."""

    def read(self) -> None:
        """Take in what has been added to the log."""
        for at in range(self._read, min(len(self.log), len(self.rows))):
            entry = self.log[at]
            if "role" in entry:
                self._entries[digest(sent(entry))] = at
                if isinstance(content := entry.get("content"), str) and len(content) >= TEXT:
                    self._texts[digest(content)] = at
            elif (notes := entry.get("crow", {})).get("kind") == "render":
                self._renders[notes["purpose"]] = self.rows[at]
            self._read = at + 1

    def render(self, purpose: str) -> int | None:
        """The row of the prompt that a call of this purpose was asked with: its own, or the system prompt."""
        return self._renders.get(purpose, self._renders.get("system"))

    def knows(self, model_call: ModelCall) -> bool:
        """Whether `note` has seen this call with the body it has now."""
        latest = self._sent.get(model_call.purpose)
        return latest is not None and latest.call == model_call.id and latest.body is body_of(model_call)

    def note(self, connection: Connection, model_call: ModelCall) -> tuple[dict[str, Any], dict[str, bytes]]:
        """What a row of `calls` says of the request, and the blobs that it names; the next request may refer to it."""
        self.read()
        body = body_of(model_call)
        asked: list[Any] = body.get("messages", [])
        earlier = [(common(asked, one.body.get("messages", [])), one) for one in self._sent.values()]
        shared, like = max(earlier, key=lambda pair: pair[0], default=(0, None))
        if like is None or not shared or like.call == model_call.id or not is_written(connection, like.call):
            shared, like = 0, None
        data: dict[str, bytes] = {}
        head = as_sent({**body, "messages": []})
        if like and like.head == head and like.secrets == self.secrets:
            described = like.described
        else:
            described = self.describe(body, data)
        own = [self.reference(message, data) for message in asked[shared:]]
        self._sent[model_call.purpose] = latest = Sent(model_call.id, body, head, {}, described, self.secrets)
        columns = {
            **described,
            "before": like.call if like else None,
            "messages": encode([shared, *own]),
            "digest": whole_digest(latest, asked, like, shared),
        }
        return columns, data

    def describe(self, body: Request, data: dict[str, bytes]) -> dict[str, Any]:
        """What a row of `calls` says of a body but for its messages."""
        head = encode(mask({**body, "messages": []}, self.secrets)).encode()
        data[hash := hashlib.sha256(head).hexdigest()] = head
        sampling = {key: value for key, value in body.items() if key not in ("model", "tools", "messages")}
        return {
            "head": hash,
            "tools": digest(body.get("tools", [])).hex(),
            "sampling": encode(mask(sampling, self.secrets)),
        }

    def reference(self, message: dict[str, Any], data: dict[str, bytes]) -> Any:
        """A message in as few words as possible: a row's number, with the key of its reasoning if that was sent too,
        or the message itself."""
        bare = {key: message[key] for key in ("role", "tool_call_id", "content", "tool_calls") if key in message}
        if (at := self._entries.get(digest(bare))) is not None:
            if list(message) == list(bare):
                return self.rows[at]
            for thought in ("", *(key for key in message if key not in bare)):
                if as_sent(sent(self.log[at], thought)) == as_sent(message):
                    return [self.rows[at], thought]
        return mapped(mask(message, self.secrets), partial(self.apart, data=data))

    def apart(self, text: str, data: dict[str, bytes]) -> str:
        """A string of a written-out message, or what stands for it."""
        if len(text) >= TEXT and (at := self._texts.get(digest(text))) is not None:
            return f"row:{self.rows[at]}"
        if len(text) >= LARGE:
            kept = text.encode("utf-8", "surrogatepass")
            data[hash := hashlib.sha256(kept).hexdigest()] = kept
            return f"blob:{hash}"
        return f"text:{text}" if text.startswith(SIGNS) else text


def sent(entry: Mapping[str, Any], thought: str | None = None) -> dict[str, Any]:
    """An entry of the log as it goes to a model: without its reasoning, with it in its place (""), or with it last,
    under this name.

    For ever: stored requests are made again with it, whatever crow sends later.
    """
    message: dict[str, Any] = {"role": entry.get("role", "user")}
    if (id := entry.get("tool_call_id")) is not None:
        message["tool_call_id"] = id
    if thought == "":
        message["reasoning_content"] = entry.get("reasoning_content", "")
    message["content"] = entry.get("content") or ""
    if tool_calls := entry.get("tool_calls"):
        message["tool_calls"] = tool_calls
    if thought:
        message[thought] = entry.get("reasoning_content", "")
    return message


def write(connection: Connection, number: int, model_call: ModelCall, trail: Trail) -> None:
    """Write a call of the session `number` down: when its request has been sent, and once more when it has ended."""
    told = outcome(model_call, trail.secrets) if model_call.ended else {}
    if (
        model_call.ended
        and trail.knows(model_call)
        and connection.execute(CHANGE, {"of": model_call.id, **told}).rowcount
    ):
        return
    columns, data = trail.note(connection, model_call)
    blobs.keep(connection, data)
    since = monotonic() - model_call.started if model_call.started else 0.0
    told |= columns | {
        "session": number,
        "purpose": plain(model_call.purpose)[:32],
        "render": trail.render(model_call.purpose),
        "model": plain(str(body_of(model_call).get("model") or model_call.model.name)),
        "endpoint": plain(model_call.model.where) if isinstance(model_call.model, ChatModel) else "",
        "crow": crow_core.__version__,
        "started": round((time() - since) * 1000),
    }
    if not connection.execute(CHANGE, {"of": model_call.id, **told}).rowcount:
        connection.execute(ADD, {"id": model_call.id, **told})


def body_of(model_call: ModelCall) -> Request:
    """What was sent; of a model that does not tell, what it was asked."""
    return model_call.sent or model_call.request


def outcome(model_call: ModelCall, secrets: Collection[str]) -> dict[str, Any]:
    """What a row of `calls` says of a call that has ended."""
    counted = count_tokens(model_call) if model_call.usage or not model_call.error else None
    cost = find_price(model_call) if counted else None
    return {
        "first": (model_call.first - model_call.started) * 1000 if model_call.first else None,
        "total": (model_call.ended - model_call.started - model_call.held) * 1000,
        "stop_reason": plain(model_call.finish_reason) or None,
        "error": plain(mask(model_call.error, secrets)) or None,
        "usage": encode(model_call.usage) if model_call.usage else None,
        "input": counted and counted["prompt"],
        "output": counted and counted["completion"],
        "cached": counted and counted["cached"],
        "cost": cost and cost[0],
        "currency": cost and plain(cost[1])[:8],
    }


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many messages two requests begin with alike. What was not made anew is not looked into."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def is_written(connection: Connection, id: str) -> bool:
    """Whether the call is in the database: the transaction that wrote it may have failed."""
    return connection.scalar(WRITTEN, {"of": id}) is not None


def whole_digest(latest: Sent, asked: Sequence[Any], like: Sent | None, shared: int) -> str:
    """The digest of the whole body as JSON. What it shares with the one it begins like is not hashed again."""
    end = b'"messages":[]}'
    if not latest.head.endswith(end):
        return hashlib.sha256(as_sent(latest.body)).hexdigest()
    start, hash = 0, hashlib.sha256(latest.head[:-2])
    if like and like.head == latest.head:
        start = max((at for at in like.hashes if at <= shared), default=0)
        hash = like.hashes[start].copy() if start else hash
    try:
        for at, message in enumerate(islice(asked, start, None), start):
            hash.update(b"," * (at > 0) + msgspec.json.encode(message))
            if at + 2 >= len(asked):  # the next request begins with all of these, or with all but the last
                latest.hashes[at + 1] = hash.copy()
    except UnicodeEncodeError:  # half a surrogate pair: the whole body is spelled in another way
        latest.hashes.clear()
        return hashlib.sha256(as_sent(latest.body)).hexdigest()
    hash.update(end[-2:])
    return hash.hexdigest()


def digest(value: Any) -> bytes:
    return hashlib.sha256(as_sent(value)).digest()


def find(connection: Connection, prefix: str) -> Row[Any]:
    """The call whose id begins so, with its session's id and its prompt. Raises StoreError."""
    wanted = told().where(calls.c.id.startswith(plain(prefix), autoescape=True)).limit(6)
    found: Sequence[Row[Any]] = connection.execute(wanted).all()
    exact = [row for row in found if row.id == prefix]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found and prefix:
        listed = ", ".join(row.id for row in found[:5])
        raise StoreError(f"More than one call begins with {prefix!r}: {listed} … Give more of its id.")
    raise StoreError(f"There is no call {prefix!r}. `crow calls list` shows those there are.")


def listing(connection: Connection, number: int | None = None, limit: int | None = None) -> Sequence[Row[Any]]:
    """The calls of a session, or of all, the latest first."""
    wanted = told() if number is None else told().where(calls.c.session == number)
    return connection.execute(wanted.order_by(calls.c.started.desc(), calls.c.id).limit(limit)).all()


def told() -> Any:
    """All of `calls` but the messages, with the session's id (`of`), the prompt's name and its version's number."""
    columns = [column for column in calls.c if column is not calls.c.messages]
    prompt = prompts.c.name.label("prompt"), prompts.c.number.label("version")
    joined = select(*columns, sessions.c.id.label("of"), *prompt).join(sessions, calls.c.session == sessions.c.number)
    return joined.outerjoin(renders, calls.c.render == renders.c.message).outerjoin(
        prompts, renders.c.prompt == prompts.c.id
    )


def body(connection: Connection, id: str) -> tuple[Request, bool]:
    """The body of a call's request, and whether it is the one that was sent, byte for byte. Raises StoreError."""
    call = connection.execute(select(calls).where(calls.c.id == id)).one_or_none()
    if call is None:
        raise StoreError(f"There is no call {id!r}. `crow calls list` shows those there are.")
    try:
        head: Request = decode(blobs.fetch(connection, [call.head])[call.head].decode())
        asked = restored(connection, references(connection, call))
        request = {**head, "messages": asked}
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"The request of call {id} is damaged; `crow db check` says where.") from error
    return request, hashlib.sha256(as_sent(request)).hexdigest() == call.digest


def references(connection: Connection, call: Row[Any]) -> list[Any]:
    """What stands for all messages of a call, also for those with which it begins like an earlier one."""
    parts: list[list[Any]] = []
    seen: set[str] = set()
    upto = None
    at: Row[Any] | None = call
    while at is not None and at.id not in seen:
        seen.add(at.id)
        shared, *own = decode(at.messages)
        parts.append(own if upto is None else own[: max(upto - shared, 0)])
        upto = shared if upto is None else min(shared, upto)
        at = connection.execute(select(calls).where(calls.c.id == at.before)).one_or_none() if upto else None
    return [reference for part in reversed(parts) for reference in part]


def restored(connection: Connection, references: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages that these stand for; what is lost is left out."""
    rows: set[int] = set()
    hashes: set[str] = set()

    def collect(text: str) -> str:
        if text.startswith("row:"):
            rows.add(int(text[4:]))
        elif text.startswith("blob:"):
            hashes.add(text[5:])
        return text

    for reference in references:
        match reference:
            case int(row) | [int(row), _]:
                rows.add(row)
            case _:
                mapped(reference, collect)
    entries, data = entries_of(connection, rows), blobs.fetch(connection, hashes)

    def back(text: str) -> str:
        if not text.startswith(SIGNS):
            return text
        sign, _, rest = text.partition(":")
        if sign == "row":
            return str(entries[int(rest)].get("content"))
        return rest if sign == "text" else data[rest].decode("utf-8", "surrogatepass")

    asked: list[dict[str, Any]] = []
    for reference in references:
        with suppress(KeyError):
            match reference:
                case int(row):
                    asked.append(sent(entries[row]))
                case [int(row), str(thought)]:
                    asked.append(sent(entries[row], thought))
                case _:
                    asked.append(mapped(reference, back))
    return asked


def entries_of(connection: Connection, rows: Iterable[int]) -> dict[int, Message]:
    """The entries of these rows, as far as they are sent; those that are there and whole."""
    found: dict[int, Message] = {}
    columns = messages.c.id, messages.c.kind, messages.c.body
    for part in blobs.parts(rows):
        for row in connection.execute(select(*columns).where(messages.c.id.in_(part))):
            with suppress(Damaged, ValueError, AttributeError):
                text = encode({key: value for key, value in decode(row.body).items() if key != "crow"})
                found[row.id] = unpack(row.kind, text, blobs.fetch(connection, names(text)))
    return found
