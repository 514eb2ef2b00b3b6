"""Checks: whether a run of a task has passed."""

import os
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow_agent.program_limits import make_limit
from crow_agent.settings.home import Home
from crow_core.mcp.limit import Limit
from crow_core.session.output import OutputSchema
from crow_extensions.shell import run_command
from msgspec import UNSET, Struct

from crow_eval.tasks import (
    AnswerCheck,
    Check,
    CommandCheck,
    FileCheck,
    JudgeCheck,
    PythonCheck,
    SchemaCheck,
    Task,
    describe_check,
    list_rules,
)
from crow_eval.workspaces import WorkspaceError, make_environment

REASON_LIMIT = 2_000
"""Characters of the reason of a failed check that are kept, from its end."""


class CheckResult(Struct, kw_only=True):
    """The result of one check."""

    name: str
    kind: str
    passed: bool
    reason: str = ""
    """Why it has failed; of a judge, always its reason."""
    session: str = ""
    """The id of the session of a judge."""


@dataclass(frozen=True)
class Work:
    """The work of an agent on a task: its workspace and its answer."""

    workspace: Path
    answer: str = ""
    """Its last message."""
    value: Any = UNSET
    """The typed result; UNSET if there is none."""
    fault: str = ""
    """Why there is no typed result."""


Judge = Callable[[Task, JudgeCheck, Work], Awaitable[CheckResult]]
"""Asks a model whether a check passes."""


async def run_checks(
    task: Task, work: Work, hidden: Collection[str] = (), judge: Judge | None = None
) -> list[CheckResult]:
    """Run the checks of a task on an agent's work, one after the other; without a judge, leave out what a model judges.

    No command inherits the environment variables that `hidden` names. Raises WorkspaceError if a check has a sandbox
    that this machine cannot apply.
    """
    results: list[CheckResult] = []
    for check in task.checks:
        if isinstance(check, JudgeCheck):
            if judge is not None:
                results.append(await judge(task, check, work))
            continue
        reason = await find_reason(task, check, work, hidden)
        kind = type(check).__name__.removesuffix("Check").lower()
        results.append(
            CheckResult(
                name=describe_check(check), kind=kind, passed=reason is None, reason=(reason or "")[-REASON_LIMIT:]
            )
        )
    return results


async def find_reason(task: Task, check: Check, work: Work, hidden: Collection[str]) -> str | None:
    """Run a check that needs no model; return why it has failed, or None if it passed."""
    match check:
        case CommandCheck():
            return await run_process(task, check, check.run, work, hidden)
        case PythonCheck():
            file, _, name = check.function.rpartition(":")
            script = Path(__file__).with_name("call_function.py")
            # -P: modules beside the script, such as inspect.py, hide none of the standard library
            command = [sys.executable, "-P", str(script), str(task.folder / file), name, str(work.workspace)]
            return await run_process(task, check, command, work, hidden, stdin=work.answer)
        case FileCheck():
            return find_file_reason(check, work.workspace / check.path)
        case AnswerCheck():
            return find_text_reason(check, work.answer, "The answer")
        case SchemaCheck():
            return find_schema_reason(task, work)
        case JudgeCheck():
            raise AssertionError  # a model judges


async def run_process(
    task: Task,
    check: CommandCheck | PythonCheck,
    command: str | list[str],
    work: Work,
    hidden: Collection[str],
    *,
    stdin: str | None = None,
) -> str | None:
    """Run a command in the workspace; return why its end is not as expected, or None.

    With `stdin`, it is the function of a check, which writes its reason, and nothing else, to standard error. Raises
    WorkspaceError if its sandbox cannot be applied.
    """
    given, more, is_function = (stdin or "").encode(), make_environment(task), stdin is not None
    exit = check.exit if isinstance(check, CommandCheck) else 0
    try:
        code, output = await run_command(
            command,
            str(work.workspace),
            check.timeout,
            given,
            with_stdout=not is_function,
            hidden=hidden,
            more=more,
            limit=limit_check(task, check, work),
        )
    except TimeoutError as error:
        return f"It took longer than {check.timeout:g} seconds. {error}".strip()
    except ConnectionError as error:
        raise WorkspaceError(f"{task.source} sandbox: {describe_check(check)} was not run: {error}") from error
    except OSError as error:
        said = command if isinstance(command, str) else shlex.join(command)
        return f"{said} cannot be run: {error.strerror}."
    if code == exit:
        return None
    return output if is_function and output else f"It ended with code {code}, not {exit}.\n{output}".strip()


def limit_check(task: Task, check: CommandCheck | PythonCheck, work: Work) -> Limit | None:
    """Return what starts the command of a check in its sandbox; None if it has none."""
    if check.sandbox == "off":
        return None
    folders, home = [str(task.folder), str(Path(__file__).parent), sys.prefix], Home.find(os.environ)
    return make_limit(check.sandbox, [str(work.workspace)], home, has_network=check.network, readable=folders)


def find_file_reason(check: FileCheck, file: Path) -> str | None:
    """Return why a file is not as a check wants it, or None."""
    if check.absent:
        return f"{check.path} is there." if file.exists() or file.is_symlink() else None
    if check.exists:
        return None if file.exists() else f"{check.path} is not there."
    if not file.is_file():
        return f"{check.path} is not there."
    try:
        return find_text_reason(check, file.read_text("utf-8", "replace"), check.path)
    except OSError as error:
        return f"{check.path} cannot be read: {error.strerror}."


def find_text_reason(check: FileCheck | AnswerCheck, text: str, what: str) -> str | None:
    """Return why a text is not as a check wants it, or None. Blank space at the end makes no difference."""
    rule = list_rules(check)[0]
    wanted: str = getattr(check, rule)
    match rule:
        case "equals":
            held = text.rstrip() == wanted.rstrip()
        case "contains":
            held = wanted in text
        case _:
            held = re.search(wanted, text) is not None
    if held:
        return None
    said = {"equals": "is not", "contains": "does not contain", "matches": "does not match"}[rule]
    return f"{what} {said} {wanted[:300]!r}. It begins: {text[:300]!r}"


def find_schema_reason(task: Task, work: Work) -> str | None:
    """Return why a typed result does not fit its schema, or None."""
    schema = task.find_schema()
    assert schema is not None
    try:
        if work.value is UNSET:
            if work.fault:
                return work.fault
            OutputSchema(schema).accept_text(work.answer)
        else:
            OutputSchema(schema).accept(work.value)
    except ValueError as error:
        return str(error)
    return None
