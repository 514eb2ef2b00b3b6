"""Prompts: their versions, variables and renders."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_core.session.prompts import Prompt
from crow_persistence import prompt_versions as prompts
from crow_persistence.batch import Batch
from crow_persistence.database import Database
from crow_persistence.tables import messages, sessions
from crow_persistence.writer import WRITE_ORDER
from sqlalchemy import insert


def note(database: Database, name: str, template: str, at: int = 1) -> None:
    with database.begin_write() as connection:
        prompts.store_version(connection, name, template, at)


def render(database: Database, prompt: Prompt, purpose: str, at: int, session: str = "s1", **variables: Any) -> int:
    """Render a prompt in a session, as a session does. Return the marker's row."""
    notes = {"kind": "render", "purpose": purpose, "prompt": prompt.name, "version": prompt.version}
    text = prompt.render(**variables)
    marker: Message = {"crow": {**notes, "template": prompt.template, "variables": variables, "text": text}}
    with database.begin_write() as connection:
        number = connection.scalar(
            sessions.select().with_only_columns(sessions.c.number).where(sessions.c.id == session)
        )
        if number is None:
            row = {"id": session, "cwd": "/", "roots": "[]", "options": "{}", "created": at, "updated": at}
            number = connection.execute(insert(sessions), row).inserted_primary_key[0]
        row = {"session": number, "at": at, "kind": "render", "body": "{}"}
        message = connection.execute(insert(messages), row).inserted_primary_key[0]
        batch = Batch(connection, WRITE_ORDER, 0)
        prompts.add_render(batch, message, number, marker, at)
        batch.execute()
    return message


def numbers(database: Database, name: str = "") -> list[tuple[str, int, str]]:
    with database.begin_read() as connection:
        return [(row.name, row.number, row.template) for row in prompts.list_versions(connection, name)]


def test_versions_are_numbered_per_name_in_order_of_first_use(database: Database):
    for name, template in [("system", "a"), ("title", "a"), ("system", "b"), ("system", "a"), ("system", "c")]:
        note(database, name, template)
    assert numbers(database) == [("system", 1, "a"), ("system", 2, "b"), ("system", 3, "c"), ("title", 1, "a")]


def test_version_has_its_variables_and_time_of_first_use(database: Database):
    note(database, "system", "In {{ cwd }}{% for root in roots %} and {{ root }}{% endfor %}", 7)
    note(database, "system", "In {{ cwd }}{% for root in roots %} and {{ root }}{% endfor %}", 9)
    note(database, "broken", "{% for %}", 9)
    with database.begin_read() as connection:
        found = [prompts.find_version(connection, name) for name in ("system", "broken")]
    assert [(row.variables, row.first_seen) for row in found] == [('["cwd", "roots"]', 7), ("[]", 9)]


def test_concurrent_writers_agree_on_version_numbers(database: Database):
    """Each writer has a connection of its own, as a process has; all store the same versions in different order."""
    note(database, "system", "0")
    others = [Database(str(database.url.render_as_string(hide_password=False)), database.folder) for _ in range(4)]
    templates = [str(n) for n in range(12)]

    def work(number: int) -> None:
        for template in templates[number:] + templates[:number]:
            note(others[number], "system", template)

    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(work, range(len(others))))
    for other in others:
        other.close()
    found = numbers(database)
    assert [number for _, number, _ in found] == list(range(1, 13))
    assert {template for _, _, template in found} == set(templates)


def test_render_is_listed_with_variables_session_and_text(database: Database):
    first, second = Prompt("system", "In {{ cwd }}."), Prompt("system", "You work in {{ cwd }}.")
    rows = [
        render(database, first, "system", 1, cwd="/a"),
        render(database, second, "system", 2, "s2", cwd="/\udc80"),
        render(database, first, "compaction", 3, "s2", cwd="/c"),
    ]
    with database.begin_read() as connection:
        every = prompts.list_renders(connection, "system")
        assert [(row.at, row.session, row.purpose, row.number) for row in every] == [
            (3, "s2", "compaction", 1),
            (2, "s2", "system", 2),
            (1, "s1", "system", 1),
        ]
        assert [row.message for row in prompts.list_renders(connection, "system@1")] == [rows[2], rows[0]]
        assert prompts.load_text(connection, rows[1]) == "You work in /\udc80."
        used = {row.number: (row.renders, row.last) for row in prompts.list_versions(connection, "system")}
    assert used == {1: (2, 3), 2: (1, 2)}


def test_two_versions_can_be_compared(database: Database):
    for template in ("one\ntwo\nthree", "one\n2\nthree"):
        note(database, "system", template)
    with database.begin_read() as connection:
        said = prompts.diff_versions(connection, "system@1", "system")
        assert prompts.diff_versions(connection, "system", "system@2") == ""
    assert said.splitlines() == ["--- system@1", "+++ system@2", "@@ -1,3 +1,3 @@", " one", "-two", "+2", " three"]


def test_missing_prompt_raises_a_clear_error(database: Database):
    note(database, "system", "a")
    with database.begin_read() as connection:
        for reference, said in [
            ("system@2", "has no version 2"),
            ("sys", "Known prompts: system"),
            ("@", "Known prompts"),
        ]:
            with pytest.raises(StoreError, match=said):
                prompts.find_version(connection, reference)
        with pytest.raises(StoreError, match="no render 7"):
            prompts.load_text(connection, 7)


def test_template_with_invalid_text_is_stored(database: Database):
    note(database, "na\0me", "a\0b {{ x }}")
    assert numbers(database) == [("na me", 1, "a b {{ x }}")]
