"""Find the folders whose sessions belong together: the same folder in all work trees of a git repository."""

import os

from crow_system.repository import WORKTREES, find_top, join, list_same_folders
from sqlalchemy import Connection, select

from crow_persistence.entries import clean_text
from crow_persistence.tables import sessions


def find_same_folders(connection: Connection, cwd: str) -> list[str]:
    """Return a folder as it is stored, and the same folder in the other work trees of its repository, also in those
    that crow has made and that are gone."""
    main, *others = list_same_folders(cwd)
    return list(dict.fromkeys(map(clean_text, [cwd, main, *others, *find_gone(connection, main)])))


def find_gone(connection: Connection, main: str) -> list[str]:
    """Return the folders of stored sessions that correspond to a folder of a main work tree."""
    if (top := find_top(main)) is None:
        return []
    below, start = os.path.relpath(os.path.realpath(main), top), clean_text(f"{top}{WORKTREES}{os.sep}")
    stored = select(sessions.c.cwd).distinct().where(sessions.c.cwd.startswith(start, autoescape=True))
    folders = connection.execute(stored).scalars()
    return [each for each in folders if join(start + each[len(start) :].partition(os.sep)[0], below) == each]
