"""The tool `glob`: find files by name."""

from typing import Annotated

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from pydantic import TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.search.ripgrep import describe_page, format_path, list_files, to_relative_glob
from crow_mcp_server.tool_options import READ_ONLY, ToolOptions, optional_field

DESCRIPTION = """\
Find files by name: *.py anywhere, or src/**/*.{ts,tsx}. Sorted, without what .gitignore ignores."""
PAGE_SIZE = 200  # files


class GlobResult(TypedDict):
    files: list[str]
    """Paths, relative to the working folder if they are inside of it, else absolute."""
    total: int
    """The number of files on all pages."""


def register(server: FastMCP, options: ToolOptions) -> None:
    @server.tool(
        description=DESCRIPTION,
        annotations=READ_ONLY,
        meta={"crow/kind": "search"},
        output_schema=TypeAdapter(GlobResult).json_schema(),
    )
    async def glob(
        context: Context,
        pattern: str,
        path: Annotated[str | SkipJsonSchema[None], optional_field("folder to search")],
        offset: Annotated[int | SkipJsonSchema[None], optional_field("files to skip")],
    ) -> ToolResult:
        workspace, start = await options.find_workspace(context), max(offset or 0, 0)
        target = await to_thread.run_sync(disk.resolve_path, path or workspace.cwd, workspace)
        names = await list_files(target, to_relative_glob(pattern, target))
        files = [format_path(target, workspace, name) for name in names[start : start + PAGE_SIZE]]
        nothing = f"No file in {target.path} has such a name (ignored files apart; * stops at a slash, ** does not)."
        text = "\n".join([*files, *describe_page(len(names), start, PAGE_SIZE)]) if names else nothing
        return ToolResult(text, GlobResult(files=files, total=len(names)))
