"""Every entry is unpacked from its row unchanged; large strings in it are stored once."""

import json
from typing import Any

import pytest
from crow_core.messages.message import Message
from crow_persistence.entries import BLOB_PREFIX, MIN_BLOB_LENGTH, DamagedEntry, find_blobs, pack, unpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

any_text = st.text(st.characters(exclude_categories=[]))  # includes unpaired surrogates
odd_text = st.one_of(
    any_text,
    st.sampled_from(["", "blob:", "blob:" + "0" * 64, '"blob:', "\0", "\udc80", "\\", '"']),
    any_text.map(lambda text: (text or "x") * MIN_BLOB_LENGTH),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), odd_text)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(any_text, inner, max_size=3)),
    max_leaves=8,
)
contents = st.one_of(st.none(), odd_text, st.lists(st.dictionaries(st.sampled_from(["type", "text", "url"]), values)))
calls = st.fixed_dictionaries(
    {
        "id": any_text,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": any_text, "arguments": odd_text}),
    }
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": contents},
    optional={
        "reasoning_content": odd_text,
        "tool_calls": st.lists(calls, max_size=2),
        "tool_call_id": any_text,
        "crow": st.dictionaries(any_text, values, max_size=3),
    },
)
markers = st.builds(
    lambda kind, notes: {"crow": {**notes, "kind": kind}},
    st.sampled_from(["decision", "tools", "option", "title", "rewind", "of a later crow"]),
    st.dictionaries(st.one_of(st.just("schemas"), any_text), values, max_size=3),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(messages, markers))
def test_every_entry_is_unpacked_unchanged(entry: Any):
    row = pack(entry)
    assert unpack(row.kind, row.body, row.blobs) == entry
    assert set(row.blobs) <= find_blobs(row.body)
    row.body.encode()  # raises if a database could not store it
    assert "\0" not in row.body


def test_notes_of_other_types_than_this_version_writes_are_unpacked_unchanged():
    entry: Any = {"role": "user", "content": "hi", "crow": {"id": "a", "key": 5, "changes": {"by": "another"}}}
    row = pack(entry)
    assert unpack(row.kind, row.body, row.blobs) == entry


def test_large_strings_other_than_text_become_blobs():
    image, old, base64 = (
        "data:image/png;base64," + "A" * MIN_BLOB_LENGTH,
        "old\n" * MIN_BLOB_LENGTH,
        "B" * MIN_BLOB_LENGTH,
    )
    entries: list[Message] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]},
        {"role": "user", "content": "[attached]", "crow": {"blocks": [{"type": "audio", "data": base64}]}},
        {"role": "tool", "content": "ok", "crow": {"changes": [{"path": "/a", "old": old, "new": "short"}]}},
        {"crow": {"kind": "tools", "schemas": [{"function": {"description": "x" * MIN_BLOB_LENGTH}}]}},
    ]
    rows = [pack(entry) for entry in entries]
    assert [row.kind for row in rows] == ["user", "user", "tool", "tools"]
    assert all(len(row.body) < 300 for row in rows)
    assert [len(row.blobs) for row in rows] == [1] * 4
    assert list(rows[0].blobs.values()) == [image.encode()]
    assert list(rows[2].blobs.values()) == [old.encode()]
    assert '"short"' in rows[2].body


def test_message_text_stays_in_the_body_at_any_length():
    said = "word " * MIN_BLOB_LENGTH
    row = pack({"role": "user", "content": [{"type": "text", "text": said}]})
    assert said in row.body
    assert not row.blobs


def test_body_of_a_render_keeps_its_prompt_and_purpose():
    notes = {"kind": "render", "purpose": "system", "prompt": "system", "version": "0" * 12, "id": "1"}
    row = pack({"crow": {**notes, "template": "{{ a }}", "variables": {"a": 1}, "text": "1"}})
    assert unpack(row.kind, row.body, {}) == {"crow": notes}


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "null", '"text"', '{"crow": {"schemas": "{"}}', '{"crow": []}', "[" * 100_000]
)
def test_invalid_body_is_damaged(body: str):
    with pytest.raises(DamagedEntry) as caught:
        unpack("tools", body, {})
    assert caught.value.rest is None


def test_message_with_a_lost_attachment_keeps_the_rest():
    image, name = "data:image/png;base64," + "A" * MIN_BLOB_LENGTH, "b" * MIN_BLOB_LENGTH
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": image}}]
    row = pack({"role": "user", "content": parts, "crow": {"id": "1", "blocks": [{"data": name}]}})
    with pytest.raises(DamagedEntry) as caught:
        unpack(row.kind, row.body, {})
    rest = caught.value.rest
    assert rest is not None
    assert [part["type"] for part in rest.get("content") or [] if isinstance(part, dict)] == ["text", "text"]
    assert "Look:" in json.dumps(rest)
    assert BLOB_PREFIX not in json.dumps(rest)
    assert rest.get("crow") == {"id": "1"}
