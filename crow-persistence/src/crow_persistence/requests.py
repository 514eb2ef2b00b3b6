"""Model calls: store the request and its outcome, and rebuild the exact body that was sent.

A body is stored as its JSON with an empty list of messages, and as references. They lead to the messages of an earlier
model call with the same beginning, then to rows of the log. Only messages that are in no row are written out.
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
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel, encode_json
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.token_usage import TokenTotals, count_tokens, find_price
from sqlalchemy import Connection, Row, bindparam, func, select, text, update

from crow_persistence import blobs
from crow_persistence.batch import Batch
from crow_persistence.entries import (
    MIN_BLOB_LENGTH,
    DamagedEntry,
    clean_text,
    decode,
    encode,
    find_blobs,
    map_strings,
    unpack,
)
from crow_persistence.tables import calls, messages, prompts, renders, sessions

MIN_TEXT_LENGTH = 200
"""Length, in characters, from which a text that is also in a row is stored as a reference to it."""
REPLY_DISTANCE = 200
"""Number of entries at the end of the log among which the reply of a model call is searched."""
PREFIXES = ("blob:", "row:", "text:")
"""Prefixes of strings in a written-out message: a reference to a blob, a reference to a row's content, or literal
text."""
CALL_COLUMNS = tuple(column.name for column in calls.columns)
UPSERT_CALL = text(
    "INSERT INTO calls ({}) VALUES ({}) ON CONFLICT (id) DO UPDATE SET {}".format(
        ", ".join(f'"{name}"' for name in CALL_COLUMNS),
        ", ".join(f":{name}" for name in CALL_COLUMNS),
        ", ".join(f'"{name}" = excluded."{name}"' for name in CALL_COLUMNS),
    )
)
OUTCOME_COLUMNS = (
    *("first", "total", "stop_reason", "error", "usage", "input", "output", "cached", "cost", "currency"),
    "reply",
)
"""Columns that a model call gets when it ends."""
UPDATE_CALL = (
    update(calls).where(calls.c.id == bindparam("of")).values({name: bindparam(name) for name in OUTCOME_COLUMNS})
)


@dataclass
class SentRequest:
    """A sent request; the next request may begin with the same messages."""

    model_call: str
    """Id of the model call."""
    body: ModelRequest
    head: bytes
    """The body's JSON up to its messages."""
    hashes: dict[int, Any]
    """Running hashes of the body's JSON, by number of messages; only for the last two."""
    columns: dict[str, Any]
    """Values of the `calls` columns that describe the body apart from its messages."""
    secrets: Collection[str]
    """The strings that were masked in these columns."""


@dataclass
class RequestEncoder:
    """Encodes the requests of one open session as references to its rows. Not safe for concurrent use."""

    log: Sequence[Message]
    rows: Sequence[int]
    """The `messages` rows of the log's first entries, in order. Both lists grow."""
    secrets: Collection[str] = ()
    """Strings that are masked before writing."""
    _entries_read: int = 0
    """Number of log entries that the following indexes cover."""
    _entries: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Index of an entry in the log, by the digest of the message it is sent as, without its reasoning."""
    _texts: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Index of an entry in the log, by the digest of its content, for long texts."""
    _renders: dict[str, int] = field(default_factory=dict[str, int])
    """Row of the latest render, by purpose."""
    _sent: dict[str, SentRequest] = field(default_factory=dict[str, SentRequest])
    """The latest request, by purpose."""

    def read_log(self) -> None:
        """Add new log entries to the indexes."""
        for at in range(self._entries_read, min(len(self.log), len(self.rows))):
            entry = self.log[at]
            if "role" in entry:
                self._entries[digest(to_sent_message(entry))] = at
                if isinstance(content := entry.get("content"), str) and len(content) >= MIN_TEXT_LENGTH:
                    self._texts[digest(content)] = at
            elif (notes := entry.get("crow", {})).get("kind") == "render":
                self._renders[notes.get("purpose", "")] = self.rows[at]
            self._entries_read = at + 1

    def find_render(self, purpose: str) -> int | None:
        """Return the row of the prompt for model calls of this purpose: their own prompt, or the system prompt."""
        return self._renders.get(purpose, self._renders.get("system"))

    def find_reply(self, model_call: ModelCall) -> int | None:
        """Return the row of a model call's reply, which is among the latest entries; None if there is none."""
        for at in range(len(self.rows) - 1, max(len(self.rows) - REPLY_DISTANCE, 0) - 1, -1):
            if self.log[at].get("crow", {}).get("id") == model_call.id:
                return self.rows[at]
        return None

    def has_encoded(self, model_call: ModelCall) -> bool:
        """Test whether this model call was encoded with the body it has now."""
        latest = self._sent.get(model_call.purpose)
        return latest is not None and latest.model_call == model_call.id and latest.body is sent_body(model_call)

    def forget(self, model_call: ModelCall) -> None:
        """Let no later request refer to a model call, which could not be stored."""
        self._sent = {purpose: sent for purpose, sent in self._sent.items() if sent.model_call != model_call.id}

    def encode_request(self, model_call: ModelCall) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the `calls` columns of a request, and the blobs they refer to. Later requests may refer to this one,
        so that this encoder must not be used further if it cannot be stored."""
        self.read_log()
        body = sent_body(model_call)
        sent_messages: list[Any] = body.get("messages", [])
        earlier = [(count_common(sent_messages, one.body.get("messages", [])), one) for one in self._sent.values()]
        shared, base = max(earlier, key=lambda pair: pair[0], default=(0, None))
        if base is None or not shared or base.model_call == model_call.id:
            shared, base = 0, None
        data: dict[str, bytes] = {}
        head = encode_json({**body, "messages": []})
        if base and base.head == head and base.secrets == self.secrets:
            body_columns = base.columns
        else:
            body_columns = self.encode_body(body, data)
        own = [self.encode_message(message, data) for message in sent_messages[shared:]]
        self._sent[model_call.purpose] = latest = SentRequest(model_call.id, body, head, {}, body_columns, self.secrets)
        columns = {
            **body_columns,
            "before": base.model_call if base else None,
            "messages": encode([shared, *own]),
            "digest": digest_body(latest, sent_messages, base, shared),
        }
        return columns, data

    def encode_body(self, body: ModelRequest, data: dict[str, bytes]) -> dict[str, Any]:
        """Return the `calls` columns that describe a body apart from its messages. Add its blobs to `data`."""
        head = encode(mask({**body, "messages": []}, self.secrets)).encode()
        data[hash := hashlib.sha256(head).hexdigest()] = head
        sampling = {key: value for key, value in body.items() if key not in ("model", "tools", "messages")}
        return {
            "head": hash,
            "tools": digest(body.get("tools", [])).hex(),
            "sampling": encode(mask(sampling, self.secrets)),
        }

    def encode_message(self, message: dict[str, Any], data: dict[str, bytes]) -> Any:
        """Return the shortest reference to a message: a row, a row and the key of the reasoning that was sent, or the
        message itself."""
        bare = {key: message[key] for key in ("role", "tool_call_id", "content", "tool_calls") if key in message}
        if (at := self._entries.get(digest(bare))) is not None:
            if list(message) == list(bare):
                return self.rows[at]
            for reasoning_key in ("", *(key for key in message if key not in bare)):
                if encode_json(to_sent_message(self.log[at], reasoning_key)) == encode_json(message):
                    return [self.rows[at], reasoning_key]
        return map_strings(mask(message, self.secrets), partial(self.encode_string, data=data))

    def encode_string(self, text: str, data: dict[str, bytes]) -> str:
        """Return a string of a written-out message, or a reference to it."""
        if len(text) >= MIN_TEXT_LENGTH and (at := self._texts.get(digest(text))) is not None:
            return f"row:{self.rows[at]}"
        if len(text) >= MIN_BLOB_LENGTH:
            blob = text.encode("utf-8", "surrogatepass")
            data[hash := hashlib.sha256(blob).hexdigest()] = blob
            return f"blob:{hash}"
        return f"text:{text}" if text.startswith(PREFIXES) else text


def to_sent_message(entry: Mapping[str, Any], reasoning_key: str | None = None) -> dict[str, Any]:
    """Convert a log entry to the message sent to a model. `reasoning_key` is None to leave the reasoning out, "" to put
    it before the content, or the key to put it under at the end.

    Stored requests are rebuilt with this function: its result must never change, whatever crow sends later.
    """
    message: dict[str, Any] = {"role": entry.get("role", "user")}
    if (id := entry.get("tool_call_id")) is not None:
        message["tool_call_id"] = id
    if reasoning_key == "":
        message["reasoning_content"] = entry.get("reasoning_content", "")
    message["content"] = entry.get("content") or ""
    if tool_calls := entry.get("tool_calls"):
        message["tool_calls"] = tool_calls
    if reasoning_key:
        message[reasoning_key] = entry.get("reasoning_content", "")
    return message


def add_model_call(batch: Batch, number: int, model_call: ModelCall, encoder: RequestEncoder) -> None:
    """Add a model call of the session `number` to a batch: when its request has been sent, and again when it has
    ended."""
    values = to_outcome_columns(model_call, encoder.secrets) if model_call.ended else {}
    if model_call.ended:
        values["reply"] = encoder.find_reply(model_call) if model_call.purpose == "turn" else None
    if model_call.ended and encoder.has_encoded(model_call):
        batch.add(UPDATE_CALL, {"of": model_call.id, **values})
        return
    columns, data = encoder.encode_request(model_call)
    batch.blobs |= data
    since = monotonic() - model_call.started if model_call.started else 0.0
    values |= columns | {
        "id": model_call.id,
        "session": number,
        "purpose": clean_text(model_call.purpose)[:32],
        "render": encoder.find_render(model_call.purpose),
        "model": clean_text(str(sent_body(model_call).get("model") or model_call.model.name)),
        "endpoint": clean_text(model_call.model.display_url) if isinstance(model_call.model, ChatModel) else "",
        "crow": crow_core.__version__,
        "started": round((time() - since) * 1000),
    }
    batch.add(UPSERT_CALL, dict.fromkeys(CALL_COLUMNS) | values)


def sent_body(model_call: ModelCall) -> ModelRequest:
    """Return the body that was sent; the request itself for a model that does not report it."""
    return model_call.sent or model_call.request


def to_outcome_columns(model_call: ModelCall, secrets: Collection[str]) -> dict[str, Any]:
    """Return the `calls` columns of a model call that has ended."""
    counted = count_tokens(model_call) if model_call.usage or not model_call.error else None
    cost = find_price(model_call) if counted else None
    return {
        "first": (model_call.first_delta - model_call.started) * 1000 if model_call.first_delta else None,
        "total": (model_call.ended - model_call.started - model_call.paused) * 1000,
        "stop_reason": clean_text(model_call.finish_reason) or None,
        "error": clean_text(mask(model_call.error, secrets)) or None,
        "usage": encode(model_call.usage) if model_call.usage else None,
        "input": counted and fit(counted["prompt"]),
        "output": counted and fit(counted["completion"]),
        "cached": counted and fit(counted["cached"]),
        "cost": cost and cost[0],
        "currency": cost and clean_text(cost[1])[:8],
    }


def fit(count: int) -> int | None:
    """Return a count, or None if it is too large for its column; `usage` keeps what the provider reported."""
    return count if count < 2**31 else None


def count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Count the messages that two requests begin with alike: comparing slices of the same objects is fast."""
    low, high = 0, min(len(first), len(second))
    middle = high  # nearly always
    while low < high:
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def digest_body(latest: SentRequest, sent_messages: Sequence[Any], base: SentRequest | None, shared: int) -> str:
    """Return the digest of the whole body as JSON. Messages shared with `base` are not hashed again."""
    end = b'"messages":[]}'
    if not latest.head.endswith(end):
        return hashlib.sha256(encode_json(latest.body)).hexdigest()
    start, hash = 0, hashlib.sha256(latest.head[:-2])
    if base and base.head == latest.head:
        start = max((at for at in base.hashes if at <= shared), default=0)
        hash = base.hashes[start].copy() if start else hash
    try:
        for at, message in enumerate(islice(sent_messages, start, None), start):
            hash.update((b"," if at else b"") + msgspec.json.encode(message))
            if at + 2 >= len(sent_messages):  # the next request begins with all messages, or all but the last
                latest.hashes[at + 1] = hash.copy()
    except UnicodeEncodeError:  # unpaired surrogate: the body is encoded in another way
        latest.hashes.clear()
        return hashlib.sha256(encode_json(latest.body)).hexdigest()
    hash.update(end[-2:])
    return hash.hexdigest()


def digest(value: Any) -> bytes:
    """Return the SHA-256 digest of a value as JSON."""
    return hashlib.sha256(encode_json(value)).digest()


def find_model_call(connection: Connection, prefix: str) -> Row[Any]:
    """Return the model call whose id begins with `prefix`, with its session's id and its prompt. Raises StoreError."""
    wanted = select_model_calls().where(calls.c.id.startswith(clean_text(prefix), autoescape=True)).limit(6)
    found: Sequence[Row[Any]] = connection.execute(wanted).all()
    exact = [row for row in found if row.id == prefix]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found and prefix:
        listed = ", ".join(row.id for row in found[:5])
        raise StoreError(f"More than one model call begins with {prefix!r}: {listed} … Give more of its id.")
    raise StoreError(f"There is no model call {prefix!r}. `crow calls list` shows all model calls.")


def list_model_calls(connection: Connection, number: int | None = None, limit: int | None = None) -> Sequence[Row[Any]]:
    """Return the model calls of a session, or of all, latest first."""
    wanted = select_model_calls() if number is None else select_model_calls().where(calls.c.session == number)
    return connection.execute(wanted.order_by(calls.c.started.desc(), calls.c.id).limit(limit)).all()


def sum_model_calls(connection: Connection, since: int = 0, number: int | None = None) -> dict[str, Any]:
    """Return the number of model calls started since a time in milliseconds, of a session or of all, with the sums of
    their tokens, and of their cost by currency."""
    sums: list[Any] = [func.coalesce(func.sum(column), 0) for column in (calls.c.input, calls.c.cached, calls.c.output)]
    wanted: Any = select(calls.c.currency, func.count(), *sums, func.sum(calls.c.cost)).where(calls.c.started >= since)
    wanted = wanted if number is None else wanted.where(calls.c.session == number)
    totals: dict[str, Any] = {"calls": 0, "input": 0, "cached": 0, "output": 0, "cost": {}}
    rows: Sequence[Any] = connection.execute(wanted.group_by(calls.c.currency)).all()
    for row in rows:
        for at, name in enumerate(("calls", "input", "cached", "output"), 1):
            totals[name] += int(row[at])
        if row[0]:
            totals["cost"][row[0]] = float(row[5] or 0)
    return totals


def load_totals(connection: Connection, number: int) -> TokenTotals:
    """Return the totals of a session's model calls, for the extension `usage`."""
    sums = sum_model_calls(connection, number=number)
    last: Any = select(calls.c.input, calls.c.output).where(calls.c.session == number, calls.c.purpose == "turn")
    used: Any = connection.execute(
        last.where(calls.c.input.is_not(None)).order_by(calls.c.started.desc()).limit(1)
    ).first()
    totals = TokenTotals(sums["calls"], sums["input"], sums["output"], sums["cached"])
    totals.used = used[0] + (used[1] or 0) if used else 0
    totals.currency, totals.cost = next(iter(sums["cost"].items()), ("", 0.0))
    return totals


def select_model_calls() -> Any:
    """Select all columns of `calls` but the messages, with the session's id (`of`), and the prompt's name and version
    number."""
    columns = [column for column in calls.c if column is not calls.c.messages]
    prompt = prompts.c.name.label("prompt"), prompts.c.number.label("version")
    joined = select(*columns, sessions.c.id.label("of"), *prompt).join(sessions, calls.c.session == sessions.c.number)
    return joined.outerjoin(renders, calls.c.render == renders.c.message).outerjoin(
        prompts, renders.c.prompt == prompts.c.id
    )


def rebuild_request(connection: Connection, id: str) -> tuple[ModelRequest, bool]:
    """Return the body of a request, and whether it equals the sent one byte for byte. Raises StoreError."""
    model_call = connection.execute(select(calls).where(calls.c.id == id)).one_or_none()
    if model_call is None:
        raise StoreError(f"There is no model call {id!r}. `crow calls list` shows all model calls.")
    try:
        head: ModelRequest = decode(blobs.fetch(connection, [model_call.head])[model_call.head].decode())
        sent_messages = restore_messages(connection, load_references(connection, model_call))
        request = {**head, "messages": sent_messages}
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"The request of model call {id} is damaged; `crow db check` says where.") from error
    return request, hashlib.sha256(encode_json(request)).hexdigest() == model_call.digest


def load_references(connection: Connection, model_call: Row[Any]) -> list[Any]:
    """Return the references for all messages of a model call, including those it shares with earlier ones."""
    parts: list[list[Any]] = []
    seen: set[str] = set()
    upto = None
    at: Row[Any] | None = model_call
    while at is not None and at.id not in seen:
        seen.add(at.id)
        shared, *own = decode(at.messages)
        parts.append(own if upto is None else own[: max(upto - shared, 0)])
        upto = shared if upto is None else min(shared, upto)
        at = connection.execute(select(calls).where(calls.c.id == at.before)).one_or_none() if upto else None
    return [reference for part in reversed(parts) for reference in part]


def restore_messages(connection: Connection, references: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages for these references. Lost ones are left out."""
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
                map_strings(reference, collect)
    entries, data = load_entries(connection, rows), blobs.fetch(connection, hashes)

    def restore_string(text: str) -> str:
        if not text.startswith(PREFIXES):
            return text
        prefix, _, rest = text.partition(":")
        if prefix == "row":
            return str(entries[int(rest)].get("content"))
        return rest if prefix == "text" else data[rest].decode("utf-8", "surrogatepass")

    sent_messages: list[dict[str, Any]] = []
    for reference in references:
        with suppress(KeyError):
            match reference:
                case int(row):
                    sent_messages.append(to_sent_message(entries[row]))
                case [int(row), str(thought)]:
                    sent_messages.append(to_sent_message(entries[row], thought))
                case _:
                    sent_messages.append(map_strings(reference, restore_string))
    return sent_messages


def load_entries(connection: Connection, rows: Iterable[int]) -> dict[int, Message]:
    """Return the entries of these rows without their `crow` key. Missing and damaged ones are left out."""
    found: dict[int, Message] = {}
    columns = messages.c.id, messages.c.kind, messages.c.body
    for part in blobs.split_batches(rows):
        for row in connection.execute(select(*columns).where(messages.c.id.in_(part))):
            with suppress(DamagedEntry, ValueError, AttributeError):
                text = encode({key: value for key, value in decode(row.body).items() if key != "crow"})
                found[row.id] = unpack(row.kind, text, blobs.fetch(connection, find_blobs(text)))
    return found
