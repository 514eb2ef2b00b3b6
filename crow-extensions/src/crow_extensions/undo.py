"""Undo turns: restore the files that they changed, and rewind the session.

No version control is needed, since the log holds the text before each edit. If one of the files was changed by somebody
else since then, no file is restored, unless the user chooses to keep such files as they are.
"""

import asyncio
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from secrets import token_hex
from typing import Any, cast

import crow_system as system
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INVALID_PARAMS, INVALID_REQUEST, StopReason, TextBlock
from crow_core.acp.shared_methods import REWIND_METHOD, REWIND_MODES, REWIND_POINTS_METHOD
from crow_core.app import Crow
from crow_core.content import find_first_text, to_blocks
from crow_core.errors import StoreError
from crow_core.masking import MASK
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall, make_title
from crow_core.messages.message import (
    INTERRUPTED,
    Message,
    find_turns,
    get_id,
    list_edits,
    marker_kind,
    parse_arguments,
)
from crow_core.messages.notes import EditNotes
from crow_core.messages.passes import drop_rewound, find_entry
from crow_core.messages.tool_names import name_raw_calls
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.shortening import format_count, shorten_line

Change = EditNotes
"""An edit in the log: `path`; the texts `old` and `new`; and their digests `before` and `after`. Texts other than UTF-8
without a byte order mark have `encoding` and `mark`, too."""
HARMLESS_KINDS = ("read", "search", "think")
"""The kinds of tool calls that change nothing."""


class UndoError(Exception):
    """A turn cannot be undone; the text tells the user why, and for which file."""


class FilesDiffer(UndoError):
    """Files cannot be restored; the rest can, if the user keeps these as they are."""


@dataclass(frozen=True)
class ChangedFile:
    """A file to restore."""

    path: str
    data: bytes | None
    """The content before; None if there was no file."""
    lines: tuple[int, int]
    """The number of lines that come back, and of those that go."""
    disturbed: bool
    """True if something else changed the file, too, between two edits of one turn."""


@dataclass(frozen=True)
class UndoPlan:
    """The changes that undo some turns."""

    prompt: str
    """The start of the prompt of the first of them."""
    turns: int
    to: str
    """The id of the last log entry that stays; "" for none."""
    files: Sequence[ChangedFile]
    stays: Sequence[str]
    """The titles of tool calls whose effects cannot be undone."""
    kept: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of files that are kept as they are, each with the reason why it cannot be restored."""
    paths: Sequence[str] = ()
    """All files that the turns changed."""
    messages: int = 0
    """The messages of the user and the model in the turns."""

    def __str__(self) -> str:
        """Describe the plan to the user, in Markdown."""
        what = "the last turn," if self.turns == 1 else f"the last {self.turns} turns, from"
        lines = [f"To take back {what} “{self.prompt}”:", "", *map(describe_file, self.files)]
        lines += [f"- `{to_line(path)}` is kept as it is: {to_line(why)}" for path, why in self.kept.items()]
        if not self.files:
            lines.append("- No file changes: only the conversation goes back.")
        if self.stays:
            lines += ["", "What these did stays, as only edits can be taken back:"]
            lines += [f"- `{title}`" for title in self.stays]
        return "\n".join(lines)


UNSTORED = StateKey("undo_unstored", dict[str, list[Any]])
"""Changes by calls without a result in the log yet, by the calls' ids: a cancelled hook leaves no result."""


def undo(crow: Crow) -> None:
    """Add the command /undo, which shows what would be undone; `/undo yes` does it, and /redo reverses it. `/undo keep`
    keeps the files as they are that cannot be restored, for example since a command changed them.

    Also adds the methods `_session/rewind_points`, which lists the messages to go back to, and `_session/rewind`.
    """
    crow.methods[REWIND_POINTS_METHOD] = answer_rewind_points
    crow.methods[REWIND_METHOD] = answer_rewind

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [
            Command(
                "undo", "Take back the last turn: its edits, and what was said", run_undo, hint="[turns] [keep] [yes]"
            ),
            Command("redo", "Bring back what /undo has just taken back", run_redo),
        ]

    @crow.after_tool
    def note_changes(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        if changes := result.meta.get("crow/changes"):
            session.state[UNSTORED][tool_call.id] = [*changes]

    @crow.message
    def keep_changes(session: Session, entry: Message) -> None:
        changes = session.state[UNSTORED].pop(entry.get("tool_call_id", ""), None)
        if changes and not list_edits(entry):
            session.log.append({"crow": {"kind": "changes", "session": session.id, "changes": changes}})

    # The two hooks below let the parent undo what a sub-agent did.

    @crow.message
    async def copy_changes(session: Session, entry: Message) -> None:
        if (parent := session.parent) and (changes := list_edits(entry)):
            parent.log.append({"crow": {"kind": "changes", "session": session.id, "changes": changes}})
            await parent.log.written()

    @crow.turn_end
    def list_effects(session: Session, outcome: StopReason | Exception) -> None:
        if (parent := session.parent) and (stays := [*find_lasting(session.log)]):
            parent.log.append({"crow": {"kind": "stays", "session": session.id, "calls": stays}})


async def run_undo(session: Session, words: str) -> str:
    """Run the command /undo: describe the plan, or, with `yes`, carry it out."""
    wanted = re.fullmatch(r"([1-9][0-9]{0,8})?(?: *(keep)\b)?(?: *(yes))?", words)
    if wanted is None:
        return f"/undo {words} is not understood. `/undo` or `/undo 2` tells what would change, `/undo 2 yes` does it."
    turns, keep = int(wanted[1] or 1), bool(wanted[2])
    again = f"/undo {turns} " if turns > 1 else "/undo "
    try:
        if wanted[3]:
            return await take_back(session, turns, keep=keep)
        planned = await asyncio.to_thread(plan_undo, session.log, turns, keep=keep)
    except FilesDiffer as error:
        return f"{error}\n\n`{again}keep` tells what changes if such files are kept as they are."
    except UndoError as error:
        return str(error)
    return f"{planned}\n\n`{again}{'keep ' if keep else ''}yes` does it."


async def run_redo(session: Session, words: str) -> str:
    """Run the command /redo: reverse the last undo, unless something was said or changed since."""
    if words:
        return f"/redo {words} is not understood. `/redo` brings back what the last /undo took back."
    try:
        to, undone, kept = find_undone(session.log)
        edits = [change for entry in reversed(undone) for change in reversed(list_edits(entry))]
        changes = [(0, invert(change)) for change in edits if change.get("path") not in kept]
        files, faults = await asyncio.to_thread(plan_files, changes)
        if faults:
            raise UndoError(f"{' '.join(faults.values())} Nothing was brought back.")
        await asyncio.to_thread(restore_files, files)
    except UndoError as error:
        return str(error)
    session.rewind(to)
    await session.log.written()
    brought = f"{format_count(len(files), 'file')} as after it" if files else "no file had to change"
    return f"Brought back, {brought}. The model remembers it again."


def find_undone(log: Sequence[Message]) -> tuple[str, Sequence[Message], Sequence[str]]:
    """Return the id of the last entry that the last undo took back, all its entries, and the files that it kept. Raises
    UndoError if the conversation has gone on since, or the entries are not loaded."""
    kept = drop_rewound(log)
    marker = next(
        (entry for entry in reversed(kept) if "role" in entry or "undone" in entry.get("crow", {})), Message()
    )
    last = str(marker.get("crow", {}).get("undone", ""))
    before = drop_rewound(log[: find_entry(log, last)])
    undone = before[find_entry(before, marker.get("crow", {}).get("to")) :]
    if "role" in marker or not any("role" in entry for entry in undone):
        raise UndoError(
            "There is nothing to bring back: only an undo that nothing follows, in an open session, can be."
        )
    return last, undone, marker.get("crow", {}).get("kept", ())


def invert(change: Change) -> Change:
    """Return the change that reverses another one."""
    swapped = {"old": "new", "new": "old", "before": "after", "after": "before"}
    return cast(Change, {swapped.get(key, key): value for key, value in change.items()})


async def answer_rewind_points(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_session/rewind_points`: the messages that began a turn, the oldest first."""
    points: list[dict[str, Any]] = []
    entries, reply = drop_rewound(session.log), None
    starts = set(find_turns(entries))
    for at, entry in enumerate(entries):
        if at in starts:
            texts = [block.text for block in to_blocks(entry) if isinstance(block, TextBlock)]
            point = {"messageId": get_id(entry), "resumeAtMessageId": reply, "text": "\n".join(texts)}
            points.append({**point, "index": len(points) + 1, "_meta": {"crow": {"texts": texts}}})
        elif entry.get("role") == "assistant":
            reply = get_id(entry)
    return {"points": points}


async def answer_rewind(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_session/rewind`: go back to before the message `messageId`.

    `mode` is `files`, the default, `conversation` or `both`. With `dryRun`, nothing changes. In the mode `both`, the
    conversation stays if the files cannot be restored; `_meta.crow.keep` keeps such files as they are. Raises RpcError.
    """
    mode, dry_run, keep = params.get("mode", "files"), params.get("dryRun", False), wants_to_keep(params.get("_meta"))
    if mode not in REWIND_MODES or type(dry_run) is not bool:
        details = f"mode is one of {', '.join(REWIND_MODES)}; dryRun is true or false."
        raise RpcError(INVALID_PARAMS, "Invalid params", details=details)
    if session.turns.lock.locked() or session.turns.tasks:
        raise RpcError(INVALID_REQUEST, "A turn is running", details="Cancel it, or wait for its end.")
    async with session.turns.lock:
        planned = await asyncio.to_thread(plan_undo, session.log, count_turns(session.log, params), keep=True)
        changes = [describe_change(file) for file in planned.files]
        own = {"stays": planned.stays, "kept": planned.kept, "changes": changes}
        answer: dict[str, Any] = {"_meta": {"crow": own}}
        if mode != "conversation":
            answer["files"] = await rewind_files(planned, keep=keep, dry_run=dry_run)
        if mode == "files" or (mode == "both" and not answer["files"]["canRewind"]):
            return answer
        if not dry_run:
            try:
                await rewind_conversation(session, planned, [*planned.kept] if mode == "both" else planned.paths)
            except StoreError as error:
                raise RpcError(INVALID_REQUEST, "Nothing was stored", details=str(error)) from error
        return {**answer, "conversation": {"rewound": not dry_run, "messagesDropped": planned.messages}}


def wants_to_keep(meta: Any) -> bool:
    """Find out from `_meta` whether files that cannot be restored are to be kept as they are."""
    match meta:
        case {"crow": {"keep": True}}:
            return True
        case _:
            return False


def count_turns(log: Sequence[Message], params: Mapping[str, Any]) -> int:
    """Count the turns from the one that the message `messageId` began. Raises RpcError if there is no such turn."""
    entries = drop_rewound(log)
    starts = [get_id(entries[at]) for at in find_turns(entries)]
    if (id := params.get("messageId")) not in starts:
        details = (
            f"No turn of this session began with the message {str(id)[:100]!r}. {REWIND_POINTS_METHOD} lists them."
        )
        raise RpcError(INVALID_PARAMS, "Unknown message", details=details)
    return len(starts) - starts.index(id)


async def rewind_files(planned: "UndoPlan", *, keep: bool, dry_run: bool) -> dict[str, Any]:
    """Restore the files of a plan, and describe that for the answer to `_session/rewind`."""
    try:
        if planned.kept and not keep:
            raise UndoError(" ".join(planned.kept.values()))
        if not dry_run:
            await asyncio.to_thread(restore_files, planned.files)
    except UndoError as error:
        return {"canRewind": False, "error": str(error)}
    back, gone = (sum(file.lines[side] for file in planned.files) for side in (0, 1))
    changed = [file.path for file in planned.files]
    return {"canRewind": True, "filesChanged": changed, "insertions": back, "deletions": gone}


async def rewind_conversation(session: Session, planned: "UndoPlan", kept: Sequence[str]) -> None:
    """Rewind a session as a plan says; `kept` are the files that were not restored. Raises StoreError."""
    session.rewind(planned.to, last=str(session.log[-1].get("crow", {}).get("id", "")), kept=kept)
    await session.log.written()


async def take_back(session: Session, turns: int = 1, *, keep: bool = False) -> str:
    """Restore the files and rewind the session; return a sentence for the user. `keep` is that of `plan_undo`.

    Raises UndoError if it cannot be done, StoreError if it is done but cannot be stored.
    """
    planned = await asyncio.to_thread(plan_undo, session.log, turns, keep=keep)
    await asyncio.to_thread(restore_files, planned.files)
    await rewind_conversation(session, planned, [*planned.kept])
    files = f"{format_count(len(planned.files), 'file')} as before" if planned.files else "no file had to change"
    kept = f" Kept as they are: {', '.join(planned.kept)}." if planned.kept else ""
    return f"Taken back, {files}.{kept} The model has forgotten “{planned.prompt}” and what followed."


def plan_undo(log: Sequence[Message], turns: int = 1, *, keep: bool = False) -> UndoPlan:
    """Plan how to go back to before the last turns; change nothing. Raises UndoError if it cannot be done.

    With `keep`, files that cannot be restored are kept as they are; without it, they raise FilesDiffer.
    """
    entries = drop_rewound(log)
    starts = find_turns(entries)
    if not 0 < turns <= len(starts):
        there = "is only 1 turn" if len(starts) == 1 else f"are {f'only {len(starts)}' if starts else 'no'} turns"
        raise UndoError(f"There {there} to take back.")
    ends = [*starts[1:], len(entries)]
    wanted = [entries[start:end] for start, end in zip(starts, ends, strict=True)][-turns:]
    first = starts[-turns]
    changes = [(n, change) for n, turn in enumerate(wanted) for entry in turn for change in list_edits(entry)]
    files, kept = plan_files(changes)
    if kept and not keep:
        raise FilesDiffer(f"{' '.join(kept.values())} Nothing was taken back.")
    return UndoPlan(
        prompt=shorten_line(to_line(" ".join(find_first_text(entries[first]).split())), 60),
        turns=turns,
        to=str(entries[first - 1].get("crow", {}).get("id", "")) if first else "",
        files=files,
        stays=[title for turn in wanted for title in find_lasting(turn)],
        kept=kept,
        paths=sorted({str(change.get("path")) for _, change in changes}),
        messages=sum(entry.get("role") in ("user", "assistant") for turn in wanted for entry in turn),
    )


def plan_files(changes: Sequence[tuple[int, Change]]) -> tuple[list[ChangedFile], dict[str, str]]:
    """Find the files to restore, from changes in their order, each with the number of its turn. Return also the files
    that cannot be restored, each with the reason."""
    by_path: dict[str, list[tuple[int, Change]]] = {}
    for n, change in changes:
        by_path.setdefault(str(change.get("path")), []).append((n, change))
    files: list[ChangedFile] = []
    faults: dict[str, str] = {}
    for path, its in sorted(by_path.items()):
        try:
            files += filter(None, [plan_file(path, its)])
        except UndoError as error:
            faults[path] = str(error)
    return files, faults


def plan_file(path: str, changes: Sequence[tuple[int, Change]]) -> ChangedFile | None:
    """Plan how to restore one file; None if it is as before. Raises UndoError if somebody else changed it, or what it
    held was not recorded."""
    if not all({"path", "old", "new", "before", "after"} <= change.keys() for _, change in changes):
        raise UndoError(f"What {path} held before is not known.")
    breaks = [(n, later_n) for (n, change), (later_n, later) in pairwise(changes) if change["after"] != later["before"]]
    oldest, newest = changes[0][1], changes[-1][1]
    now = compute_digest(path)
    if now == oldest["before"]:
        return None  # for example after an undo that was interrupted
    if now != newest["after"]:
        raise UndoError(f"{path} has been changed by somebody else since.")
    if any(n != later_n for n, later_n in breaks):
        raise UndoError(f"{path} was changed by somebody else between these turns: take back fewer turns.")
    data = read_old_bytes(oldest)
    old, new = (Counter((change or "").splitlines()) for change in (oldest["old"], newest["new"]))
    return ChangedFile(path, data, ((old - new).total(), (new - old).total()), bool(breaks))


def compute_digest(path: str) -> str | None:
    """Compute the SHA-256 of a file; None if there is no file. Raises UndoError."""
    if os.path.realpath(path) != path:
        raise UndoError(f"{path} leads elsewhere now, to {os.path.realpath(path)}.")
    if not os.path.lexists(path):
        return None
    try:
        if not os.path.isfile(path):
            return "no file"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UndoError(f"{path} cannot be read ({error.strerror}).") from error


def read_old_bytes(change: Change) -> bytes | None:
    """Return the content of a file before a change. Raises UndoError if the log does not have it whole."""
    path, text = change["path"], change["old"]
    if text is None:
        return None
    try:
        data = (("\ufeff" if change.get("mark") else "") + text).encode(change.get("encoding", "utf-8"))
    except (LookupError, UnicodeEncodeError):
        data = b""
    if hashlib.sha256(data).hexdigest() != change["before"]:
        why = "a secret in it was masked" if MASK in text else "the log is damaged"
        raise UndoError(f"What {path} held before was not kept whole: {why}.")
    return data


def restore_files(files: Sequence[ChangedFile]) -> None:
    """Restore files, each in one step. Raises UndoError with the number of files that are restored."""
    for done, file in enumerate(files):
        try:
            restore_file(file)
        except OSError as error:
            raise UndoError(
                f"{file.path} cannot be put back ({error.strerror}); {done} of {len(files)} files are as before. "
                "When that is mended, undo again: it goes on where it stopped."
            ) from error


def restore_file(file: ChangedFile) -> None:
    """Restore a file; its mode and its owner stay. Raises OSError."""
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
                system.keep_owner(opened.fileno(), status)
        system.replace_file(new, file.path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise


def find_lasting(turn: Sequence[Message]) -> Iterator[str]:
    """Iterate over the titles of tool calls that may have had effects other than edits, also those of sub-agents."""
    for entry in turn:
        if marker_kind(entry) == "stays":
            yield from entry.get("crow", {}).get("calls", ())
    answers = {entry.get("tool_call_id"): entry for entry in turn if entry.get("role") == "tool"}
    denied = {notes.get("call") for entry in turn if (notes := entry.get("crow", {})).get("is") == "deny"}
    for use in [use for entry in turn for use in name_raw_calls(entry)]:
        answer = answers.get(use["id"], Message())
        notes = answer.get("crow", {})
        kind = notes.get("shown", {}).get("kind", "other")
        cut = answer.get("content", INTERRUPTED) == INTERRUPTED
        title = make_title(use["function"]["name"], parse_arguments(use) or {})
        if "stays" in notes:  # all that it did is known
            yield from (f"{title}: {each}" for each in notes["stays"])
            continue
        harmless = kind in HARMLESS_KINDS or (kind != "execute" and notes.get("failed")) or list_edits(answer)
        if use["id"] not in denied and (cut or not harmless):
            yield title


def describe_change(file: ChangedFile) -> dict[str, Any]:
    """Describe a file for `_meta.crow.changes` of the answer to `_session/rewind`."""
    back, gone = file.lines
    return {"path": file.path, "insertions": back, "deletions": gone, "removed": file.data is None}


def describe_file(file: ChangedFile) -> str:
    """Describe a file in one line of a Markdown list."""
    back, gone = file.lines
    if file.data is None:
        what = "will be removed"
    else:
        what = f"{back} {'line comes' if back == 1 else 'lines come'} back, {gone} {'goes' if gone == 1 else 'go'}"
    also = "; something else changed it during the turn, which goes too" if file.disturbed else ""
    return f"- `{to_line(file.path)}`: {what}{also}"
