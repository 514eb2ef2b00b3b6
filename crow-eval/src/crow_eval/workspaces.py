"""Workspaces: the folder of its own in which a run of a task works, with the files that it starts with."""

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory

from crow_extensions.shell import run_command
from crow_system.git import make_git_environment

from crow_eval.tasks import COMMAND_TIMEOUT, Task

SOLUTION_SCRIPT = "run.sh"
"""A script in the folder `solution` that does in the workspace what files cannot, such as removing one."""
CLONE_TIMEOUT = 600.0
"""Seconds that a clone of a repository may take."""
CHANGES_LIMIT = 30_000
"""Characters of a workspace's diff that a judge reads."""


class WorkspaceError(Exception):
    """The workspace of a task cannot be made; the text says which command failed, and how."""


@asynccontextmanager
async def open_workspace(task: Task, hidden: Collection[str] = (), *, solved: bool = False) -> AsyncGenerator[Path]:
    """Make a folder with what a task starts with, and remove it at the end; `solved` lays its solution over it.

    No command inherits the environment variables that `hidden` names. Raises WorkspaceError.
    """
    try:  # in a thread: while the disk is busy, other runs go on
        made = await asyncio.to_thread(make_folder, task)
    except OSError as error:
        raise WorkspaceError(f"{task.source}: the workspace cannot be made: {error}.") from error
    try:
        await prepare(task, Path(made.name), hidden, solved=solved)
        yield Path(made.name)
    finally:
        await asyncio.to_thread(made.cleanup)


def make_folder(task: Task) -> "TemporaryDirectory[str]":
    """Make a folder, with the files of a task unless it starts from a commit. Raises OSError."""
    made = TemporaryDirectory(prefix="crow-eval-", ignore_cleanup_errors=True)
    try:
        if not task.settings.commit:
            fill(task, Path(made.name), "files", task.files)
    except BaseException:
        made.cleanup()
        raise
    return made


async def prepare(task: Task, folder: Path, hidden: Collection[str], *, solved: bool) -> None:
    """Complete the folder that was made for a task. Raises WorkspaceError."""
    try:
        if task.settings.commit:
            await check_out(task, folder, hidden)
            await asyncio.to_thread(fill, task, folder, "files", task.files)
        await run_all(task, task.settings.setup, "setup", folder, hidden)
        if solved:
            await asyncio.to_thread(fill, task, folder, "solution", task.solution)
            script = task.folder / "solution" / SOLUTION_SCRIPT
            if task.has_folder and script.is_file():
                await run_all(task, [f"sh {shlex.quote(str(script))}"], "solution", folder, hidden)
    except OSError as error:
        raise WorkspaceError(f"{task.source}: the workspace cannot be made: {error}.") from error


def fill(task: Task, folder: Path, name: str, files: Mapping[str, str]) -> None:
    """Copy the folder of a task, and write its files, into a workspace. Raises OSError.

    Of a solution, the answer and the script are left out.
    """
    left_out = ("__pycache__", *(() if name == "files" else ("answer.txt", SOLUTION_SCRIPT)))
    if task.has_folder and (source := task.folder / name).is_dir():
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*left_out))
    for path, text in files.items():
        (file := folder / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


async def check_out(task: Task, folder: Path, hidden: Collection[str]) -> None:
    """Clone the repository of a task at its commit, without a way back to it. Raises WorkspaceError."""
    repository = task.settings.repository
    is_address = ":" in repository  # of another machine, as git writes them
    source = repository if is_address else str((task.folder / (repository or ".")).resolve())
    if not repository:
        source = await run(task, ["git", "rev-parse", "--show-toplevel"], "repository", task.folder, hidden)
    clone = ["git", "clone", "--quiet", "--no-checkout", *([] if is_address else ["--shared"]), source, str(folder)]
    await run(task, clone, "repository", folder, hidden)
    await run(task, ["git", "checkout", "--quiet", "--detach", task.settings.commit], "commit", folder, hidden)
    await run(task, ["git", "remote", "remove", "origin"], "repository", folder, hidden)


async def run_all(task: Task, commands: Collection[str], key: str, folder: Path, hidden: Collection[str]) -> None:
    """Run the commands of a key of a task, one after the other. Raises WorkspaceError."""
    for command in commands:
        await run(task, command, key, folder, hidden)


async def run(task: Task, command: str | list[str], key: str, folder: Path, hidden: Collection[str]) -> str:
    """Run a command of a task and return its output. Raises WorkspaceError unless it exits with 0."""
    said = command if isinstance(command, str) else " ".join(command)
    more = make_environment(task) | (make_git_environment() if isinstance(command, list) else {})
    timeout = CLONE_TIMEOUT if isinstance(command, list) else COMMAND_TIMEOUT
    try:
        code, output = await run_command(command, str(folder), timeout, with_stdout=True, hidden=hidden, more=more)
    except TimeoutError:
        raise WorkspaceError(f"{task.source} {key}: `{said}` took longer than {timeout:g} seconds.") from None
    except OSError as error:
        raise WorkspaceError(f"{task.source} {key}: `{said}` cannot be run: {error}.") from error
    if code:
        raise WorkspaceError(f"{task.source} {key}: `{said}` ended with code {code}: {output[-500:]}")
    return output


def make_environment(task: Task) -> dict[str, str]:
    """Make the variables for the commands of a task: its folder, and a path on which `python` is crow's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"CROW_TASK": str(task.folder), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def describe_changes(before: Path, after: Path) -> str:
    """Make a unified diff of the text files of two folders, cut at CHANGES_LIMIT."""
    texts = [{str(path.relative_to(folder)): path for path in list_files(folder)} for folder in (before, after)]
    parts: list[str] = []
    for name in sorted(texts[0].keys() | texts[1].keys()):
        old, new = (read_lines(side.get(name)) for side in texts)
        parts += unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
        if sum(map(len, parts)) > CHANGES_LIMIT:
            return "\n".join(parts)[:CHANGES_LIMIT] + "\n[cut]"
    return "\n".join(parts)


def list_files(folder: Path) -> list[Path]:
    """List the files of a workspace, without those of git and the bytecode of Python."""
    left_out = {".git", "__pycache__"}
    return [path for path in folder.rglob("*") if path.is_file() and left_out.isdisjoint(path.parts)]


def read_lines(path: Path | None) -> list[str]:
    """Return the lines of a text file; none if it does not exist or is not text."""
    try:
        return path.read_text("utf-8").splitlines() if path else []
    except (OSError, UnicodeDecodeError):
        return []
