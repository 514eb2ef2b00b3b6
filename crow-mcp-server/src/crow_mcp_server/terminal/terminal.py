"""The tool `terminal`: run shell commands, and use programs that keep running."""

import math
from dataclasses import replace
from time import monotonic
from typing import Annotated

import crow_system as system
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ToolAnnotations
from pydantic.json_schema import SkipJsonSchema

from crow_mcp_server.definitions import POWERSHELL_DESCRIPTION, POWERSHELL_META
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.terminal.sessions import COMMAND_WAIT, OtherEnvironment, TerminalArguments, TerminalSessions
from crow_mcp_server.terminal.tempfiles import TempFolders
from crow_mcp_server.tool_options import ToolOptions, is_dry_run, optional_field
from crow_mcp_server.workspace import Workspace

DESCRIPTION = """\
Run a shell command; returns what it prints, and its exit code unless 0. cd and exported variables persist. \
There is no input: pass flags such as -y or -m. A command that takes longer than wait continues in a session.
For programs that ask or keep running (REPL, debugger, server) name a session: a terminal of its own. Then answer with \
input or keys; session alone shows new output; keys "kill" ends it."""


def register(server: FastMCP, options: ToolOptions) -> None:
    temp_folders = TempFolders(frozenset(options.hidden_env))
    by_session: dict[str, TerminalSessions] = {}

    def get_terminals(workspace: Workspace) -> TerminalSessions:
        if (terminals := by_session.get(workspace.session)) is None:
            terminals = by_session[workspace.session] = TerminalSessions(
                temp_folders, workspace.cwd, workspace.shell() if workspace.shell else {}
            )

            async def close() -> None:
                del by_session[workspace.session]
                await terminals.close()

            if workspace.at_end:
                workspace.at_end(close)
        return terminals

    @server.tool(
        description=DESCRIPTION if system.HAS_TERMINALS else POWERSHELL_DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
        meta={"crow/kind": "execute"} | ({} if system.HAS_TERMINALS else POWERSHELL_META),
        output_schema=None,
    )
    async def terminal(
        context: Context,
        command: Annotated[str | SkipJsonSchema[None], optional_field()],
        session: Annotated[str | SkipJsonSchema[None], optional_field("a new name, or one that is open")],
        input: Annotated[str | SkipJsonSchema[None], optional_field("typed, with Enter")],
        keys: Annotated[str | SkipJsonSchema[None], optional_field('"C-c", "C-d", "Up Enter", "kill"')],
        wait: Annotated[
            float | SkipJsonSchema[None], optional_field(f"seconds for an answer, {COMMAND_WAIT:g} unless given")
        ],
        timeout: Annotated[float | SkipJsonSchema[None], optional_field("seconds until it is killed")],
        cwd: Annotated[str | SkipJsonSchema[None], optional_field("instead of the current folder")],
    ) -> ToolResult:
        if is_dry_run(context):
            return ToolResult("Dry run, the command was not run.")
        if not (0 < (1.0 if timeout is None else timeout) < math.inf and 0 <= (wait or 0) < math.inf):
            raise ToolRefusal("timeout and wait are seconds: give positive numbers, or leave them out.")
        arguments = TerminalArguments(
            command or "", session or "", (input or None) if command else input, keys or "", wait, timeout, cwd or ""
        )
        workspace = await options.find_workspace(context)
        start = monotonic()

        async def report(text: str) -> None:
            last = text.rstrip().rpartition("\n")[2]
            await context.report_progress(monotonic() - start, message=last[-200:])

        workspace = replace(workspace, watch=workspace.watch or report)
        terminals = get_terminals(workspace)
        try:
            answer = await terminals.run(workspace, arguments)
        except OtherEnvironment as refusal:  # the host learns how the variables are
            return ToolResult(str(refusal), meta={"crow/shell": terminals.lasting_state}, is_error=True)
        meta = {
            "crow/folder": answer.folder,
            "crow/shell": terminals.lasting_state,
            "crow/terminal": answer.host_terminal,
            "crow/exit": answer.failure,
            "crow/ended": answer.ended,
            "crow/opened": answer.opened_by,
        }
        return ToolResult(answer.text, meta={name: value for name, value in meta.items() if value} or None)
