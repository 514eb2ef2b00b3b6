"""The tool `terminal`: runs one shell command and tells what it printed."""

import os
from functools import partial
from typing import Annotated

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ToolAnnotations
from pydantic.json_schema import SkipJsonSchema

from crow_mcp_server.host import Host, is_dry, optional
from crow_mcp_server.output import clean, shorten
from crow_mcp_server.processes import LocalTerminals
from crow_mcp_server.refusal import Refusal
from crow_mcp_server.workspace import Outcome, Workspace

MAX_OUTPUT = 30_000  # characters the model is shown
DEFAULT_TIMEOUT = 120.0  # seconds
MAX_TIMEOUT = 600.0

DESCRIPTION = """\
Run a shell command (bash -c) to its end; returns stdout and stderr, and the exit code when it is not 0.
Every call is a new shell: only files last, not variables or cd. There is no input: pass flags such as -y or -m.
Long output keeps its beginning and end: narrow it with grep, head or tail. \
Start servers with `cmd > log 2>&1 &` and read the log."""

ENVIRONMENT = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "AWS_PAGER": "",
    "EDITOR": "false",  # fails at once, where an editor would wait for somebody
    "VISUAL": "false",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "SSH_ASKPASS_REQUIRE": "never",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
    "TERM": "dumb",
    "NO_COLOR": "1",
}
"""Laid over the environment of every command: nothing waits for a person, nothing decorates."""


def add(server: FastMCP, host: Host) -> None:
    """Add the tool to a server."""
    terminals = LocalTerminals(host.hidden_env)

    @server.tool(
        description=DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
        meta={"crow/kind": "execute"},
        output_schema=None,
    )
    async def terminal(
        context: Context,
        command: str,
        timeout: Annotated[
            float | SkipJsonSchema[None],
            optional(f"seconds, {DEFAULT_TIMEOUT:g} unless given, at most {MAX_TIMEOUT:g}"),
        ],
        cwd: Annotated[str | SkipJsonSchema[None], optional("instead of the working folder")],
    ) -> ToolResult:
        if is_dry(context):
            return ToolResult("Dry run, the command was not run.")
        workspace = await host.workspace(context)
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout
        text, place = await run_command(workspace, terminals, command, timeout=seconds, cwd=cwd)
        return ToolResult(text, meta={"crow/terminal": place} if place else None)


async def run_command(
    workspace: Workspace, local: LocalTerminals, command: str, *, timeout: float, cwd: str | None
) -> tuple[str, str]:
    """Run a command; gives what the model reads of it, and the host's terminal it ran in, "" for none.

    Raises Refusal when it cannot start, or its end was not seen.
    """
    if not command.strip() or "\0" in command:
        raise Refusal("command is empty, or has a NUL in it. Give the shell command to run.")
    if timeout <= 0:
        raise Refusal(f"timeout {timeout:g} is not positive. Give seconds, at most {MAX_TIMEOUT:g}.")
    folder = await to_thread.run_sync(_folder, workspace, cwd or "")
    limit, env = min(timeout, MAX_TIMEOUT), {**ENVIRONMENT, "PWD": folder}
    if workspace.terminals:  # what is hidden may be in a host's environment, too
        run, env = workspace.terminals.run, dict.fromkeys(local.hidden, "") | env
    else:
        run = partial(local.run, watch=workspace.watch)
    try:
        outcome = await run(command, cwd=folder, env=env, timeout=limit, output_limit=MAX_OUTPUT)
    except (OSError, ValueError) as error:
        if workspace.terminals and isinstance(error, OSError):
            raise Refusal(f"The end of the command was not seen: {error}. What it did until then stays.") from None
        reason = error.strerror if isinstance(error, OSError) else str(error)  # longer than the system takes
        raise Refusal(f"The command could not start: {reason}. Write a long script to a file and run that.") from None
    return report(outcome, limit), outcome.get("terminal", "")


def _folder(workspace: Workspace, cwd: str) -> str:
    folder = os.path.join(workspace.cwd, os.path.expanduser(cwd)) if cwd else workspace.cwd
    if not os.path.isdir(folder):
        what = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise Refusal(f"The folder {folder} {what}, so the command was not run. Leave out cwd for {workspace.cwd}.")
    return folder


def report(outcome: Outcome, timeout: float) -> str:
    """What the model reads: the output, and one line for each thing that was not as usual."""
    said: list[str] = []
    if background := outcome.get("background"):
        pids = " ".join(map(str, background))
        said.append(f"[still running in the background: {pids}; their further output is lost unless redirected]")
    if outcome.get("timed_out"):
        said.append(
            f"[timed out after {timeout:g} s and was killed; the output so far is above. Give a longer timeout "
            f"(at most {MAX_TIMEOUT:g}), or run it in the background with its output in a file]"
        )
    elif outcome["signal"]:
        said.append(f"[killed by {outcome['signal']}]")
    elif outcome["exit_code"] is None:
        said.append("[ended, but its exit code is not known]")
    elif outcome["exit_code"]:
        said.append(f"[exit code {outcome['exit_code']}]")
    output = shorten(clean(outcome["output"]), MAX_OUTPUT).rstrip()
    return "\n".join([output, *said] if output else said or ["[no output]"])
