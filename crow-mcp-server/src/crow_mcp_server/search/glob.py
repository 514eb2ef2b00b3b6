"""The tool `glob`: finds files by their names."""

from typing import Annotated

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from pydantic import TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.search.ripgrep import list_files, page, relative, shown_as
from crow_mcp_server.tool_options import READS, Host, optional

DESCRIPTION = """\
Find files by name: *.py anywhere, or src/**/*.{ts,tsx}. Sorted, without what .gitignore ignores."""
PAGE = 200  # files


class Found(TypedDict):
    files: list[str]
    """Relative to the working folder where they lie in that, else absolute."""
    total: int
    """Of all pages."""


def add(server: FastMCP, host: Host) -> None:
    """Add the tool to a server."""

    @server.tool(
        description=DESCRIPTION,
        annotations=READS,
        meta={"crow/kind": "search"},
        output_schema=TypeAdapter(Found).json_schema(),
    )
    async def glob(
        context: Context,
        pattern: str,
        path: Annotated[str | SkipJsonSchema[None], optional("folder to search")],
        offset: Annotated[int | SkipJsonSchema[None], optional("files to skip")],
    ) -> ToolResult:
        workspace, start = await host.workspace(context), max(offset or 0, 0)
        place = await to_thread.run_sync(disk.locate, path or workspace.cwd, workspace)
        names = await list_files(place, relative(pattern, place))
        files = [shown_as(place, workspace, name) for name in names[start : start + PAGE]]
        nothing = f"No file in {place.path} has such a name (ignored files apart; * stops at a slash, ** does not)."
        said = "\n".join([*files, *page(len(names), start, PAGE)]) if names else nothing
        return ToolResult(said, Found(files=files, total=len(names)))
