"""The tool `file_editor`: view, create and edit files, and undo edits."""

import asyncio
from dataclasses import replace
from typing import Annotated, NotRequired
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ContentBlock, TextContent, ToolAnnotations
from pydantic import Field, TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.files.edit_history import EditHistories
from crow_mcp_server.files.edits import TextReplacement
from crow_mcp_server.files.file_command import EditorAnswer, EditorArguments, EditorCommand, FileCommand
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.tool_options import READ_ONLY, ToolOptions, is_dry_run, optional_field
from crow_mcp_server.workspace import Workspace

DESCRIPTION = """\
View, create and edit files; prefer it to cat, sed and heredocs. For example:
{"command": "str_replace", "path": "src/a.py", "old_str": "x = 1", "new_str": "x = 2"}
view: a file with line numbers (view_range [-20, -1]: its end), a folder, an image, the text of a PDF \
or Office file, a notebook's cells.
str_replace: replace old_str, copied from a view without line numbers, with new_str; it must occur once, unless \
replace_all. Or make several edits, all or none.
insert: put new_str after line insert_line (0 = top).
create: write file_text to a new file, parents included; view an existing one first.
undo_edit: take back the last edit of path."""
KINDS = {"view": "read", "create": "edit", "str_replace": "edit", "insert": "edit", "undo_edit": "edit"}
EDIT_ANNOTATIONS = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
)
COMMAND_ANNOTATIONS = dict.fromkeys(KINDS, EDIT_ANNOTATIONS) | {
    "view": READ_ONLY,
    "create": EDIT_ANNOTATIONS.model_copy(update={"idempotent_hint": True}),
}
"""The annotations of each command; MCP's own annotations describe only the whole tool."""


class Replacement(TypedDict):
    old_str: str
    new_str: str
    replace_all: NotRequired[SkipJsonSchema[bool]]


class EditorResult(TypedDict):
    path: str
    line: int
    """The first line that is shown or was changed, from 1."""
    text: str
    """The text for the model."""
    diff: NotRequired[str]
    """The change that an edit made, as a unified diff."""
    dry_run: NotRequired[bool]
    """Present and true when nothing was written."""


def register(server: FastMCP, options: ToolOptions) -> None:
    editor = FileEditor(EditHistories(options.state))

    @server.tool(
        description=DESCRIPTION,
        annotations=EDIT_ANNOTATIONS,
        meta={
            "crow/kind": KINDS,
            "crow/annotations": {
                name: hints.model_dump(by_alias=True, exclude_none=True) for name, hints in COMMAND_ANNOTATIONS.items()
            },
        },
        output_schema=TypeAdapter(EditorResult).json_schema(),
    )
    async def file_editor(
        context: Context,
        command: EditorCommand,
        path: Annotated[str, Field(description="relative or absolute")],
        file_text: Annotated[str | SkipJsonSchema[None], optional_field()],
        old_str: Annotated[str | SkipJsonSchema[None], optional_field()],
        new_str: Annotated[str | SkipJsonSchema[None], optional_field()],
        replace_all: Annotated[bool | SkipJsonSchema[None], optional_field()],
        edits: Annotated[list[Replacement] | SkipJsonSchema[None], optional_field()],
        insert_line: Annotated[int | SkipJsonSchema[None], optional_field()],
        view_range: Annotated[list[int] | SkipJsonSchema[None], optional_field("[first, last]")],
        dry_run: Annotated[bool | SkipJsonSchema[None], optional_field("only show the change")],
    ) -> ToolResult:
        dry = dry_run or is_dry_run(context)
        replacements = None if edits is None else [to_replacement(edit, every=bool(replace_all)) for edit in edits]
        arguments = EditorArguments(
            command, path, file_text, old_str, new_str, bool(replace_all), replacements, insert_line, view_range
        )
        answer = await editor.run(await options.find_workspace(context), arguments, dry_run=dry)
        location = FileLocation(path=answer.path, line=answer.line)
        result = EditorResult(path=answer.path, line=answer.line, text=answer.text)
        if answer.changes:
            result["diff"] = answer.diff
        if dry:
            result["dry_run"] = True
        content: list[ContentBlock] = [TextContent(type="text", text=answer.text)]
        content += [answer.image] if answer.image else []
        changes = [] if dry_run else answer.changes  # a host that did not ask for a dry run expects real changes
        return ToolResult(content, result, {"crow/changes": changes, "crow/locations": [location]})


def to_replacement(edit: Replacement, *, every: bool) -> TextReplacement:
    """Convert an item of `edits`; `every` holds unless the item says otherwise."""
    return TextReplacement(edit["old_str"], edit["new_str"], edit.get("replace_all", every))


class FileLocation(TypedDict):
    path: str
    line: int
    """Counted from 1."""


class FileEditor:
    """Runs the commands of all sessions of a server, one at a time for each file."""

    def __init__(self, histories: EditHistories) -> None:
        self._histories = histories
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, workspace: Workspace, arguments: EditorArguments, *, dry_run: bool = False) -> EditorAnswer:
        """Run one command; with `dry_run`, only report what it would change.

        Raises ToolRefusal when the command cannot be carried out.
        """
        path = arguments.path
        thread = CapacityLimiter(1)  # a limiter of its own: waiting for a host blocks no other call
        try:
            bounds = workspace if arguments.command == "view" else replace(workspace, readable=())
            target = await to_thread.run_sync(disk.resolve_path, path, bounds, limiter=thread)
            async with self._locks.setdefault(target.path, asyncio.Lock()):

                def work() -> EditorAnswer:
                    history = self._histories.get(workspace.session, workspace.changes)
                    return FileCommand(target, workspace.files, history, dry_run).run(arguments)

                return await to_thread.run_sync(work, limiter=thread)
        except OSError as error:
            raise ToolRefusal(f"{arguments.command} {path}: {error.strerror or error}. Nothing was changed.") from None
