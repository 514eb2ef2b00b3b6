"""The migrations of the tables, one file per revision in `versions`. A released revision is never changed.

A new revision needs a change to `tables.py`, LATEST_REVISION in `database.py`, and a dump of a database of that
revision (`tests/databases/make.py`), so that tests can always update it. It should only add tables, and columns that
may be left out; otherwise it raises OLDEST_READER, and older versions of crow refuse the database.
"""

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def config(connection: Connection) -> Config:
    """Return Alembic's settings for a connection."""
    config = Config()
    config.set_main_option("script_location", "crow_persistence:migrations")
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Update the tables to a revision, in the connection's transaction."""
    command.upgrade(config(connection), revision)
