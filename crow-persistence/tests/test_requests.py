"""Requests take little space, and are rebuilt byte for byte."""

import hashlib
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

import msgspec
import pytest
from crow_core.errors import StoreError
from crow_core.masking import mask
from crow_core.messages.message import Message, RawToolCall
from crow_core.messages.view import View
from crow_core.models.chat_model import ChatModel, encode_json
from crow_core.models.model_call import Model, ModelCall, Prices
from crow_core.models.quirks import Quirks
from crow_core.testing import ScriptedModel
from crow_persistence import blobs, requests
from crow_persistence import prompt_versions as prompts
from crow_persistence.batch import Batch
from crow_persistence.database import Database
from crow_persistence.entries import pack
from crow_persistence.tables import calls, links, messages, sessions
from crow_persistence.writer import WRITE_ORDER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, func, insert, select, update

PNG = "data:image/png;base64," + "iVBORw0KGgo" * 200
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = "You are a crow. " * 400


@dataclass
class Talk:
    """A session whose entries and model calls are stored at once."""

    connection: Connection
    model: Model = field(default_factory=lambda: ChatModel(name="m", base_url="http://me:pw@127.0.0.1:1/v1?k=v"))
    system: str = SYSTEM
    tools: list[dict[str, Any]] = field(default_factory=lambda: TOOLS)
    secrets: tuple[str, ...] = ()
    log: list[Message] = field(default_factory=list[Message])
    rows: list[int] = field(default_factory=list[int])
    number: int = 0

    def __post_init__(self) -> None:
        count = self.connection.scalar(select(func.count()).select_from(sessions))
        row = {"id": f"session{count}", "cwd": "/", "roots": "[]", "options": "{}", "created": 1, "updated": 1}
        self.number = self.connection.execute(insert(sessions), row).inserted_primary_key[0]
        self.encoder = requests.RequestEncoder(self.log, self.rows, self.secrets)
        self.view = View(self.log)

    def say(self, *entries: Message) -> None:
        """Append entries and store them."""
        for entry in entries:
            entry.setdefault("crow", {})["id"] = f"{len(self.log):032x}"
            self.log.append(entry)
            packed = pack(mask(entry, self.secrets))
            row = {"session": self.number, "at": 1, "kind": packed.kind, "body": packed.body}
            message = self.connection.execute(insert(messages), row).inserted_primary_key[0]
            blobs.store(self.connection, packed.blobs)
            for hash in packed.blobs:
                self.connection.execute(insert(links), {"message": message, "blob": hash})
            if packed.kind == "render":
                batch = Batch(self.connection, WRITE_ORDER, 0)
                prompts.add_render(batch, message, self.number, entry, 1)
                batch.execute()
            self.rows.append(message)

    def ask(self, purpose: str = "turn", write: bool = True, **more: Any) -> ModelCall:
        """Make a model call and store its request."""
        asked: list[Any] = [{"role": "system", "content": self.system}, *self.view.messages()]
        request = {**({"tools": self.tools} if self.tools else {}), **more, "messages": asked}
        model_call = ModelCall(self.model, request, purpose, started=monotonic())
        if isinstance(self.model, ChatModel):
            model_call.sent = self.model.build_body(request)
        if write:
            self.write(model_call)
        return model_call

    def write(self, model_call: ModelCall) -> None:
        batch = Batch(self.connection, WRITE_ORDER, 0)
        requests.add_model_call(batch, self.number, model_call, self.encoder)
        batch.execute()

    def end(self, model_call: ModelCall, **values: Any) -> None:
        model_call.ended = model_call.started + 2
        for name, value in values.items():
            setattr(model_call, name, value)
        self.write(model_call)

    def again(self, model_call: ModelCall) -> bytes:
        """Return the rebuilt body, after checking that it is reported as exact."""
        body, exact = requests.rebuild_request(self.connection, model_call.id)
        assert exact == (encode_json(body) == encode_json(model_call.sent or model_call.request))
        return encode_json(body)

    def row(self, model_call: ModelCall) -> Any:
        return self.connection.execute(select(calls).where(calls.c.id == model_call.id)).one()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def use(id: str, arguments: str = "{}") -> RawToolCall:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def sees(id: str) -> Message:
    """Return a tool result with an image, which is sent to the model as the user's."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PNG}}]
    return {"role": "tool", "tool_call_id": id, "content": parts}


def turn(n: int) -> list[Message]:
    """Return a prompt, a tool model_call, its result, and a reply."""
    return [
        user(f"Question {n}"),
        {"role": "assistant", "reasoning_content": f"Thought {n}", "content": "", "tool_calls": [use(f"c{n}")]},
        {"role": "tool", "tool_call_id": f"c{n}", "content": f"Answer {n} " * 100},
        {"role": "assistant", "content": f"Reply {n}"},
    ]


@pytest.fixture
def talk(database: Database) -> Any:
    with database.begin_write() as connection:
        yield Talk(connection)


def test_body_is_rebuilt_byte_for_byte(talk: Talk):
    asked: list[ModelCall] = []
    for n in range(5):
        for entry in turn(n):
            talk.say(entry)
            asked.append(talk.ask())
    for model_call in asked:
        assert talk.again(model_call) == encode_json(model_call.sent)
        assert talk.row(model_call).digest == hashlib.sha256(encode_json(model_call.sent)).hexdigest()


def test_model_call_stores_only_new_messages(talk: Talk):
    sizes: list[int] = []
    for n in range(30):
        talk.say(*turn(n))
        sizes.append(len(talk.row(talk.ask()).messages))
    assert sizes[0] < 150
    assert max(sizes[1:]) < 30
    assert SYSTEM not in talk.row(talk.ask()).messages
    assert talk.connection.scalar(select(func.count(calls.c.head.distinct()))) == 1


def test_reopened_session_refers_to_its_rows(talk: Talk):
    for n in range(30):
        talk.say(*turn(n))
    talk.ask()
    talk.encoder = requests.RequestEncoder(talk.log, talk.rows)
    model_call = talk.ask()
    row = talk.row(model_call)
    assert row.before is None
    assert len(row.messages) < 12 * len(talk.log)
    assert talk.again(model_call) == encode_json(model_call.sent)


QUIRKS = [
    Quirks(),
    Quirks(echo="always"),
    Quirks(echo="tool_calls", reasoning="reasoning"),
    Quirks(echo="tags", content="parts"),
    Quirks(call_ids="nine", images=False, parallel_calls=False, stream_usage=False),
    Quirks(system_role="user", schemas="plain"),
    Quirks(system_role="developer"),
]


@pytest.mark.parametrize("quirks", QUIRKS, ids=range(len(QUIRKS)))
def test_body_adapted_by_quirks_is_rebuilt(talk: Talk, quirks: Quirks):
    talk.model = ChatModel(
        name="m", base_url="http://x", quirks=quirks, parameters={"temperature": 0.1, "max_tokens": 9}
    )
    talk.say(*turn(1), user("And now?"), {"role": "assistant", "content": "", "tool_calls": [use("z", "{")]}, sees("z"))
    first = talk.ask()
    talk.say(*turn(2))
    second = talk.ask()
    for model_call in (first, second):
        assert talk.again(model_call) == encode_json(model_call.sent)
        assert PNG not in talk.row(model_call).messages
    assert "Answer 1 Answer 1" not in talk.row(first).messages


def test_request_is_stored_for_a_model_that_does_not_report_its_body(talk: Talk):
    talk.model = ScriptedModel([])
    talk.say(*turn(1))
    model_call = talk.ask()
    assert talk.again(model_call) == encode_json(model_call.request)
    assert (
        talk.row(model_call).messages
        == encode_json([0, {"role": "system", "content": blob(SYSTEM)}, *refs(talk)]).decode()
    )


def blob(text: str) -> str:
    return "blob:" + hashlib.sha256(text.encode()).hexdigest()


def refs(talk: Talk) -> list[Any]:
    return [[row, ""] if "reasoning_content" in e else row for row, e in zip(talk.rows, talk.log, strict=True)]


entries = st.sampled_from(["user", "reply", "thought", "call", "bad call", "answer", "image", "marker", "long", "odd"])
STRINGS = ["blob:" + "0" * 64, "row:1", "text:x", "\udc80", "a\0b", "é\u2028", "", "1" * 300, "1" * 2000]


def entry_of(kind: str, n: int) -> Message:
    match kind:
        case "user":
            return user(f"Question {n}")
        case "reply":
            return {"role": "assistant", "content": f"Reply {n % 3}"}
        case "thought":
            return {"role": "assistant", "reasoning_content": "Hm.", "content": STRINGS[n % 9]}
        case "call" | "bad call":
            arguments = '{"a": 1}' if kind == "call" else '{"a": ' + STRINGS[n % 9].replace("\udc80", "")
            return {"role": "assistant", "content": "", "tool_calls": [use("c", arguments), use(f"d{n}")]}
        case "answer":
            return {"role": "tool", "tool_call_id": "c", "content": STRINGS[n % 9]}
        case "image":
            return sees("c")
        case "marker":
            return {"crow": {"kind": "title", "title": "x"}}
        case "long":
            return user("long " * 300)
        case _:
            return {"role": "user", "content": [{"type": "text", "text": STRINGS[n % 9]}]}


@settings(
    max_examples=settings.default.max_examples * 6 // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.tuples(entries, st.booleans()), max_size=12), st.sampled_from(QUIRKS), st.data())
def test_requests_of_any_log_can_be_rebuilt(talk: Talk, kinds: Any, quirks: Quirks, data: st.DataObject):
    fresh = Talk(talk.connection, ChatModel(name="m", base_url="http://x", quirks=quirks), system="S" * 1500)
    asked: list[ModelCall] = []
    for n, (kind, asks) in enumerate(kinds):
        fresh.say(entry_of(kind, n))
        if asks:
            purpose = data.draw(st.sampled_from(["turn", "turn", "title"]))
            model_call = fresh.ask(purpose, **({"seed": 2**70} if n % 5 == 4 else {}))
            if data.draw(st.booleans()):
                fresh.end(model_call)
            asked.append(model_call)
    for model_call in asked:
        assert fresh.again(model_call) == encode_json(model_call.sent)
        assert fresh.row(model_call).digest == hashlib.sha256(encode_json(model_call.sent)).hexdigest()


def test_outcome_is_stored_when_the_model_call_ends(talk: Talk):
    talk.model = ChatModel(name="m", base_url="http://me:pw@127.0.0.1:1/v1?k=v", prices=Prices(1, 2, 0.5, "EUR"))
    template = {"prompt": "system", "version": "", "template": "T", "variables": {}, "text": SYSTEM}
    talk.say({"crow": {"kind": "render", "purpose": "system", **template}}, user("Hi"))
    model_call = talk.ask(temperature=0.5)
    row = talk.row(model_call)
    assert (row.purpose, row.model, row.render, row.endpoint) == ("turn", "m", talk.rows[0], "http://127.0.0.1:1/v1")
    assert msgspec.json.decode(row.sampling) == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    assert row.tools == hashlib.sha256(msgspec.json.encode(TOOLS)).hexdigest()
    assert (row.total, row.usage, row.cost) == (None, None, None)
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 60}}
    talk.end(model_call, first_delta=model_call.started + 0.5, finish_reason="stop", usage=usage)
    row = talk.row(model_call)
    assert (round(row.first), round(row.total), row.stop_reason, row.error) == (500, 2000, "stop", None)
    assert (row.input, row.output, row.cached) == (100, 10, 60)
    assert (round(row.cost * 1e6), row.currency) == (40 + 30 + 20, "EUR")
    found = requests.find_model_call(talk.connection, model_call.id[:6])
    assert (found.of, found.prompt, found.version) == ("session0", "system", 1)
    assert talk.again(model_call) == encode_json(model_call.sent)


def test_failed_model_call_stores_its_error_and_no_tokens(talk: Talk):
    talk.say(user("Hi"))
    model_call = talk.ask()
    talk.end(model_call, error="The endpoint\0broke off.")
    row = talk.row(model_call)
    assert (row.error, row.input, row.cost, row.stop_reason) == ("The endpoint broke off.", None, None, None)


def test_model_call_is_inserted_at_its_end_if_its_start_was_not_written(talk: Talk):
    talk.say(user("Hi"))
    model_call = talk.ask(write=False)
    talk.end(model_call, finish_reason="stop")
    assert talk.row(model_call).stop_reason == "stop"
    assert talk.again(model_call) == encode_json(model_call.sent)


def test_request_does_not_refer_to_rows_of_a_failed_transaction(database: Database):
    with database.begin_write() as connection:
        talk = Talk(connection)
        talk.say(*turn(1))
        before = connection.begin_nested()
        lost = talk.ask()
        before.rollback()
        talk.encoder = requests.RequestEncoder(talk.log, talk.rows)  # as the store does after a failure
        talk.say(*turn(2))
        model_call = talk.ask()
        assert talk.row(model_call).before is None
        assert talk.again(model_call) == encode_json(model_call.sent)
        talk.end(lost, finish_reason="stop")
        assert talk.again(lost) == encode_json(lost.sent)


def test_retried_request_is_stored_as_last_sent(talk: Talk):
    talk.say(user("Hi"))
    model_call = talk.ask(temperature=1)
    model_call.sent = {key: value for key, value in model_call.sent.items() if key != "temperature"}
    talk.write(model_call)
    talk.end(model_call, finish_reason="stop")
    assert talk.again(model_call) == encode_json(model_call.sent)
    assert "temperature" not in talk.row(model_call).sampling


def test_crows_own_secrets_are_in_no_request(talk: Talk):
    secret = "s3cr3t" * 4
    other = Talk(talk.connection, system=f"Key: {secret}", secrets=(secret,))
    other.say(user(f"My key is {secret}"), {"role": "assistant", "content": "", "tool_calls": [use("c", f'"{secret}')]})
    model_call = other.ask(user=secret)
    body, exact = requests.rebuild_request(other.connection, model_call.id)
    assert not exact
    assert [message["content"] for message in body["messages"]][:2] == ["Key: [secret]", "My key is [secret]"]
    stored = [str(tuple(row)) for table in (calls, messages) for row in talk.connection.execute(select(table))]
    stored += [row.data.decode() for row in talk.connection.execute(select(blobs.blobs))]
    assert not [text for text in stored if secret in text]


def test_blobs_of_a_request_are_not_deleted(talk: Talk):
    talk.say(user("Hi"))
    model_call = talk.ask()
    blobs.delete_unused(talk.connection, [blob(SYSTEM)[5:], talk.row(model_call).head])
    assert talk.again(model_call) == encode_json(model_call.sent)


@pytest.mark.parametrize("damage", ["row", "body", "blob", "before", "head", "messages"])
def test_damaged_request_is_reported_and_the_rest_rebuilt(talk: Talk, damage: Literal["row", "body", "blob", "head"]):
    talk.say(*turn(1))
    first = talk.ask()
    talk.say(*turn(2))
    model_call = talk.ask()
    match damage:
        case "row":
            talk.connection.execute(delete(messages).where(messages.c.id == talk.rows[3]))
        case "body":
            talk.connection.execute(update(messages).where(messages.c.id == talk.rows[3]).values(body="["))
        case "blob":
            talk.connection.execute(delete(blobs.blobs).where(blobs.blobs.c.hash == blob(SYSTEM)[5:]))
        case "before":
            talk.connection.execute(delete(calls).where(calls.c.id == first.id))
        case "head":
            row = update(blobs.blobs).where(blobs.blobs.c.hash == talk.row(model_call).head)
            talk.connection.execute(row.values(data=b"{"))
        case "messages":
            talk.connection.execute(update(calls).where(calls.c.id == model_call.id).values(messages="[0, {"))
    if damage in ("head", "messages"):
        with pytest.raises(StoreError, match="is damaged"):
            requests.rebuild_request(talk.connection, model_call.id)
        return
    body, exact = requests.rebuild_request(talk.connection, model_call.id)
    assert not exact
    left = {"row": 8, "body": 8, "blob": 8, "before": 4}
    assert len(body["messages"]) == left[damage]


def test_model_calls_are_found_by_id_prefix(talk: Talk):
    talk.say(user("Hi"))
    asked = [talk.ask() for _ in range(20)]
    assert requests.find_model_call(talk.connection, asked[3].id).id == asked[3].id
    assert [row.id for row in requests.list_model_calls(talk.connection, talk.number, 3)] != []
    assert requests.list_model_calls(talk.connection, talk.number + 1) == []
    for prefix, said in [
        ("", "There is no model call"),
        ("x", "There is no model call"),
        ("%", "There is no model call"),
    ]:
        with pytest.raises(StoreError, match=said):
            requests.find_model_call(talk.connection, prefix)
    shortest = min(range(16), key=lambda n: -sum(model_call.id.startswith(f"{n:x}") for model_call in asked))
    with pytest.raises(StoreError, match="More than one model call"):
        requests.find_model_call(talk.connection, f"{shortest:x}")
    with pytest.raises(StoreError, match="There is no model call"):
        requests.rebuild_request(talk.connection, "x")
