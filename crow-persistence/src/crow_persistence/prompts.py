"""Prompts: every version of every template, and what each became when it was rendered."""

import difflib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from crow_core.errors import StoreError
from crow_core.messages import Message
from sqlalchemy import Connection, Row, func, insert, select
from sqlalchemy import text as sql

from crow_persistence import blobs
from crow_persistence.entries import encode, plain
from crow_persistence.tables import prompts, renders, sessions

NOTE = sql(
    "INSERT INTO prompts (name, number, hash, template, variables, first_seen)"
    " SELECT :name, coalesce(max(number), 0) + 1, :hash, :template, :variables, :at FROM prompts WHERE name = :name"
    " ON CONFLICT DO NOTHING"
)


def note(connection: Connection, name: str, template: str, at: int) -> int:
    """Write a version of a prompt down, if it is new; gives the id of its row.

    Versions are numbered 1, 2, 3 … for each name, also where several processes write at once.
    """
    name, template = plain(name), plain(template)
    hash = digest(template)
    known = select(prompts.c.id).where(prompts.c.name == name, prompts.c.hash == hash)
    while (id := connection.scalar(known)) is None:
        # Another process may take the number, or write the same version, after this one has looked.
        version = {"name": name, "hash": hash, "template": template, "at": at}
        connection.execute(NOTE, {**version, "variables": json.dumps(variables_of(template))})
    return id


def record(connection: Connection, row: int, number: int, marker: Message, at: int) -> None:
    """Write down a render: its marker is the messages row `row` of the session `number`."""
    notes = marker.get("crow", {})
    text = notes["text"].encode("utf-8", "surrogatepass")
    hash = hashlib.sha256(text).hexdigest()
    blobs.keep(connection, {hash: text})
    render = {
        "message": row,
        "session": number,
        "prompt": note(connection, notes["prompt"], notes["template"], at),
        "purpose": plain(notes["purpose"])[:32],
        "variables": encode(notes["variables"]),
        "text": hash,
        "at": at,
    }
    connection.execute(insert(renders), render)


def digest(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()


def variables_of(template: str) -> list[str]:
    """The names a template asks for, sorted; none for one that is no template."""
    from jinja2 import TemplateSyntaxError  # as in crow_core.prompts
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return sorted(find_undeclared_variables(ImmutableSandboxedEnvironment().parse(template)))
    except TemplateSyntaxError:
        return []


def versions(connection: Connection, name: str = "") -> list[Row[Any]]:
    """All versions of a prompt, or of every prompt, oldest first, each with how often it was rendered and when last."""
    used = func.count(renders.c.message).label("renders"), func.max(renders.c.at).label("last")
    found = select(prompts, *used).outerjoin(renders).group_by(prompts.c.id)
    found = found.where(prompts.c.name == name) if name else found
    return list(connection.execute(found.order_by(prompts.c.name, prompts.c.number)))


def find(connection: Connection, reference: str) -> Row[Any]:
    """The version that `NAME@3` names, or `NAME` for the newest. Raises StoreError."""
    name, mark, number = reference.rpartition("@")
    if not mark or not number.isdecimal():
        name, number = reference, ""
    found = versions(connection, name)
    chosen = [version for version in found if not number or version.number == int(number)]
    if chosen:
        return chosen[-1]
    if found:
        raise StoreError(f"The prompt {name} has no version {number}; it has 1 to {found[-1].number}.")
    known = ", ".join(connection.scalars(select(prompts.c.name).distinct().order_by(prompts.c.name))) or "none yet"
    raise StoreError(f"There is no prompt {reference!r}. Known are: {known}.")


def diff(connection: Connection, first: str, second: str) -> str:
    """What changed from one version to another, as a unified diff; "" when nothing did. Raises StoreError."""
    old, new = find(connection, first), find(connection, second)
    lines = difflib.unified_diff(
        old.template.splitlines(),
        new.template.splitlines(),
        f"{old.name}@{old.number}",
        f"{new.name}@{new.number}",
        lineterm="",
    )
    return "\n".join(lines)


def history(connection: Connection, reference: str, limit: int = 100) -> Sequence[Row[Any]]:
    """The renders of a prompt, or of one version of it, newest first, each with its session's id. Raises StoreError."""
    version = find(connection, reference)
    said = renders.c.message, renders.c.at, renders.c.purpose, renders.c.variables, prompts.c.name, prompts.c.number
    shown: Any = select(*said, sessions.c.id.label("session")).where(prompts.c.name == version.name)
    shown = shown.join(prompts, renders.c.prompt == prompts.c.id).join(sessions, renders.c.session == sessions.c.number)
    if reference != version.name:
        shown = shown.where(prompts.c.number == version.number)
    return connection.execute(shown.order_by(renders.c.at.desc(), renders.c.message.desc()).limit(limit)).all()


def text(connection: Connection, render: int) -> str:
    """What a render became; `render` is its marker's messages row. Raises StoreError."""
    hash = connection.scalar(select(renders.c.text).where(renders.c.message == render)) or ""
    if (data := blobs.fetch(connection, [hash]).get(hash)) is None:
        raise StoreError(f"There is no render {render}, or its text is gone; `crow db check` says what is missing.")
    return data.decode("utf-8", "surrogatepass")
