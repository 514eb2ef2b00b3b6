"""Decisions about the changes that a command in the sandbox made: whether they are applied or discarded."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.notes import EditNotes
from crow_core.session.session import Session
from crow_core.session.user import PermissionAnswer
from crow_core.text import to_line

from crow_permissions.call_questions import ask, keep, to_question
from crow_permissions.decision_record import record
from crow_permissions.judgement import Judgement, SessionPermissions
from crow_permissions.kept_answers import AnswerRule, KeptAnswer
from crow_permissions.lasting import get_folder, offer_rule
from crow_permissions.private_files import list_in_git
from crow_permissions.review import REVIEW, ReviewedCommand, add_note, finish_in_thread, work_on_files
from crow_permissions.shown_changes import (
    NOTED_LIMIT,
    ChangeSet,
    describe_changes,
    is_text,
    list_untracked_removals,
    make_diffs,
    read_text,
    show_name,
    sort_changes,
)
from crow_permissions.subjects import find_subject

if TYPE_CHECKING:
    from crow_sandbox.applying import AppliedChange
    from crow_sandbox.lasting import Look
    from crow_sandbox.sandbox import SandboxRun

UNDO_BYTES = 500_000
"""The largest file whose text is kept for /undo."""
UNDO_FILES = 200
UNDO_CHARACTERS = 2_000_000
"""The most files of one command, and the most characters in them, that are kept for /undo."""
UNDOABLE = [("file", "added"), ("file", "changed"), ("file", "removed"), ("folder", "added")]
"""The types and kinds of changes whose texts /undo can keep."""
ENDS_SESSION = "It goes on in its session; discarding ends the session."
NOT_IN_VIEW = {
    "hardlink different from source": "In the sandbox, git clones a local folder only with --no-hardlinks, or from file://",
    "Invalid cross-device link": "In the sandbox, an earlier folder cannot be renamed: `mv` copies it, and "
    "`git add -A` does what `git mv` does",
}
"""For what programs say where the copy-on-write view has no hard links to earlier files and renames no earlier folder:
what the model is told then."""


@dataclass(frozen=True)
class ReviewDecision:
    """The decision about the changes that a command made, and its reason."""

    applies: bool
    by: str
    answer: KeptAnswer | None = None
    choice: PermissionAnswer | None = None
    """The user's answer, if the user was asked."""
    failed: bool = False
    """True if the changes were to be applied, and could not be."""


async def decide_changes(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, found: ChangeSet
) -> ReviewDecision | None:
    """Decide about changes by the mode, the rules and the answers; None if the user is asked."""
    mode = permissions.mode
    if command.in_plan or mode == "plan":
        return ReviewDecision(False, "plan mode")
    if found.denied:
        return ReviewDecision(False, f"the rule {found.denied[1]!r} says deny, and this changes {found.denied[0]}")
    if mode == "yolo":
        return ReviewDecision(True, "mode yolo")
    if found.must_ask:
        return None
    if found.only_caches:
        return ReviewDecision(True, "only caches have changed")
    if mode == "accept-edits":
        return ReviewDecision(True, "mode accept-edits")
    rule = get_answer_rule(session, command.line or command.tool_call)
    answer = permissions.find_answer([rule], get_folder(session))
    if answer is None or not answer.allows:
        return None
    git = await asyncio.to_thread(list_tracked, found)
    if list_untracked_removals(found, git):
        return None
    return ReviewDecision(True, f"the user answered so {answer.place}", answer)


def get_answer_rule(session: Session, tool_call: ToolCall) -> AnswerRule:
    """Return the rule of an answer about all that a command changes."""
    return AnswerRule("changes", tool_call.name, find_subject(session, tool_call))


def list_tracked(found: ChangeSet) -> set[str]:
    """List the removed files that git has, by their absolute paths."""
    removed = [each.change for each in found.shown if each.change.kind == "removed" and each.change.type != "folder"]
    roots = {change.layer.root for change in removed}
    names = {root: [change.path for change in removed if change.layer.root == root] for root in roots}
    return {path for root in roots for path in list_in_git(root, names[root])}


async def ask_about_changes(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, found: ChangeSet
) -> ReviewDecision:
    """Ask the user whether changes are applied; without an answer they are not.

    Raises EndTurn if the client answers that the turn is cancelled, and SandboxError if the changes cannot be read.
    """
    tool_call = command.tool_call
    count = len(found.list_names()) or len(found.shown)
    things = "file or folder" if count == 1 else "files or folders"
    told = f"It ran in the sandbox, and would change {count:,} {things}."
    told += f" {ENDS_SESSION}" if command.is_in_terminal else ""
    text = f"{told}\n\n{await work_on_files(describe_changes, found)}"
    about = to_question(session, tool_call, text, await work_on_files(make_diffs, found, session.secrets))
    about.meta = {"crow": {"changed": count}}
    rule = get_answer_rule(session, command.line or tool_call)
    offers = offer_rule(rule, get_folder(session), kept=permissions.kept is not None)
    answer, chosen = await ask(session, about, offers, yes="Apply", no="Discard")
    if answer.allowed and answer.choice.command:  # another command is another run
        return ReviewDecision(False, "the user wants another command: " + to_line(answer.choice.command), choice=answer)
    return ReviewDecision(answer.allowed, answer.reason, chosen, answer)


def to_edits(applied: "Sequence[AppliedChange]") -> tuple[list[EditNotes], list[str]]:
    """Convert applied changes to edits that can be undone, and name those that cannot."""
    edits, stays, characters = list[EditNotes](), list[str](), 0
    for each in applied:
        change, root = each.change, each.change.layer.root
        if change.mode_only or (change.type, change.kind) not in UNDOABLE:
            stays.append(show_name(change.path))
            continue
        for name in [change.path] if change.type == "file" else list_applied(change.path, root):
            path = os.path.join(root, name)
            old = read_text(each.before, UNDO_BYTES) if each.before else None
            new = read_text(Path(path), UNDO_BYTES) if change.kind != "removed" else None
            is_known = (old is not None or each.before is None) and (new is not None or change.kind == "removed")
            characters += len(old or "") + len(new or "")
            if not is_known or not is_text(path) or len(edits) >= UNDO_FILES or characters > UNDO_CHARACTERS:
                stays.append(show_name(name))
                continue
            edits.append({"path": path, "old": old, "new": new, "before": to_digest(old), "after": to_digest(new)})
    return edits, stays


def list_applied(folder: str, root: Path) -> list[str]:
    """List the files below a folder that was applied, from the root, up to those that can be kept."""
    names: list[str] = []
    for place, _, files in os.walk(root / folder):
        names += [os.path.relpath(os.path.join(place, file), root) for file in files]
        if len(names) > UNDO_FILES:
            return [folder]  # which is no file, and so is named as one that stays
    return names


def to_digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def explain_limits(result: ToolResult) -> ToolResult:
    """Tell the model what to do instead, if a command has failed for what the copy-on-write view does not have."""
    texts = [str(block.get("text", "")) for block in result.content if result.meta.get("crow/exit")]
    for complaint, note in NOT_IN_VIEW.items():
        if any(complaint in text for text in texts):
            result = add_note(result, note)
    return result


def describe_discarded(found: ChangeSet, decision: ReviewDecision) -> str:
    """Tell the model which changes were discarded, and by whom."""
    names = found.name_files()
    choice = decision.choice
    if choice and not choice.allowed and choice.reason.startswith("the user rejected it"):
        said = f" The user says: {choice.choice.reason}" if choice.choice.reason else ""
        return f"The user discarded what this changed: {names}; the files are as before.{said}"
    return f"What this changed was discarded ({decision.by}): {names}; the files are as before."


def take_names(found: ChangeSet) -> list[str]:
    """Return the changed paths for the record of a decision."""
    names = found.list_names() or [each.name for each in found.shown]
    more = [f"and {len(names) - NOTED_LIMIT:,} more"] if len(names) > NOTED_LIMIT else []
    return [*names[:NOTED_LIMIT], *more]


def sort_for(session: Session, permissions: SessionPermissions, command: ReviewedCommand) -> ChangeSet:
    """Read and sort what a command changed. Raises SandboxError."""
    rules, own, protected = permissions.rules, permissions.own_folders, permissions.protected
    return sort_changes(session, rules, own, protected, command.changed.read_changes())


async def settle_changes(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, result: ToolResult
) -> tuple[ToolResult, ChangeSet, ReviewDecision | None]:
    """Apply or discard what a command changed, and return its result with what the model and /undo need to know.

    Raises EndTurn if the client answers that the turn is cancelled; then all is discarded.
    """
    from crow_sandbox.policy import SandboxError

    result = explain_limits(result)
    found, decision, run = ChangeSet(), None, command.changed
    result.meta["crow/stays"] = []
    try:
        if missed := await work_on_files(command.describe_missed, result):
            result = add_note(result, missed)
        found = await work_on_files(sort_for, session, permissions, command)
        if found.left:
            result = add_note(result, f"Never applied, as no ordinary files: {', '.join(found.left[:12])}")
        if not found.shown:
            return result, found, None
        decision = await decide_changes(session, permissions, command, found)
        if decision is None:
            async with permissions.queue:  # the answer to the question before may have settled this one
                decision = await decide_changes(session, permissions, command, found)
                decision = decision or await ask_about_changes(session, permissions, command, found)
        if not decision.applies:
            if decision.choice:
                result.meta["crow/denied"] = decision.by
            return add_note(result, describe_discarded(found, decision)), found, decision
        edits, stays = await work_on_files(apply_changes, session, run, found)
        result.meta["crow/changes"] = edits
        result.meta["crow/stays"] = stays[:NOTED_LIMIT]
    except SandboxError as error:
        said = show_name(str(error))
        decision = ReviewDecision(False, said, failed=True)
        said = f"What this changed could not be applied: {said}"
        if run.is_unfinished:
            del result.meta["crow/stays"]
            result = add_note(result, f"{said} Some of the files may be changed.")
        else:
            result = add_note(result, f"{said} The files are as before.")
    finally:
        await finish_in_thread(run.remove)
    return result, found, decision


def apply_changes(session: Session, run: "SandboxRun | Look", found: ChangeSet) -> tuple[list[EditNotes], list[str]]:
    """Apply changes, and return them as edits that can be undone, and what cannot. Raises SandboxError if none are
    applied.

    The edits are kept for a turn that is cancelled before the result is in the log.
    """
    applied = run.apply(found.changes)
    try:
        edits, stays = to_edits(applied)
    except Exception:  # they are applied: whatever fails here, they count as changes that stay
        edits, stays = [], take_names(found)
    edits = mask(edits, session.secrets)
    session.state[REVIEW].applied.append(edits)
    return edits, stays


def return_to_start(command: ReviewedCommand, result: ToolResult) -> ToolResult:
    """Let the next command start where this one did, if the folder in which it ended was discarded."""
    folder = result.meta.get("crow/folder", "")
    if not folder or os.path.isdir(folder):
        return result
    result.meta["crow/folder"] = command.start
    if shell := result.meta.get("crow/shell"):
        result.meta["crow/shell"] = {**shell, "folder": command.start}
    return add_note(result, f"{to_line(folder)} does not exist outside of the sandbox; back in {command.start}")


async def record_decision(
    session: Session,
    permissions: SessionPermissions,
    tool_call: ToolCall,
    found: ChangeSet,
    decision: ReviewDecision,
) -> None:
    """Record a decision about changes, and keep the user's answer."""
    if decision.answer and decision.choice:
        await keep(session, permissions, decision.answer)
    permissions.has_edits |= decision.applies
    verdict = "allow" if decision.applies else "deny"
    judgement = Judgement(verdict, decision.by, answer=decision.answer, writes=decision.applies)
    record(session, tool_call, judgement, take_names(found))
