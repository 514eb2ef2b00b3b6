"""What was done to the tables since there were any: one file a revision in `versions`; none is changed once released.

A new one comes with the change to `tables.py`, with HEAD in `database.py`, and with a database as it leaves it
(`tests/databases/make.py`), so that it can be brought up to date for ever.
"""

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def config(connection: Connection) -> Config:
    """Alembic's settings, with the connection that it is to work on."""
    config = Config()
    config.set_main_option("script_location", "crow_persistence:migrations")
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the tables to a revision, in the connection's transaction."""
    command.upgrade(config(connection), revision)
