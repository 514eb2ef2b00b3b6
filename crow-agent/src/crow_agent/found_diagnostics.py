"""The commands of `[diagnostics]` that a session uses: the user's own, and those of its folder, if it is trusted."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from crow_core.mcp.limit import Limit
from crow_core.session.session import Session
from crow_extensions.diagnostic_settings import TIMEOUT, Diagnostics

from crow_agent.program_limits import find_project_level, make_limit
from crow_agent.settings.config import load_project_config
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config, DiagnosticTable
from crow_agent.settings.trust import TrustedFolders

PROGRAM_FOLDERS = (".venv/bin", ".venv/Scripts", "node_modules/.bin")
"""Folders of a project that may have its programs; they are used if the folder is trusted."""


async def find_diagnostics(
    config: Config, home: Home, trust: TrustedFolders, env: Mapping[str, str], hidden: Collection[str], session: Session
) -> Sequence[Diagnostics]:
    """Find the commands of a session. Those of a project run in the sandbox of its MCP servers."""
    folder = Path(session.cwd)
    is_trusted = trust.is_trusted(folder)
    project = load_project_config(folder, env).diagnostics if is_trusted else {}
    programs = [str(path) for name in PROGRAM_FOLDERS if is_trusted and (path := folder / name).is_dir()]
    make = partial(to_diagnostics, programs=programs, hidden=hidden)
    found = [make(config.diagnostics)]
    if project:
        level, _ = await find_project_level(config, home)
        limit = None if level == "off" else make_limit(level, session.folders.roots, home, has_network=False)
        found.append(make(project, limit=limit))
    return found


def to_diagnostics(
    table: DiagnosticTable, programs: Sequence[str], hidden: Collection[str], limit: Limit | None = None
) -> Diagnostics:
    """Convert the table `[diagnostics]` to its commands."""
    commands: dict[str, list[str]] = {}
    timeout = TIMEOUT
    for pattern, value in table.items():
        match value:
            case str(command):
                commands[pattern] = [command]
            case list():
                commands[pattern] = value
            case number:
                timeout = float(number)
    return Diagnostics(commands, timeout, programs, limit, hidden)
