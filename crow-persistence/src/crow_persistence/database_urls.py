"""The URL of the database, as `[database] url` gives it, with defaults."""

from pathlib import Path

from crow_core.errors import StoreError
from sqlalchemy import URL
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

URL_DEFAULTS: dict[str, dict[str, str]] = {
    "sqlite": {"timeout": "30"},
    "postgresql+psycopg": {
        "connect_timeout": "10",
        "tcp_user_timeout": "30000",
        "options": "-c lock_timeout=30s -c idle_in_transaction_session_timeout=5s",
    },
}
"""Default URL parameters by driver. They limit every wait for a lock or a connection to half a minute, and how long a
process that is frozen within a transaction keeps its locks."""


def parse_url(url: str) -> tuple[URL, bool]:
    """Parse a database URL as `complete_url` does, without its parameter `synchronous`. Return also whether a commit
    waits until the disk has it (`synchronous=full`). Raises StoreError."""
    completed = complete_url(url)
    synchronous = completed.query.get("synchronous", "normal")
    if synchronous not in ("normal", "full"):
        raise StoreError(f"[database] synchronous is {synchronous!r}. Give 'normal' or 'full'.")
    return completed.difference_update_query(["synchronous"]), synchronous == "full"


def complete_url(url: str) -> URL:
    """Parse a database URL and add the defaults. Raises StoreError."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = URL.create("unknown")
    match parsed.drivername:
        case "sqlite" | "sqlite+pysqlite" if parsed.database not in (None, "", ":memory:") and not parsed.host:
            parsed = parsed.set(drivername="sqlite", database=str(Path(parsed.database).expanduser().absolute()))
        case "postgres" | "postgresql" | "postgresql+psycopg":
            parsed = parsed.set(drivername="postgresql+psycopg")
        case _:
            raise StoreError(
                f"[database] url {parsed.render_as_string()} cannot be used. "
                "Give sqlite:////folder/file.db or postgresql+psycopg://user@host/database."
            )
    return parsed.set(query={**URL_DEFAULTS[parsed.drivername], **parsed.query})
