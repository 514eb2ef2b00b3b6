"""The judgement of commands that may run git in an untrusted repository: git must not run programs that it names."""

import asyncio
import os
from itertools import chain

from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from crow_core.text import to_line
from crow_system.git import (
    find_foreign_settings,
    find_git_options,
    is_same_repository,
    make_git_environment,
    restore_variables,
)

from crow_permissions.command_files import list_folders
from crow_permissions.judgement import ONLY_READS, Judgement, find_composition
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import read_command_line
from crow_permissions.subjects import find_start, find_subject


async def judge_git(session: Session, tool_call: ToolCall, judgement: Judgement) -> Judgement:
    """Judge a command that a rule allows, in a folder that is not trusted: git must not run the folder's programs.

    Those that can be switched off are; if the settings of the repository may name others, the user is asked.
    """
    composition = find_composition(session, tool_call)
    commands = composition.commands if composition else ()
    folders = list_git_folders(session, tool_call)
    words = [command.words for command in commands] or [find_subject(session, tool_call).split()]
    given = [option for each in words if (option := find_git_options(each)) is not None]
    if not given:
        return judgement
    options = next(filter(None, given), "")
    session.folders.environments[tool_call.id] = restore_variables(session.folders.variables) | make_git_environment()
    try:
        if any(UNKNOWN in folder for folder in folders):
            raise OSError("it is not known in which folder git runs")
        found = [await asyncio.to_thread(find_foreign_settings, folder) for folder in filter(os.path.isdir, folders)]
        foreign = list(dict.fromkeys(chain.from_iterable(found)))
        reason = f"its settings may run programs: {', '.join(foreign[:5])}" if foreign else ""
    except OSError as error:
        reason = f"its settings cannot be read: {error}"
    if options:
        reason = f"{options} may choose another repository, or programs"
    if len(commands) > 1 and not all(command.is_data_command for command in commands):
        reason = reason or "another command in the same line may change its settings"
    if not reason:
        return judgement
    source = f"the answer {str(judgement.answer)!r}" if judgement.answer else judgement.reason
    allows = "this only reads" if source == ONLY_READS else f"{source} allows this"
    remark = f"{allows}, but the repository is not trusted, and {to_line(reason[:500])}."
    return Judgement("ask", remark=remark[:1].upper() + remark[1:], may_review=True)


def may_leave_repository(session: Session, tool_call: ToolCall) -> bool:
    """Test whether an allowed command may run git outside of the repository of the session."""
    folders = [os.path.realpath(folder.replace(UNKNOWN, "?")) for folder in list_git_folders(session, tool_call)]
    return not all(is_same_repository(each, session.cwd) for each in folders)


def list_git_folders(session: Session, tool_call: ToolCall) -> list[str]:
    """List the folders in which an allowed command may run git; a composition has one."""
    if composition := find_composition(session, tool_call):
        return [composition.folder]
    line = read_command_line(find_subject(session, tool_call))
    return list_folders(line, find_start(session, tool_call))
