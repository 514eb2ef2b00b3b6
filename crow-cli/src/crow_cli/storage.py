"""Open the database for the commands that read or change stored sessions."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from crow_agent.settings.config import get_database_url, load_config
from crow_agent.settings.home import Home
from crow_core.errors import ConfigError, StoreError
from crow_core.text import escape_controls
from crow_system.repository import find_folder_to_continue

from crow_cli.console import print_json, print_note
from crow_cli.process import fail

if TYPE_CHECKING:
    from crow_persistence.database import Database
    from sqlalchemy import Connection


class NothingStored(StoreError):
    """The database does not exist yet."""


def open_database(env: Mapping[str, str], *, create: bool = False) -> "Database":
    """Open the database that the user's settings name. Raises StoreError; NothingStored if it does not exist yet and
    is not to be created."""
    from crow_persistence.database import Database  # imports SQLAlchemy, which is slow to load

    home = Home.find(env)
    try:
        database = Database(get_database_url(load_config(home, env), home), home.data)
    except ConfigError as error:
        raise StoreError(str(error)) from error
    if database.file and not database.file.exists():
        if create:
            with database.begin_write():
                return database
        raise NothingStored(f"Nothing has been stored yet: {database.file} is made with the first session.")
    return database


def find_session_to_continue(env: Mapping[str, str], prefix: str, cwd: str) -> tuple[str, str]:
    """Return the id of the one session whose id begins with `prefix`, and the folder in which it goes on: `cwd`, or
    another work tree of its repository. If its own folder is gone, print what that means. Raises StoreError."""
    from crow_persistence.loader import find_session

    with open_database(env).begin_read() as connection:
        found = find_session(connection, prefix)
    if found.cwd and not os.path.isdir(found.cwd):
        print_note(
            f"The folder of this session, {found.cwd}, does not exist here. It goes on in {cwd}; to go on in another "
            "folder, start crow there."
        )
    folder = find_folder_to_continue(found.cwd, cwd)
    if folder != cwd:
        print_note(f"This session works in {folder}.")
    return found.id, folder


@contextmanager
def connect(*, write: bool = False, lists: bool = False, as_json: bool = False) -> "Generator[Connection]":
    """Open a connection for reading, or a transaction for writing. On a StoreError, print it and exit with code 2.

    A command that `lists` exits with code 0 if nothing is stored yet: its list is empty, also `as_json`.
    """
    try:
        database = open_database(os.environ)
        with database.begin_write() if write else database.begin_read() as connection:
            yield connection
    except StoreError as error:
        if lists and isinstance(error, NothingStored):
            end_with_empty_list(str(error), as_json=as_json)
        fail(escape_controls(str(error)))


def end_with_empty_list(sentence: str, *, as_json: bool) -> NoReturn:
    """Print an empty list and a sentence that says why, and exit with code 0."""
    if as_json:
        print_json([])
    print_note(sentence)
    sys.exit(0)
