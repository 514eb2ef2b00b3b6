"""`crow db check` reports all damage, and nothing for an intact database."""

import hashlib
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest
from crow_persistence import audit
from crow_persistence.checks import check
from crow_persistence.database import LATEST_REVISION, Database
from sqlalchemy import create_engine, text

HASH, ID = r"\w{64}", r"\w{32}"
EMPTY = hashlib.sha256(b"[]").hexdigest()
SAID = (
    """INSERT INTO messages (id, session, at, kind, body) VALUES (99, 1, 0, 'user', '{"role":"user","content":"x"}')"""
)
LAST_CALL = "(SELECT max(started) FROM calls)"

DAMAGE = {
    "a body that is no JSON": (
        ["UPDATE messages SET body = '{' WHERE id = 2"],
        [rf"Row 2 of messages \(session {ID}\): its body is not the user entry that was written\."],
    ),
    "a body that is another entry's": (
        ["UPDATE messages SET body = (SELECT body FROM messages WHERE id = 4) WHERE id = 2"],
        [rf"Row 2 of messages \(session {ID}\): its body is not the user entry that was written\."],
    ),
    "a parent that is not there": (
        ["UPDATE messages SET parent = -1 WHERE id = 4"],
        [r"Row 4 of messages: its parent -1 is not there\."],
    ),
    "a parent that is younger": (
        ["UPDATE messages SET parent = 7 WHERE id = 4"],
        [r"Row 4 of messages: it follows row 7, which is not older\."],
    ),
    "a message without its session": (
        ["UPDATE messages SET session = 99 WHERE id = 23"],
        [r"Row 23 of messages: its session 99 is not there\."],
    ),
    "a head that is not there": (
        ["UPDATE sessions SET head = 99 WHERE number = 1"],
        [rf"Session {ID}: its head, row 99 of messages, is not there\."],
    ),
    "options that are no JSON": (
        ["UPDATE sessions SET options = '[]' WHERE number = 1"],
        [r"Row 1 of sessions: the JSON of its options is damaged\."],
    ),
    "a blob that is not there": (
        ["DELETE FROM blobs WHERE hash = (SELECT blob FROM links WHERE message = 14)"],
        [
            rf"Row 14/{HASH} of links: its blob {HASH} is not there\.",
            rf"Row 14 of messages \(session {ID}\): blob {HASH} of its body is not there\.",
        ],
    ),
    "a blob that was changed": (
        [
            "UPDATE blobs SET data = (SELECT data FROM blobs ORDER BY hash LIMIT 1)"
            " WHERE hash = (SELECT blob FROM links WHERE message = 14)"
        ],
        [rf"Row {HASH} of blobs: it was changed after it was written\."],
    ),
    "a blob that nothing says is used": (
        ["DELETE FROM links WHERE message = 14"],
        [rf"Row 14 of messages \(session {ID}\): blob {HASH} of its body is not in links\."],
    ),
    "a template that was changed": (
        ["UPDATE prompts SET template = 'Be evil.'"],
        [r"Row 1 of prompts \(system@1\): its template was changed after it was written\."],
    ),
    "a prompt that is not there": (
        ["DELETE FROM prompts"],
        [r"Row 3 of renders: its prompt 1 is not there\."],
    ),
    "a render that is not there": (
        ["UPDATE calls SET render = NULL", "DELETE FROM renders"],
        [rf"Row 3 of messages \(session {ID}\): its render is not there\."],
    ),
    "a rendered text that is not there": (
        ["DELETE FROM blobs WHERE hash = (SELECT text FROM renders)"],
        [
            rf"Row 3 of renders: its text {HASH} is not there\.",
            *[rf"Row {ID} of calls: blob {HASH}, of which its request was made, is not there\."] * 2,
        ],
    ),
    "a draft without its session": (
        ["UPDATE drafts SET session = 99"],
        [
            r"Row 99 of drafts: its session 99 is not there\.",
            r"Row 1/1 of draft_parts: its session 1 is not there\.",
            r"Row 1/2 of draft_parts: its session 1 is not there\.",
        ],
    ),
    "a part of a draft that is no JSON": (
        ["UPDATE draft_parts SET body = 'x' WHERE number = 2"],
        [r"Row 1/2 of draft_parts: the JSON of its body is damaged\."],
    ),
    "a draft that is no JSON": (
        ["UPDATE drafts SET body = 'x'"],
        [r"Row 1 of drafts: the JSON of its body is damaged\."],
    ),
    "a request without its beginning": (
        [f"UPDATE calls SET head = '{EMPTY}' WHERE started = {LAST_CALL}"],
        [rf"Row {ID} of calls: its head {EMPTY} is not there\."],
    ),
    "a request whose beginning is something else": (
        [
            f"UPDATE calls SET head = (SELECT blob FROM links WHERE message = 14) WHERE started = {LAST_CALL}",
        ],
        [rf"Row {ID} of calls: its head is not the request that was sent\."],
    ),
    "a request whose messages are no list": (
        [f"UPDATE calls SET messages = '3' WHERE started = {LAST_CALL}"],
        [rf"Row {ID} of calls: its list of messages is damaged\."],
    ),
    "a request of a message that is not there": (
        [f"UPDATE calls SET messages = '[0, 999]' WHERE started = {LAST_CALL}"],
        [rf"Row {ID} of calls: row 999 of messages, of which its request was made, is not there\."],
    ),
    "a request of what cannot even be asked for": (
        [f"""UPDATE calls SET messages = '[0, {2**70}, {{"content": "blob:\\u0000"}}]' WHERE started = {LAST_CALL}"""],
        [
            rf"Row {ID} of calls: (row {2**70} of messages|blob \x00), of which its request was made, is not there\.",
            rf"Row {ID} of calls: (row {2**70} of messages|blob \x00), of which its request was made, is not there\.",
        ],
    ),
    "a request of a blob that is not there": (
        [f"""UPDATE calls SET messages = '[0, {{"content": "blob:gone"}}]' WHERE started = {LAST_CALL}"""],
        [rf"Row {ID} of calls: blob gone, of which its request was made, is not there\."],
    ),
    "a request like one that is not there": (
        [f"UPDATE calls SET before = 'gone' WHERE started = {LAST_CALL}"],
        [rf"Row {ID} of calls: it begins like model call gone, which is not there\."],
    ),
    "a reply without its model call": (
        [f"DELETE FROM calls WHERE started = {LAST_CALL}"],
        [rf"Row \d+ of messages \(session {ID}\): its model call {ID} is not there\."],
    ),
    "a model call without its reply": (
        [f"UPDATE calls SET reply = 999 WHERE started = {LAST_CALL}"],
        [rf"Row {ID} of calls: its reply, row 999 of messages, is not there\."],
    ),
    "a message that is not in the index": (
        [SAID],
        [r"The full-text index holds 12 messages, and 13 are there\."],
    ),
    "a decision that was changed": (
        ["UPDATE decisions SET verdict = 'deny' WHERE number = 1"],
        [r"Decision 1 was changed or moved after it was written\."],
    ),
}


@pytest.fixture
def filled(database: Database, earlier: Callable[[str], None]) -> Database:
    """Return a database with rows in every table."""
    earlier(LATEST_REVISION)
    audit.anchor(database)
    database.close()
    return database


def change_rows(database: Database, statements: list[str]) -> None:
    """Change rows without any constraints."""
    engine = create_engine(database.url)
    with engine.begin() as connection:
        if not database.file:
            connection.execute(text("SET session_replication_role = replica"))
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def test_intact_database_has_no_faults(filled: Database) -> None:
    assert check(filled) == []


def test_new_database_has_no_faults(database: Database) -> None:
    assert check(database) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_reported(damage: str, filled: Database) -> None:
    statements, sentences = DAMAGE[damage]
    change_rows(filled, statements)
    found = check(filled)
    assert len(found) == len(sentences), found
    for said, expected in zip(found, sentences, strict=True):
        assert re.fullmatch(expected, said), said


only_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@only_sqlite
@pytest.mark.parametrize(
    "place",
    [
        "messages.body",
        "messages.kind",
        "blobs.data",
        "prompts.template",
        "calls.head",
        "calls.messages",
        "drafts.body",
        "draft_parts.body",
    ],
)
@pytest.mark.parametrize("value", ["x'00ff'", "CAST(x'61ff' AS TEXT)", "-5", "'null'"])
def test_invalid_value_is_reported(place: str, value: str, filled: Database) -> None:
    table, column = place.split(".")
    change_rows(filled, [f"UPDATE {table} SET {column} = {value} WHERE rowid = (SELECT max(rowid) FROM {table})"])
    assert check(filled)


@only_sqlite
def test_text_damaged_in_the_file_is_reported(filled: Database) -> None:
    assert filled.file
    content = filled.file.read_bytes()
    assert content.count(b"Put eggs in") == 1
    filled.file.write_bytes(content.replace(b"Put eggs in", b"Put egg\xff in"))
    assert [sentence[:17] for sentence in check(filled)] == ["Row 9 of messages"]


@only_sqlite
def test_overwritten_pages_are_reported_and_the_rest_is_checked(filled: Database) -> None:
    assert filled.file
    with closing(sqlite3.connect(filled.file)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'prompts'").fetchone()[0]
    with filled.file.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"x" * 4096)
    change_rows(filled, ["UPDATE drafts SET body = 'x'"])
    found = check(filled)
    assert found[0] == "The file is damaged where prompts is: database disk image is malformed."
    assert "Row 1 of drafts: the JSON of its body is damaged." in found


@only_sqlite
def test_file_that_is_not_a_database_is_reported_once(database: Database) -> None:
    assert database.file
    database.file.write_text("no database")
    (sentence,) = check(database)
    assert "crow.db is no SQLite database" in sentence
