"""Turns taken back: the files they changed are as before, and the model has forgotten them.

Needs no version control: the log holds what every edit found. A file that somebody else has changed since is never
touched, and then nothing else is either.
"""

import asyncio
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INVALID_PARAMS, INVALID_REQUEST, StopReason
from crow_core.app import Crow
from crow_core.content import find_first_text
from crow_core.errors import StoreError
from crow_core.masking import MASK
from crow_core.mcp.tool import make_title
from crow_core.messages import INTERRUPTED, Message, drop_rewound, find_prompts, marker_kind, parse_arguments
from crow_core.session import Command, Session
from crow_core.text import to_line

Change = dict[str, Any]
"""What an edit says of itself: `path`, `old`, `new`, `before`, `after`, perhaps `encoding` and `mark`."""
HARMLESS = ("read", "search", "think")
"""Kinds of calls that leave nothing behind."""


class UndoError(Exception):
    """A turn cannot be taken back; the text is for a person: what is in the way, and where."""


@dataclass(frozen=True)
class File:
    """A file that turns have changed."""

    path: str
    data: bytes | None
    """What it held before; None where there was none."""
    lines: tuple[int, int]
    """How many come back, and how many go."""
    disturbed: bool
    """Between two edits of one turn, somebody or something else changed it, too."""


@dataclass(frozen=True)
class Undo:
    """What taking back some turns means."""

    prompt: str
    """The first words of the first of them."""
    turns: int
    to: str
    """The id of the last entry that stays; "" for none."""
    files: Sequence[File]
    stays: Sequence[str]
    """The titles of calls whose effects nobody can take back."""

    def __str__(self) -> str:
        """In words, as Markdown."""
        what = "the last turn," if self.turns == 1 else f"the last {self.turns} turns, from"
        lines = [f"To take back {what} “{self.prompt}”:", "", *map(described, self.files)]
        if not self.files:
            lines.append("- No file changes: only the conversation goes back.")
        if self.stays:
            lines += ["", "What these did stays, as only edits can be taken back:"]
            lines += [f"- `{title}`" for title in self.stays]
        return "\n".join(lines)


def undo(crow: Crow) -> None:
    """Bring /undo: it says what would be taken back, and `/undo yes` does it. For programs it is `_crow/undo`, with
    `turns` and `confirm`."""
    crow.methods["_crow/undo"] = answer

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command("undo", "Take back the last turn: its edits, and what was said", run, hint="[turns] [yes]")]

    # What a sub-agent did is its session's to take back:

    @crow.message
    async def hand_up(session: Session, entry: Message) -> None:
        if (parent := session.parent) and (changes := entry.get("crow", {}).get("changes")):
            parent.log.append({"crow": {"kind": "changes", "session": session.id, "changes": changes}})
            await parent.log.written()

    @crow.turn_end
    def tell(session: Session, outcome: StopReason | Exception) -> None:
        if (parent := session.parent) and (stays := [*lasting(session.log)]):
            parent.log.append({"crow": {"kind": "stays", "session": session.id, "calls": stays}})


async def run(session: Session, words: str) -> str:
    """The command: without `yes` it only tells."""
    wanted = re.fullmatch(r"([1-9][0-9]{0,8})? *(yes)?", words)
    if wanted is None:
        return f"/undo {words} is not understood. `/undo` or `/undo 2` tells what would change, `/undo 2 yes` does it."
    turns = int(wanted[1] or 1)
    try:
        if wanted[2]:
            return await take_back(session, turns)
        planned = await asyncio.to_thread(plan, session.log, turns)
    except UndoError as error:
        return str(error)
    return f"{planned}\n\n`/undo {f'{turns} ' if turns > 1 else ''}yes` does it."


async def answer(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """The same for a program: what would be taken back, and with `confirm` whether it was. Raises RpcError."""
    turns, confirm = params.get("turns", 1), params.get("confirm", False)
    if type(turns) is not int or type(confirm) is not bool:
        raise RpcError(INVALID_PARAMS, "Invalid params", details="turns is a whole number, confirm is true or false.")
    if session.turns.lock.locked() or session.turns.tasks:
        raise RpcError(INVALID_REQUEST, "A turn is running", details="Cancel it, or wait for its end.")
    try:
        async with session.turns.lock:
            planned = await asyncio.to_thread(plan, session.log, turns)
            if confirm:
                await take_back(session, turns)
    except (UndoError, StoreError) as error:
        raise RpcError(INVALID_REQUEST, "Nothing was taken back", details=str(error)) from error
    files = [{"path": file.path, "removed": file.data is None} for file in planned.files]
    return {"done": confirm, "turns": planned.turns, "prompt": planned.prompt, "files": files, "stays": planned.stays}


async def take_back(session: Session, turns: int = 1) -> str:
    """Restore the files, rewind the session, and tell it. Raises UndoError when it cannot be done, StoreError when it
    is done and cannot be stored now."""
    planned = await asyncio.to_thread(plan, session.log, turns)
    await asyncio.to_thread(restore, planned.files)
    session.rewind(planned.to)
    await session.log.written()
    count = len(planned.files)
    files = f"{count} file{'' if count == 1 else 's'} as before" if count else "no file had to change"
    return f"Taken back, {files}. The model has forgotten “{planned.prompt}” and what followed."


def plan(log: Sequence[Message], turns: int = 1) -> Undo:
    """What it takes to go back to before the last turns; changes nothing. Raises UndoError when it cannot be done."""
    entries = drop_rewound(log)
    starts = find_prompts(entries)
    if not 0 < turns <= len(starts):
        there = "is only 1 turn" if len(starts) == 1 else f"are {f'only {len(starts)}' if starts else 'no'} turns"
        raise UndoError(f"There {there} to take back.")
    ends = [*starts[1:], len(entries)]
    wanted = [entries[start:end] for start, end in zip(starts, ends, strict=True)][-turns:]
    first = starts[-turns]
    return Undo(
        prompt=shortened(find_first_text(entries[first])),
        turns=turns,
        to=str(entries[first - 1].get("crow", {}).get("id", "")) if first else "",
        files=files_of(wanted),
        stays=[title for turn in wanted for title in lasting(turn)],
    )


def files_of(turns: Sequence[Sequence[Message]]) -> list[File]:
    """The files to restore, walking back from the last change to the first. Raises UndoError."""
    changes = [(n, change) for n, turn in enumerate(turns) for change in changes_of(turn)]
    newest: dict[str, Change] = {}
    oldest: dict[str, tuple[int, Change]] = {}
    disturbed: set[str] = set()
    for n, change in reversed(changes):
        path = change["path"]
        newest.setdefault(path, change)
        later, next = oldest.get(path, (n, None))
        if next and next["before"] != change["after"]:
            if later != n:
                raise UndoError(f"{path} was changed by somebody else between these turns. Take back fewer turns.")
            disturbed.add(path)
        oldest[path] = n, change
    files = [file_of(newest[path], oldest[path][1], path in disturbed) for path in sorted(oldest)]
    return [file for file in files if file]


def changes_of(turn: Sequence[Message]) -> Iterator[Change]:
    """The edits of a turn, in their order. Raises UndoError."""
    for entry in turn:
        changes: list[Change] = entry.get("crow", {}).get("changes", [])
        for change in changes:
            if not {"path", "old", "new", "before", "after"} <= change.keys():
                raise UndoError(f"What {change.get('path')} held before is not known.")
            yield change


def file_of(newest: Change, oldest: Change, disturbed: bool) -> File | None:
    """What to do with one file; None when it is as before. Raises UndoError when that must not be done."""
    path = newest["path"]
    now = digest_of(path)
    if now == oldest["before"]:
        return None  # also where an earlier try did not come to its end
    if now != newest["after"]:
        raise UndoError(f"{path} has been changed by somebody else since. Nothing was taken back.")
    data = bytes_before(oldest)
    old, new = (Counter((change or "").splitlines()) for change in (oldest["old"], newest["new"]))
    return File(path, data, ((old - new).total(), (new - old).total()), disturbed)


def digest_of(path: str) -> str | None:
    """SHA-256 of a file as it is now, None where there is none. Raises UndoError."""
    if os.path.realpath(path) != path:
        raise UndoError(f"{path} leads elsewhere now, to {os.path.realpath(path)}. Nothing was taken back.")
    if not os.path.lexists(path):
        return None
    try:
        if not os.path.isfile(path):
            return "no file"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UndoError(f"{path} cannot be read ({error.strerror}). Nothing was taken back.") from error


def bytes_before(change: Change) -> bytes | None:
    """What a file held before a change. Raises UndoError when the log does not hold it whole."""
    path, text = change["path"], change["old"]
    if text is None:
        return None
    try:
        data = (("\ufeff" if change.get("mark") else "") + text).encode(change.get("encoding", "utf-8"))
    except (LookupError, UnicodeEncodeError):
        data = b""
    if hashlib.sha256(data).hexdigest() != change["before"]:
        why = "a secret in it was masked" if MASK in text else "the log is damaged"
        raise UndoError(f"What {path} held before was not kept whole: {why}. Nothing was taken back.")
    return data


def restore(files: Sequence[File]) -> None:
    """Put files back, each at once. Raises UndoError, which says how far it came."""
    for done, file in enumerate(files):
        try:
            put_back(file)
        except OSError as error:
            raise UndoError(
                f"{file.path} cannot be put back ({error.strerror}); {done} of {len(files)} files are as before. "
                "When that is mended, undo again: it goes on where it stopped."
            ) from error


def put_back(file: File) -> None:
    """Make a file what it was; mode and owner stay. Raises OSError."""
    if file.data is None:
        os.unlink(file.path)
        return
    folder = os.path.dirname(file.path)
    os.makedirs(folder, exist_ok=True)
    new = os.path.join(folder, f".{token_hex(8)}.tmp")
    try:
        with open(new, "xb") as opened:
            opened.write(file.data)
            with suppress(FileNotFoundError):
                status = os.stat(file.path)
                with suppress(PermissionError):  # only root gives files away
                    os.fchown(opened.fileno(), status.st_uid, status.st_gid)
                os.fchmod(opened.fileno(), stat.S_IMODE(status.st_mode))
        os.replace(new, file.path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise


def lasting(turn: Sequence[Message]) -> Iterator[str]:
    """The titles of the calls of a turn, and of its sub-agents, that may have done what no edit tells of."""
    for entry in turn:
        if marker_kind(entry) == "stays":
            yield from entry.get("crow", {})["calls"]
    answers = {entry.get("tool_call_id"): entry for entry in turn if entry.get("role") == "tool"}
    denied = {notes.get("call") for entry in turn if (notes := entry.get("crow", {})).get("is") == "deny"}
    for call in [call for entry in turn for call in entry.get("tool_calls", [])]:
        answer = answers.get(call["id"], Message())
        notes = answer.get("crow", {})
        kind = notes.get("shown", {}).get("kind", "other")
        cut = answer.get("content", INTERRUPTED) == INTERRUPTED
        harmless = kind in HARMLESS or (kind != "execute" and notes.get("failed")) or notes.get("changes")
        if call["id"] not in denied and (cut or not harmless):
            yield make_title(call["function"]["name"], parse_arguments(call) or {})


def described(file: File) -> str:
    """A line of the list."""
    back, gone = file.lines
    if file.data is None:
        what = "will be removed"
    else:
        what = f"{back} {'line comes' if back == 1 else 'lines come'} back, {gone} {'goes' if gone == 1 else 'go'}"
    also = "; something else changed it during the turn, which goes too" if file.disturbed else ""
    return f"- `{to_line(file.path)}`: {what}{also}"


def shortened(text: str) -> str:
    words = to_line(" ".join(text.split()))
    return words if len(words) <= 60 else f"{words[:59].rstrip()}…"
