"""Prompts: the versions of every template, and the renders of each."""

import difflib
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_core.session.prompts import Prompt
from sqlalchemy import Connection, Row, func, insert, select
from sqlalchemy import text as sql

from crow_persistence import blobs
from crow_persistence.batch import Batch
from crow_persistence.entries import clean_text, decode, encode
from crow_persistence.tables import calls, cells, messages, prompts, renders, sessions

INSERT_VERSION = sql(
    "INSERT INTO prompts (name, number, hash, template, variables, first_seen)"
    " SELECT :name, coalesce(max(number), 0) + 1, :hash, :template, :variables, :at FROM prompts WHERE name = :name"
    " ON CONFLICT DO NOTHING"
)

INSERT_RENDER = insert(renders)


def store_version(connection: Connection, name: str, template: str, at: int) -> int:
    """Store a version of a prompt if it is new. Return the id of its row.

    Versions are numbered 1, 2, 3 … per name, also when several processes write at once.
    """
    name, template = clean_text(name), clean_text(template)
    hash = digest(template)
    known = select(prompts.c.id).where(prompts.c.name == name, prompts.c.hash == hash)
    while (id := connection.scalar(known)) is None:
        # Another process may insert the same number or version between the SELECT and the INSERT.
        version = {"name": name, "hash": hash, "template": template, "at": at}
        connection.execute(INSERT_VERSION, {**version, "variables": json.dumps(find_variables(template))})
    return id


def store_versions(connection: Connection, templates: Sequence[Prompt], at: int) -> None:
    """Store versions of several prompts, those that are new."""
    versions = {(clean_text(prompt.name), digest(clean_text(prompt.template))): prompt for prompt in templates}
    names, hashes = ({key[at] for key in versions} for at in (0, 1))
    found = select(prompts.c.name, prompts.c.hash).where(prompts.c.name.in_(names), prompts.c.hash.in_(hashes))
    known = {(row.name, row.hash) for row in connection.execute(found)}
    for version, prompt in versions.items():
        if version not in known:
            store_version(connection, prompt.name, prompt.template, at)


def add_render(batch: Batch, row: int, number: int, marker: Message, at: int) -> None:
    """Add a render to a batch, and store the version of its prompt. Its marker is the `messages` row `row` of the
    session `number`."""
    notes = marker.get("crow", {})
    text = notes.get("text", "").encode("utf-8", "surrogatepass")
    hash = hashlib.sha256(text).hexdigest()
    batch.blobs[hash] = text
    render = {
        "message": row,
        "session": number,
        "prompt": store_version(batch.connection, notes.get("prompt", ""), notes.get("template", ""), at),
        "purpose": clean_text(notes.get("purpose", ""))[:32],
        "variables": encode(notes.get("variables", {})),
        "text": hash,
        "at": at,
    }
    batch.add(INSERT_RENDER, render)


def digest(template: str) -> str:
    """Return the SHA-256 digest of a template, in hexadecimal."""
    return hashlib.sha256(template.encode()).hexdigest()


def find_variables(template: str) -> list[str]:
    """Return the sorted names of the variables in a template; none if it is not a valid template."""
    from jinja2 import TemplateSyntaxError  # slow to import, as in crow_core.session.prompts
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return sorted(find_undeclared_variables(ImmutableSandboxedEnvironment().parse(template)))
    except TemplateSyntaxError:
        return []


def list_versions(connection: Connection, name: str = "") -> list[Row[Any]]:
    """Return all versions of a prompt, or of every prompt, oldest first, with the number of renders and the time of the
    last."""
    used = func.count(renders.c.message).label("renders"), func.max(renders.c.at).label("last")
    found = select(prompts, *used).outerjoin(renders).group_by(prompts.c.id)
    found = found.where(prompts.c.name == name) if name else found
    return list(connection.execute(found.order_by(prompts.c.name, prompts.c.number)))


def find_version(connection: Connection, reference: str) -> Row[Any]:
    """Return the version that a reference names: `NAME@3`, or `NAME` for the newest. Raises StoreError."""
    name, mark, number = reference.rpartition("@")
    if not mark or not number.isdecimal():
        name, number = reference, ""
    found = list_versions(connection, name)
    chosen = [version for version in found if not number or version.number == int(number)]
    if chosen:
        return chosen[-1]
    if found:
        raise StoreError(f"The prompt {name} has no version {number}; it has 1 to {found[-1].number}.")
    known = ", ".join(connection.scalars(select(prompts.c.name).distinct().order_by(prompts.c.name))) or "none yet"
    raise StoreError(f"There is no prompt {reference!r}. Known prompts: {known}.")


def find_number(connection: Connection, name: str, template: str) -> int:
    """Return the number of the version that has this template; 0 if none has."""
    its = (prompts.c.name == clean_text(name), prompts.c.hash == digest(clean_text(template)))
    return connection.scalar(select(prompts.c.number).where(*its)) or 0


def render_again(connection: Connection, version: Row[Any]) -> str:
    """Render a version with the variables of the latest render of its prompt; "" if there is none. Raises
    PromptError, also for a variable that is not among them."""
    if not (used := list_renders(connection, version.name, 1)):
        return ""
    return Prompt(version.name, version.template).render(**decode(used[0].variables))


def diff_versions(connection: Connection, first: str, second: str) -> str:
    """Return the differences of two versions as a unified diff; "" when there are none. Raises StoreError."""
    old, new = find_version(connection, first), find_version(connection, second)
    lines = difflib.unified_diff(
        old.template.splitlines(),
        new.template.splitlines(),
        f"{old.name}@{old.number}",
        f"{new.name}@{new.number}",
        lineterm="",
    )
    return "\n".join(lines)


def diff_rendered(connection: Connection, first: str, second: str) -> str:
    """Return the differences of the texts of two versions as a unified diff. Both have the same variables: those of the
    latest render of the second, or of the first if the second has none. Raises StoreError, PromptError."""
    old, new = find_version(connection, first), find_version(connection, second)
    used = [
        *list_renders(connection, f"{new.name}@{new.number}", 1),
        *list_renders(connection, f"{old.name}@{old.number}", 1),
    ]
    if not used:
        raise StoreError(f"Neither {first} nor {second} has been rendered, so that no variables are stored.")
    variables = decode(used[0].variables)
    before, after = (Prompt(one.name, one.template).render(**variables).splitlines() for one in (old, new))
    names = f"{old.name}@{old.number}", f"{new.name}@{new.number}"
    return "\n".join(difflib.unified_diff(before, after, names[0], names[1], lineterm=""))


def list_stats(connection: Connection, name: str = "") -> list[dict[str, Any]]:
    """Return the figures of each version of a prompt, or of every prompt. They are its sessions, model calls, failed
    ones, tokens, cost by currency, ratings of its replies, and the outcomes of evaluated tasks in whose sessions it was
    rendered. Of several ratings of a reply, the last counts."""
    found: dict[int, dict[str, Any]] = {}
    zero = {"sessions": 0, "calls": 0, "failed": 0, "input": 0, "cached": 0, "output": 0}
    for version in list_versions(connection, name):
        found[version.id] = {
            "name": version.name,
            "number": version.number,
            **zero,
            "cost": {},
            "good": 0,
            "bad": 0,
            "passed": 0,
            "not_passed": 0,
        }
    sums = [func.coalesce(func.sum(column), 0) for column in (calls.c.input, calls.c.cached, calls.c.output)]
    joined = calls.join(renders, calls.c.render == renders.c.message)
    counted: Any = select(renders.c.prompt, func.count(), func.count(calls.c.error), *sums).select_from(joined)
    rows: Sequence[Any] = connection.execute(counted.group_by(renders.c.prompt)).all()
    for prompt, *values in rows:
        if stats := found.get(prompt):
            stats.update(zip(("calls", "failed", "input", "cached", "output"), map(int, values), strict=True))
    distinct: Any = select(renders.c.prompt, func.count(calls.c.session.distinct())).select_from(joined)
    rows = connection.execute(distinct.group_by(renders.c.prompt)).all()
    for prompt, number in rows:
        if stats := found.get(prompt):
            stats["sessions"] = number
    spent: Any = select(renders.c.prompt, calls.c.currency, func.sum(calls.c.cost)).select_from(joined)
    spent = spent.where(calls.c.currency.is_not(None)).group_by(renders.c.prompt, calls.c.currency)
    rows = connection.execute(spent).all()
    for prompt, currency, cost in rows:
        if stats := found.get(prompt):
            stats["cost"][currency] = float(cost or 0)
    add_ratings(connection, found)
    evaluated: Any = select(renders.c.prompt, cells.c.number, cells.c.state).distinct()
    evaluated = evaluated.join(sessions, cells.c.session == sessions.c.id)
    evaluated = evaluated.join(renders, renders.c.session == sessions.c.number)
    rows = connection.execute(evaluated.where(cells.c.state != "error")).all()
    for prompt, _, state in rows:
        if stats := found.get(prompt):
            stats["passed" if state == "passed" else "not_passed"] += 1
    return list(found.values())


def add_ratings(connection: Connection, found: dict[int, dict[str, Any]]) -> None:
    """Count the ratings of replies for the prompt versions of their model calls."""
    ratings: dict[str, str] = {}
    for body in connection.scalars(select(messages.c.body).where(messages.c.kind == "rating").order_by(messages.c.id)):
        with suppress(ValueError, LookupError, TypeError):  # damaged
            notes = decode(body)["crow"]
            ratings[str(notes["reply"])] = str(notes["rating"])
    wanted: Any = select(calls.c.id, renders.c.prompt).join(renders, calls.c.render == renders.c.message)
    for part in blobs.split_batches(ratings):
        rows: Sequence[Any] = connection.execute(wanted.where(calls.c.id.in_(part))).all()
        for reply, prompt in rows:
            if (stats := found.get(prompt)) and ratings[reply] in ("good", "bad"):
                stats[ratings[reply]] += 1


def list_renders(connection: Connection, reference: str, limit: int = 100) -> Sequence[Row[Any]]:
    """Return the renders of a prompt or of one version, newest first, each with its session's id. Raises StoreError."""
    version = find_version(connection, reference)
    said = renders.c.message, renders.c.at, renders.c.purpose, renders.c.variables, prompts.c.name, prompts.c.number
    found: Any = select(*said, sessions.c.id.label("session")).where(prompts.c.name == version.name)
    found = found.join(prompts, renders.c.prompt == prompts.c.id).join(sessions, renders.c.session == sessions.c.number)
    if reference != version.name:
        found = found.where(prompts.c.number == version.number)
    return connection.execute(found.order_by(renders.c.at.desc(), renders.c.message.desc()).limit(limit)).all()


def list_session_versions(connection: Connection, session: str) -> Sequence[Row[Any]]:
    """Return the latest version of each prompt that was rendered in a session, by the prompt's name, with a purpose."""
    columns = prompts.c.name, func.max(prompts.c.number).label("number"), func.min(renders.c.purpose).label("purpose")
    found: Any = select(*columns).join(renders, renders.c.prompt == prompts.c.id)
    found = found.join(sessions, renders.c.session == sessions.c.number).where(sessions.c.id == session)
    return connection.execute(found.group_by(prompts.c.name).order_by(prompts.c.name)).all()


def load_text(connection: Connection, render: int) -> str:
    """Return the text of a render; `render` is the `messages` row of its marker. Raises StoreError."""
    hash = connection.scalar(select(renders.c.text).where(renders.c.message == render)) or ""
    if (data := blobs.fetch(connection, [hash]).get(hash)) is None:
        raise StoreError(f"There is no render {render}, or its text is gone; `crow db check` says what is missing.")
    return data.decode("utf-8", "surrogatepass")
