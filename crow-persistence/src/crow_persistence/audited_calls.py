"""The subjects of the tool calls in audit records: the command, the path or the host, from the log of the session."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import Connection, select

from crow_persistence import blobs
from crow_persistence.entries import DamagedEntry, find_blobs, unpack
from crow_persistence.tables import messages, sessions


def describe_calls(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the tool call of each record on a line.

    "" if the log does not have it, or has other arguments than those whose digest the record holds: those of a command
    that the user changed are in `by`.
    """
    known: dict[tuple[str, str, str], str] = {}
    for row in rows:
        key = row["session"], row["call"], row["arguments"]
        if key not in known:
            known[key] = describe_arguments(find_arguments(connection, *key)) if all(key) else ""
    return [known[row["session"], row["call"], row["arguments"]] for row in rows]


def find_arguments(connection: Connection, session: str, call: str, digest: str) -> str:
    """Find the arguments of a tool call with this digest; "" if there are none."""
    asked = select(messages.c.body).join(sessions).where(sessions.c.id == session, messages.c.kind == "assistant")
    asked = asked.where(messages.c.body.contains(call, autoescape=True)).order_by(messages.c.id.desc())
    for body in connection.scalars(asked):
        try:
            entry = unpack("assistant", body, blobs.fetch(connection, find_blobs(body)))
        except DamagedEntry:
            continue
        for use in entry.get("tool_calls") or []:
            arguments = use["function"]["arguments"]
            if use["id"] == call and hashlib.sha256(arguments.encode(errors="surrogatepass")).hexdigest() == digest:
                return arguments
    return ""


def describe_arguments(arguments: str) -> str:
    """Return the host, the path or the command in arguments, on a line; "" for others."""
    try:
        decoded: Any = msgspec.json.decode(arguments) if arguments else None
        match decoded:
            case {"url": str(url)}:
                found = urlsplit(url).netloc
            case {"path": str(found)} | {"command": str(found)}:
                pass
            case _:
                found = ""
    except ValueError:
        return ""
    return " ".join(found.split())
