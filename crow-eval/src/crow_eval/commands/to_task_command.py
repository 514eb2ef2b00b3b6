"""`crow sessions to-task`: make tasks for `crow eval` of stored sessions, with checks that are tried."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from crow_cli.console import escape_line, print_note
from crow_cli.process import fail
from crow_core.text import escape_controls

if TYPE_CHECKING:
    from crow_core.messages.message import Message
    from crow_core.messages.worktree import WorkTree

    from crow_eval.session_ends import SessionEnd

COPY = 'cp -R "$CROW_TASK/changes/." .'
"""The command that lays the changed files over the commit of a task."""
FILES_HINT = "# The folder of the session is in no git repository, or is gone: put what it starts with into files/.\n"
TASK = """\
description = "From session {session}"
{start}
[limits]
# requests = 30

"""
"""The beginning of the file of a task that is made of a session."""
NO_CHECKS = """\
# At least one check, such as:
# [[checks]]
# kind = "command"
# run = "python -m unittest -q"
#
# [[checks]]
# kind = "answer"
# contains = "..."
"""
"""Its end if no check is known."""


@click.command("to-task")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=".", help="The folder of the tasks; this one."
)
@click.option("--turn", type=click.IntRange(min=1), default=1, show_default=True, help="The prompt to take.")
def to_task(ids: tuple[str, ...], into: Path, turn: int) -> None:
    """Make tasks for `crow eval` of sessions: for each a folder with its prompt, its start, its end and its checks.

    The start is the one that was recorded with the session: the commit of its folder, and what had been changed. If
    none was, it is the present commit. The end is what the turn left behind; it becomes the reference solution.

    Proposed are the tests that passed last, and the files that changed. Each check is tried in copies of the start and
    the end, which runs its command on this machine. Only those that fail on the start and pass on the end are kept.

    Exit codes: 0 each task has a check, 1 some have none, and you fill them in, 2 wrong usage.
    """
    from crow_cli.storage import connect
    from crow_persistence.loader import find_session, load_session

    with connect() as connection:
        rows = list({row.id: row for row in (find_session(connection, id) for id in ids)}.values())
        logs = [load_session(connection, row).log for row in rows]
    complete = [make_task(row, log, into, turn) for row, log in zip(rows, logs, strict=True)]
    made = sum(complete)
    if len(rows) > 1:
        print_note(f"{made} of {len(rows)} tasks have checks that fail on the start and pass on the end.")
    sys.exit(0 if made == len(rows) else 1)


def make_task(row: Any, log: "Sequence[Message]", into: Path, turn: int) -> bool:
    """Make the folder of a task; return True if it has checks."""
    from crow_core.messages.message import find_turns, to_parts
    from crow_core.messages.worktree import find_recorded
    from crow_extensions.folder_state import FolderStateError, write_changes

    from crow_eval.session_ends import find_end, write_end

    if len(turns := find_turns(log)) < turn:
        fail(f"session {row.id[:8]} has {len(turns)} prompts, so there is no prompt {turn}.")
    parts = to_parts(log[turns[turn - 1]].get("content"))
    prompt = "\n\n".join(str(part["text"]) for part in parts if "text" in part)
    folder, tree = into / f"task-{row.id[:8]}", find_recorded(log)
    start, note = find_present_start(row.cwd) if tree is None else find_recorded_start(tree)
    end = find_end(log, turn, *find_root(row.cwd, tree))
    head = TASK.format(session=row.id, start=start)
    has_start = start != FILES_HINT
    try:
        folder.mkdir(parents=True)
        (folder / "prompt.md").write_text(f"{prompt}\n", "utf-8")
        (folder / "task.toml").write_text(head + NO_CHECKS, "utf-8")
        if tree is not None and tree.changes:
            (changed := folder / ("changes" if tree.commit else "files")).mkdir()
            write_changes(tree.changes, changed)
        write_end(end, folder, has_start=has_start or bool(tree and tree.changes))
    except FileExistsError:
        fail(f"{folder} exists. Name another folder with --into.")
    except OSError as error:
        fail(f"{folder} cannot be written: {error.strerror}.")
    except FolderStateError as error:
        note = f"Not all of the files are in {folder}: {error}."
    click.echo(escape_controls(str(folder)))
    if turn > 1:
        print_note(
            "The task does not have what was said and done before this prompt: write into prompt.md what it needs."
        )
    if len(parts) > sum("text" in part for part in parts):
        print_note("The images of the prompt are left out.")
    if end.left_out:
        print_note(escape_line(f"Not in the reference solution: {', '.join(end.left_out[:3])}."))
    if note:
        print_note(escape_line(note))
    if not has_start and any(text is not None for text in end.before.values()):
        print_note("The task starts from the files that were changed, as they were. Others are missing.")
    return add_checks(folder, head, end)


def add_checks(folder: Path, head: str, end: "SessionEnd") -> bool:
    """Propose checks and try them; write those that tell the start from the end. Return True if there are any."""
    from crow_core.errors import ConfigError

    from crow_eval.session_ends import propose_checks, write_check
    from crow_eval.workspaces import WorkspaceError

    proposed, file = list(propose_checks(end)), folder / "task.toml"
    kept, reasons = list[Mapping[str, Any]](), list[str]()
    if proposed:
        file.write_text(head + "\n".join(map(write_check, proposed)), "utf-8")
        try:
            kept, reasons = asyncio.run(try_checks(folder, proposed))
        except (ConfigError, WorkspaceError) as error:
            reasons = [str(error)]
        if any(check["kind"] == "command" for check in kept):  # the tests decide, not the wording
            kept = [check for check in kept if "contains" not in check]
    for reason in reasons:
        print_note(escape_line(f"Not kept: {reason[:300].rstrip('. ')}."))
    file.write_text(head + ("\n".join(write_check(dict(check)) for check in kept) or NO_CHECKS), "utf-8")
    if kept:
        print_note(f"{len(kept)} of {len(proposed)} proposed checks are kept. Read them, and the prompt.")
    else:
        print_note(f"Fill in the checks of task.toml, then: crow eval --validate {folder}")
    return bool(kept)


async def try_checks(folder: Path, proposed: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Run the checks of a task on its start and on its reference solution.

    Return those that fail on the one and pass on the other, and why the others do not. Raises ConfigError,
    WorkspaceError.
    """
    from crow_eval.runs import check_solution, check_start, find_hidden
    from crow_eval.tasks import describe_check, load_folder

    task, hidden = load_folder(folder), find_hidden(os.environ)
    faults = [*await check_start(task, hidden), *await check_solution(task, hidden)]
    wrong = {fault.check: f"{fault.check} {fault.sentence}" for fault in faults}
    if "" in wrong:  # there is no solution
        return [], ["the turn changed no file, so its end is its start."]
    named = [(describe_check(check), given) for check, given in zip(task.checks, proposed, strict=True)]
    return [given for name, given in named if name not in wrong], [wrong[name] for name, _ in named if name in wrong]


def find_root(cwd: str, tree: "WorkTree | None") -> tuple[str, str]:
    """Return the folder that the workspace of a task is a copy of, and the session's folder in it."""
    from crow_system.git import read_head

    if tree is not None:
        return tree.top, tree.folder
    top = read_head(cwd)[0] if os.path.isdir(cwd) else ""
    return (top, os.path.relpath(os.path.realpath(cwd), top)) if top else (cwd, "")


def find_present_start(cwd: str) -> tuple[str, str]:
    """Return the lines of a task that start from the present commit of a folder, and a sentence about them."""
    from crow_system.git import read_head

    repository, commit = read_head(cwd) if os.path.isdir(cwd) else ("", "")
    if not commit:
        return FILES_HINT, ""
    start = f"commit = {json.dumps(commit)}\nrepository = {json.dumps(repository)}\n"
    said = f"{commit[:12]}, the present commit of {repository}, without changes that are not committed"
    return start, f"The start of the session is not recorded. The task starts from {said}."


def find_recorded_start(tree: "WorkTree") -> tuple[str, str]:
    """Return the lines of a task that start from a recorded state, and a sentence about them."""
    from crow_extensions.folder_state import FolderStateError, check_commit, list_removed

    try:
        check_commit(tree)
    except FolderStateError as error:
        return FILES_HINT, f"The recorded start cannot be used: {error}."
    start = f"commit = {json.dumps(tree.commit)}\nrepository = {json.dumps(tree.top)}\n" if tree.commit else ""
    if tree.commit and tree.changes:
        commands = [f"git rm -r -q -f -- {shlex.quote(path)}" for path in list_removed(tree.changes)]
        start += f"setup = {json.dumps([*commands, COPY])}\n"
    if tree.fault:
        return start, f"The task starts from {tree.commit[:12]}, without the changes of then: {tree.fault}."
    changed = f" and the {len(tree.changes):,} changes of then" if tree.changes else ""
    return start, f"The task starts from {tree.commit[:12] or 'no commit'}{changed}, as recorded."
