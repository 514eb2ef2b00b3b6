"""The marker that holds the state of a git work tree at the start of a session."""

from collections.abc import Sequence
from typing import cast

from crow_system.shortening import format_count
from msgspec import Struct, ValidationError, convert, to_builtins

from crow_core.messages.message import Message, marker_kind
from crow_core.messages.notes import Notes, WorktreeNotes

KIND = "worktree"
"""The kind of the marker that holds the state of the work tree at the start of a session."""


class ChangedPath(Struct, omit_defaults=True):
    """A path that differs from the commit: a file with its text or its bytes, a link, or neither if it was removed."""

    path: str
    """Relative to the top folder, with slashes."""
    text: str | None = None
    base64: str | None = None
    """The bytes of a file that is not UTF-8."""
    link: str | None = None
    digest: str = ""
    """SHA-256 of the file's bytes."""
    is_executable: bool = False


class WorkTree(Struct, omit_defaults=True):
    """The state of a folder in a git work tree."""

    top: str
    """The top folder of the work tree."""
    folder: str = ""
    """The folder itself, relative to `top` with slashes; empty for `top`."""
    commit: str = ""
    """The commit that is checked out; empty if there is none yet."""
    branch: str = ""
    """The branch that is checked out; empty if none is."""
    changes: list[ChangedPath] = []
    """The paths that differ from the commit, without ignored files."""
    staged: list[str] = []
    """Those of its paths that the index has, too."""
    fault: str = ""
    """The reason why the changes are not recorded, or not all; empty if they are."""

    def describe(self) -> str:
        """Describe the state in a line."""
        where = f"{self.commit[:12] or 'no commit'} {f'on {self.branch}' if self.branch else ''}".rstrip()
        changed = f", with {format_count(len(self.changes), 'changed file')}" if self.changes else ""
        return f"Started at {where}{changed}{f'; not recorded: {self.fault}' if self.fault else ''}"


def to_marker(tree: WorkTree) -> Message:
    """Make the entry of the log that records a state."""
    notes: WorktreeNotes = to_builtins(tree)
    return {"crow": cast(Notes, {"kind": KIND, **notes})}


def find_recorded(log: Sequence[Message]) -> WorkTree | None:
    """Return the state that the log records last; None if there is none, or it is damaged."""
    for entry in reversed(log):
        if marker_kind(entry) == KIND:
            try:
                return convert(entry.get("crow", {}), WorkTree)
            except ValidationError:
                return None
    return None
