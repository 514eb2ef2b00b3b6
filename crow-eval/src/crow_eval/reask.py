"""Ask stored sessions again, request by request, with another prompt, model or sampling; no tool is run.

Each request is the stored one with the changes applied. While a new reply calls the same tools with the same arguments,
the results come from the log. Later requests hold the new reply in place of the old one. The first reply that calls
other tools ends it: there are no results for it.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INTERNAL_ERROR, ClientCapabilities
from crow_core.app import Crow
from crow_core.errors import ModelError, PromptError, StoreError
from crow_core.messages.message import (
    Message,
    RawToolCall,
    answer_tool_call,
    get_id,
    marker_kind,
    parse_arguments,
    settle,
)
from crow_core.messages.notes import ReaskNotes
from crow_core.messages.passes import view
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model, ModelCall, ModelRequest
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_persistence import blobs
from crow_persistence.database import Database
from crow_persistence.loader import find_session, find_session_by_id, load_with_progress
from crow_persistence.requests import find_model_call, load_references, rebuild_request, sum_model_calls
from crow_persistence.tables import calls
from msgspec import Struct
from msgspec.json import encode
from sqlalchemy import Connection, Row, select

KIND = "reask"
"""The kind of the marker that begins a session that asks another one again."""
END_KIND = "reask-end"
"""The kind of the marker after its last reply."""
COPIED_MARKERS = frozenset({"render", "tools", "shrink", "compaction"})
"""The markers of the stored session that the new one has, too."""
OWN_KEYS = frozenset({"model", "messages", "tools", "stream", "stream_options"})
"""The keys of a request other than sampling parameters."""
NOT_RUN = "Not run: this session asks another one again, which has no result for this call."


@dataclass(frozen=True)
class Changes:
    """Changes to the replay. Empty and None fields keep the stored value."""

    prompt: Prompt | None = None
    """The template of the system prompt, rendered with the variables that are stored."""
    model: Model | None = None
    """Its own parameters are sent in place of the stored sampling."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Parameters of each request; None removes one."""
    start: int = 1
    """The number of the first request that is asked again; the replies before it are kept."""
    repetition: int = 1
    """From 2 on, the same is asked once more, in a session of its own."""

    def describe(self) -> ReaskNotes:
        """Return the changes as the marker in the log holds them."""
        where = self.model.display_url if isinstance(self.model, ChatModel) else ""
        return {
            "prompt": f"{self.prompt.name} {self.prompt.version}" if self.prompt else "",
            "model": f"{self.model.name} {where}".strip() if self.model else "",
            "sampling": dict(self.sampling),
            "start": self.start,
        }


@dataclass
class StoredRequest:
    """A request of a stored session, with its reply."""

    entry: int
    """The index of the reply in the log."""
    model_call: str = ""
    """The id of its model call; empty if none is stored, as in an imported session."""
    model: str = ""
    endpoint: str = ""


@dataclass
class StoredSession:
    """A stored session, as far as it is asked again."""

    id: str
    cwd: str
    title: str
    log: list[Message]
    rows: list[int]
    """The `messages` rows of the log's entries."""
    requests: list[StoredRequest]
    tools: list[dict[str, Any]]
    variables: dict[str, Any] | None = None
    """The variables of the system prompt; None if there was none."""
    system: str = ""
    """The text of the system prompt."""

    def derive_id(self, changes: Changes, *more: str) -> str:
        """Return the id of the session that asks this one again with these changes: the same each time."""
        again = [changes.repetition] if changes.repetition > 1 else []
        asked = [self.id, changes.describe(), [get_id(self.log[one.entry]) for one in self.requests], *more, *again]
        return hashlib.sha256(encode(asked, order="sorted")).hexdigest()[:32]


class Departure(Struct):
    """The first reply that calls other tools than the stored one, or other arguments."""

    request: int
    """Its number, from 1."""
    was: Message
    now: Message


class Reasked(Struct):
    """The outcome of a session that was asked again. Sums are over the requests that were asked."""

    origin: str
    session: str
    """The id of the session that holds the new replies; empty if none was asked."""
    requests: int
    """The number of requests of the stored session."""
    agreed: int = 0
    """The number of replies with the same tool calls as the stored ones."""
    reworded: int = 0
    """Of these, the number with another text."""
    not_asked: int = 0
    """The number of requests before the first that was to be asked, and behind the departure."""
    departure: Departure | None = None
    error: str = ""
    """The reason why it could not be asked to its end; asking again goes on there."""
    totals: dict[str, Any] = {}
    """Calls, tokens and cost by currency, of the new session."""
    before: dict[str, Any] = {}
    """The same of the stored calls that were asked again."""
    seconds: float = 0.0
    """The time that the new calls took."""
    seconds_before: float = 0.0
    went_on: int = 0
    """The number of requests behind the departure, where tools run."""
    denied: int = 0
    """The number of tool calls that were denied, where tools run."""
    stopped: str = ""
    """The limit that ended the session, where tools run."""


class NoClient:
    """The client of a session that nobody watches."""

    capabilities = ClientCapabilities()

    async def request(self, method: str, params: Struct) -> Any:
        """Refuse every request."""
        raise RpcError(INTERNAL_ERROR, "Nobody is there")

    async def notify(self, method: str, params: Struct) -> None:
        """Ignore updates."""


def load_stored(connection: Connection, prefix: str) -> StoredSession:
    """Load a session to ask it again. Raises StoreError if there is none, or it holds no reply."""
    row = find_session(connection, prefix)
    record, progress = load_with_progress(connection, row)
    if any(marker_kind(entry) == KIND for entry in record.log):
        raise StoreError(f"Session {row.id} asks another one again. Name that one, which its log names.")
    log = record.log[: len(progress.rows)]
    replies = {progress.rows[at]: at for at, entry in enumerate(log) if entry.get("role") == "assistant"}
    found: list[StoredRequest] = []
    columns = calls.c.id, calls.c.reply, calls.c.model, calls.c.endpoint
    for part in blobs.split_batches(replies):
        wanted = select(*columns).where(calls.c.reply.in_(part), calls.c.purpose == "turn", calls.c.error.is_(None))
        found += [
            StoredRequest(replies[one.reply], one.id, one.model, one.endpoint) for one in connection.execute(wanted)
        ]
    found = sorted(found or [StoredRequest(at) for at in replies.values()], key=lambda one: one.entry)
    if not found:
        raise StoreError(f"Session {row.id} has no reply that could be asked for again.")
    tools = record.tools or guess_tools(log)
    stored = StoredSession(row.id, row.cwd, row.title or "", log, progress.rows, found, tools)
    for entry in log:
        match entry.get("crow"):
            case {"kind": "render", "purpose": "system", "variables": variables, "text": str(text)}:
                stored.variables, stored.system = variables, text
            case _:
                pass
    return stored


def guess_tools(log: Sequence[Message]) -> list[dict[str, Any]]:
    """List the tools that a log calls, with the names of the arguments, for a session whose tools are not stored."""
    found: dict[str, dict[str, Any]] = {}
    for entry in log:
        for use in entry.get("tool_calls", []):
            found.setdefault(use["function"]["name"], {}).update({key: {} for key in parse_arguments(use) or {}})
    schema = {"type": "object"}
    return [
        {"type": "function", "function": {"name": name, "parameters": {**schema, "properties": arguments}}}
        for name, arguments in found.items()
    ]


def load_request(
    connection: Connection, stored: StoredSession, request: StoredRequest
) -> tuple[ModelRequest, list[int]]:
    """Rebuild a request. Return it with the index of the log's entry that each message is, -1 for none. Raises
    StoreError."""
    body, _ = rebuild_request(connection, request.model_call)
    row: Any = connection.execute(select(calls).where(calls.c.id == request.model_call)).one()
    index = {row: at for at, row in enumerate(stored.rows)}
    entries: list[int] = []
    for reference in load_references(connection, row):
        match reference:
            case int(of) | [int(of), _]:
                entries.append(index.get(of, -1))
            case _:
                entries.append(-1)
    # A lost message is left out of the body, so that the two lists do not fit any more.
    return body, entries if len(entries) == len(body["messages"]) else [-1] * len(body["messages"])


def change_request(
    body: ModelRequest, entries: Sequence[int], stored: StoredSession, replies: Mapping[int, Message], changes: Changes,
    system: str,
) -> ModelRequest:  # fmt: skip
    """Return a stored request with the changes, the new system prompt if there is one, and the new replies in place of
    the old ones."""
    sent: list[dict[str, Any]] = []
    for at, message in zip(entries, body["messages"], strict=True):
        if (new := replies.get(at)) is not None:
            message = replace_reply(message, new)
        elif system and message.get("role") in ("system", "developer") and message.get("content") == stored.system:
            message = {**message, "content": system}
        sent.append(message)
    if system and not any(message.get("content") == system for message in sent[:1]):
        raise StoreError(f"The system prompt of session {stored.id} is not in its requests as it was rendered.")
    kept = {key: value for key, value in body.items() if not changes.model or key in OWN_KEYS}
    if changes.model:
        kept.pop("model", None)
    for name, value in changes.sampling.items():
        kept.pop(name, None) if value is None else kept.update({name: value})
    return {**{key: value for key, value in kept.items() if key != "messages"}, "messages": sent}


def replace_reply(message: Mapping[str, Any], new: Message) -> dict[str, Any]:
    """Return a message of a request with the text and the reasoning of a new reply; its tool calls are the same."""
    replaced: dict[str, Any] = {}
    for key, value in message.items():
        if key in ("role", "tool_calls"):
            replaced[key] = value
        elif key == "content":
            replaced[key] = new.get("content") or ""
        else:
            replaced[key] = new.get("reasoning_content", "")
    return replaced


def match_calls(was: Message, now: Message) -> list[tuple[RawToolCall, RawToolCall]] | None:
    """Pair the tool calls of two replies that call the same tools with the same arguments, in any order; None if they
    do not."""
    left = sorted(was.get("tool_calls", []), key=to_comparable)
    right = sorted(now.get("tool_calls", []), key=to_comparable)
    if list(map(to_comparable, left)) != list(map(to_comparable, right)):
        return None
    return list(zip(left, right, strict=True))


def to_comparable(use: RawToolCall) -> tuple[str, bytes]:
    """Return a tool call's name and canonical arguments: the JSON with sorted keys, or the text if it is none."""
    arguments = parse_arguments(use)
    text = use["function"]["arguments"]
    return use["function"]["name"], encode(text if arguments is None else arguments, order="sorted")


async def reask_all(
    app: Crow,
    database: Database,
    sessions: Sequence[StoredSession],
    changes: Changes,
    choose_model: Callable[[StoredRequest], Model],
    at_once: int,
    report: Callable[[Reasked], None],
) -> list[Reasked]:
    """Ask sessions again, `at_once` at a time, and return the outcomes in their order. Results that an earlier run has
    stored are not computed again. `report` is called with each outcome.

    `app` has the extension `persistence`, with the same database. Raises StoreError, PromptError: before anything is
    asked, if the prompt cannot be rendered with the variables of one of the sessions, or `start` is behind its end.
    """
    for stored in sessions:
        render_system(stored, changes)
        if changes.start > len(stored.requests):
            raise StoreError(f"Session {stored.id} has {len(stored.requests)} requests, no request {changes.start}.")
        choose_model(stored.requests[-1])
    outcomes: dict[str, Reasked] = {}
    by_id = {stored.id: stored for stored in sessions}
    waiting = iter(by_id.values())

    async def work() -> None:
        for stored in waiting:
            outcomes[stored.id] = outcome = await reask(app, database, stored, changes, choose_model)
            report(outcome)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [outcomes[id] for id in by_id]


def render_system(stored: StoredSession, changes: Changes) -> str:
    """Render the new system prompt with the stored variables; "" if it stays. Raises PromptError, StoreError."""
    if changes.prompt is None:
        return ""
    if stored.variables is None:
        raise StoreError(f"Session {stored.id} has no system prompt with stored variables. Leave out --prompt.")
    return changes.prompt.render(**stored.variables)


async def reask(
    app: Crow,
    database: Database,
    stored: StoredSession,
    changes: Changes,
    choose_model: Callable[[StoredRequest], Model],
) -> Reasked:
    """Ask one session again, from where an earlier run stopped. A failure of the model is in the outcome."""
    id, error = stored.derive_id(changes), ""
    log = await asyncio.to_thread(read_log, database, id)
    if not any(marker_kind(entry) == END_KIND for entry in log):
        client = NoClient()
        if log:
            session = await app.load(client, id, stored.cwd)
        else:
            session = await app.open(client, stored.cwd, id=id)
        assert session is not None
        try:
            await ask_rest(session, database, stored, changes, choose_model)
        except (ModelError, PromptError, StoreError) as failure:
            error = str(failure)
        finally:
            await app.close(session)
        log = list(session.log)
    return await asyncio.to_thread(read_outcome, database, stored, changes, log, error)


def read_log(database: Database, id: str) -> list[Message]:
    """Return the log of a stored session; empty if there is none."""
    with database.begin_read() as connection:
        row = find_session_by_id(connection, id)
        return [] if row is None else load_with_progress(connection, row)[0].log


async def ask_rest(
    session: Session,
    database: Database,
    stored: StoredSession,
    changes: Changes,
    choose_model: Callable[[StoredRequest], Model],
) -> None:
    """Send the requests that have no new reply yet, up to a departure, and append the replies.

    Raises ModelError, StoreError.
    """
    system = render_system(stored, changes)
    replies: dict[int, Message] = {}
    for entry in session.log:
        number = int(entry.get("crow", {}).get("request", 0)) if entry.get("role") == "assistant" else 0
        if number:
            replies[stored.requests[number - 1].entry] = entry
    if not session.log:
        session.log.append({"crow": {"kind": KIND, "origin": stored.id, **changes.describe()}})
        if changes.prompt:
            session.prompts.render(changes.prompt, "system", **(stored.variables or {}))
        copy_entries(session, stored, 0, stored.requests[changes.start - 1].entry, changes)
        if stored.title:
            session.log.title = f"Asked again: {stored.title}"
    for number, request in enumerate(stored.requests[changes.start - 1 :], changes.start):
        if request.entry in replies:
            continue
        if request.model_call:
            body, entries = await asyncio.to_thread(read_request, database, stored, request)
            body = change_request(body, entries, stored, replies, changes, system)
        else:
            sent = view(session.log)
            head = [{"role": "system", "content": system or stored.system}] if system or stored.system else []
            given = {name: value for name, value in changes.sampling.items() if value is not None}
            body = {**given, **({"tools": stored.tools} if stored.tools else {}), "messages": [*head, *sent]}
        model_call = ModelCall(choose_model(request), body)
        try:
            await model_call.run()
        except BaseException:
            if model_call.sent:
                session.log.record(model_call)
                await session.log.finish()
            raise
        was = stored.log[request.entry]
        now = settle(model_call.reply, used=set())
        pairs = match_calls(was, now)
        for old, new in pairs or []:
            new["id"] = old["id"]
        now["crow"] = {**now.get("crow", {}), "id": model_call.id, "request": number, "departs": pairs is None}
        session.log.append(now)
        session.log.record(model_call)
        replies[request.entry] = now
        is_last = pairs is None or number == len(stored.requests)
        if is_last:
            for use in now.get("tool_calls", []):
                session.log.append(answer_tool_call(use, NOT_RUN))
            session.log.append({"crow": {"kind": END_KIND}})
        else:
            copy_entries(session, stored, request.entry + 1, stored.requests[number].entry, changes)
        await session.log.written()
        if is_last:
            return


def copy_entries(session: Session, stored: StoredSession, start: int, end: int, changes: Changes) -> None:
    """Append the stored entries from `start` to `end` that the requests derive from."""
    for entry in stored.log[start:end]:
        kind = marker_kind(entry)
        is_replaced = (
            changes.prompt is not None and kind == "render" and entry.get("crow", {}).get("purpose") == "system"
        )
        if ("role" in entry or kind in COPIED_MARKERS) and not is_replaced:
            session.log.append(cast(Message, {**entry, "crow": dict(entry.get("crow", {}))}))


def read_request(database: Database, stored: StoredSession, request: StoredRequest) -> tuple[ModelRequest, list[int]]:
    """Like `load_request`, with a connection of its own."""
    with database.begin_read() as connection:
        return load_request(connection, stored, request)


def read_outcome(
    database: Database, stored: StoredSession, changes: Changes, log: Sequence[Message], error: str
) -> Reasked:
    """Compare a session with the one that asked it again, as far as it got."""
    outcome = Reasked(stored.id, stored.derive_id(changes), len(stored.requests), error=error)
    old: list[str] = []
    for entry in log:
        notes = entry.get("crow", {})
        number = int(notes.get("request", 0)) if entry.get("role") == "assistant" else 0
        if not number:
            continue
        request = stored.requests[number - 1]
        was = stored.log[request.entry]
        old += [request.model_call] if request.model_call else []
        if notes.get("departs"):
            outcome.departure = Departure(number, strip(was), strip(entry))
        else:
            outcome.agreed += 1
            outcome.reworded += (was.get("content") or "") != (entry.get("content") or "")
    outcome.not_asked = outcome.requests - outcome.agreed - (outcome.departure is not None)
    add_sums(database, outcome, old)
    return outcome


def add_sums(database: Database, outcome: Reasked, asked: Sequence[str]) -> None:
    """Add to an outcome what the new session took, and what the model calls took that were asked again."""
    with database.begin_read() as connection:
        if row := find_session_by_id(connection, outcome.session):
            outcome.totals = sum_model_calls(connection, number=row.number)
            total = connection.execute(select(calls.c.total).where(calls.c.session == row.number)).scalars()
            outcome.seconds = sum(filter(None, total)) / 1000
        else:
            outcome.session = ""
        found = [find_model_call(connection, id) for id in asked]
    outcome.before = sum_rows(found)
    outcome.seconds_before = sum(row.total or 0 for row in found) / 1000


def sum_rows(found: Sequence[Row[Any]]) -> dict[str, Any]:
    """Sum model calls as `sum_model_calls` does."""
    cost: dict[str, float] = {}
    for row in found:
        if row.currency:
            cost[row.currency] = cost.get(row.currency, 0.0) + (row.cost or 0)
    sums = {name: sum(getattr(row, name) or 0 for row in found) for name in ("input", "cached", "output")}
    return {"calls": len(found), **sums, "cost": cost}


def strip(reply: Message) -> Message:
    """Return a reply without crow's notes."""
    return cast(Message, {key: value for key, value in reply.items() if key != "crow"})
