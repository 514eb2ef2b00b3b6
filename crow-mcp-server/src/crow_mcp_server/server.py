"""The MCP server: two tools, and whose workspace a call works on."""

from collections.abc import Callable, Collection
from importlib.metadata import version
from typing import Annotated, Any

import mcp_types
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ValidationError
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import ToolResult
from mcp_types import ToolAnnotations
from pydantic import Field
from pydantic import ValidationError as PydanticValidationError
from pydantic.json_schema import SkipJsonSchema

from crow_mcp_server import terminal
from crow_mcp_server.file_editor import Arguments, Command, FileEditor
from crow_mcp_server.processes import LocalTerminals
from crow_mcp_server.refusal import Refusal
from crow_mcp_server.workspace import Workspace, local_workspace

FILE_EDITOR = """\
View, create and edit text files; prefer it to cat, sed and heredocs.
view: a file with line numbers (view_range for a part), or a folder two levels deep.
str_replace: replace old_str, which must occur exactly once (copy it from a view, without line numbers), with new_str.
insert: put new_str after line insert_line (0 = top).
create: write file_text to a new file, parents included; a file that exists must have been viewed before.
undo_edit: take back the last edit of path."""

TERMINAL = """\
Run a shell command (bash -c) to its end; returns stdout and stderr, and the exit code when it is not 0.
Every call is a new shell: only files last, not variables or cd. There is no input: pass flags such as -y or -m.
Long output keeps its beginning and end: narrow it with grep, head or tail. \
Start servers with `cmd > log 2>&1 &` and read the log."""

KINDS = {"view": "read", "create": "edit", "str_replace": "edit", "insert": "edit", "undo_edit": "edit"}


Pair = Annotated[list[int], Field(min_length=2, max_length=2)]


def _optional(description: str | None = None) -> Any:
    """A parameter that may be left out or null; its schema, shorter for it, tells only what it is when given."""
    return Field(description=description, default_factory=lambda: None)


def create_server(
    workspace_for: Callable[[dict[str, Any]], Workspace] = local_workspace, hidden_env: Collection[str] = ()
) -> FastMCP:
    """The server with its two tools; one serves any number of sessions.

    `workspace_for` turns the `_meta` of a call into the workspace it works on. `hidden_env` names environment variables
    that commands never see.
    """
    server = FastMCP("crow", version=version("crow-mcp-server"), middleware=[PlainErrors()])
    editor = FileEditor()
    terminals = LocalTerminals(hidden_env)

    @server.tool(
        name="file_editor",
        description=FILE_EDITOR,
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
        ),
        meta={"crow/kind": KINDS},
        output_schema=None,
    )
    async def file_editor(
        context: Context,
        command: Command,
        path: Annotated[str, Field(description="absolute, or relative to the working folder")],
        file_text: Annotated[str | SkipJsonSchema[None], _optional()],
        old_str: Annotated[str | SkipJsonSchema[None], _optional()],
        new_str: Annotated[str | SkipJsonSchema[None], _optional()],
        insert_line: Annotated[int | SkipJsonSchema[None], _optional()],
        view_range: Annotated[Pair | SkipJsonSchema[None], _optional("[first, last], -1 = end")],
    ) -> ToolResult:
        meta = _meta(context)
        arguments = Arguments(command, path, file_text, old_str, new_str, insert_line, view_range)
        answer = await editor.run(workspace_for(meta), arguments, dry_run=bool(meta.get("crow/dry_run")))
        return ToolResult(answer.text, meta={"crow/changes": answer.changes, "crow/locations": [answer.location]})

    @server.tool(
        name="terminal",
        description=TERMINAL,
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
        meta={"crow/kind": "execute"},
        output_schema=None,
    )
    async def run_terminal(
        context: Context,
        command: str,
        timeout: Annotated[
            float | SkipJsonSchema[None],
            _optional(f"seconds, {terminal.DEFAULT_TIMEOUT:g} unless given, at most {terminal.MAX_TIMEOUT:g}"),
        ],
        cwd: Annotated[str | SkipJsonSchema[None], _optional("instead of the working folder")],
    ) -> ToolResult:
        meta = _meta(context)
        if meta.get("crow/dry_run"):
            return ToolResult("Dry run, the command was not run.")
        workspace = workspace_for(meta)
        seconds = terminal.DEFAULT_TIMEOUT if timeout is None else timeout
        text, place = await terminal.run_command(workspace, terminals, command, timeout=seconds, cwd=cwd)
        return ToolResult(text, meta={"crow/terminal": place} if place else None)

    return server


class PlainErrors(Middleware):
    """Says what is wrong with a call's arguments in a line a model can act on."""

    async def on_call_tool(
        self,
        context: MiddlewareContext[mcp_types.CallToolRequestParams],
        call_next: CallNext[mcp_types.CallToolRequestParams, ToolResult],
    ) -> ToolResult:
        try:
            return await call_next(context)
        except ValidationError as error:
            cause = error.__cause__
            if not isinstance(cause, PydanticValidationError):
                raise
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors(include_url=False)
            )
            raise Refusal(
                f"{context.message.name} was not run. {wrong}. Correct the arguments and call again."
            ) from None


def _meta(context: Context) -> dict[str, Any]:
    request = context.request_context
    return dict(request.meta or {}) if request else {}
