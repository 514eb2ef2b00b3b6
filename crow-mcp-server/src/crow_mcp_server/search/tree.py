"""The tool `tree`: how a project is laid out."""

from collections.abc import Iterator
from typing import Annotated

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from pydantic import TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.search.ripgrep import list_files, page
from crow_mcp_server.tool_options import READS, Host, optional

DESCRIPTION = "Show how a folder is laid out, without what .gitignore ignores; folders tell how many files are in them."
DEPTH = 3
PAGE = 300  # entries

Branch = dict[str, "Branch | None"]
"""What is in a folder by its name; None for a file."""


class Layout(TypedDict):
    tree: str
    files: int
    """In all, however deep."""
    entries: int
    """Of all pages."""


def add(server: FastMCP, host: Host) -> None:
    """Add the tool to a server."""

    @server.tool(
        description=DESCRIPTION,
        annotations=READS,
        meta={"crow/kind": "search"},
        output_schema=TypeAdapter(Layout).json_schema(),
    )
    async def tree(
        context: Context,
        path: Annotated[str | SkipJsonSchema[None], optional()],
        depth: Annotated[int | SkipJsonSchema[None], optional(f"levels, {DEPTH} unless given")],
        offset: Annotated[int | SkipJsonSchema[None], optional("entries to skip")],
    ) -> ToolResult:
        workspace, start = await host.workspace(context), max(offset or 0, 0)
        place = await to_thread.run_sync(disk.locate, path or workspace.cwd, workspace)
        names = await list_files(place)
        entries = list(draw(grow(names), max(DEPTH if depth is None else depth, 1)))
        shown = "\n".join([f"{place.path}/ ({len(names):,} files)", *entries[start : start + PAGE]])
        said = "\n".join([shown, *page(len(entries), start, PAGE)])
        return ToolResult(said, Layout(tree=shown, files=len(names), entries=len(entries)))


def grow(names: list[str]) -> Branch:
    """The tree that paths stand for."""
    root: Branch = {}
    for name in names:
        *folders, file = name.split("/")
        here = root
        for folder in folders:
            here = here.setdefault(folder, {})
            assert here is not None
        here[file] = None
    return root


def draw(branch: Branch, depth: int, indent: str = "  ") -> Iterator[str]:
    """A tree as lines, sorted."""
    for name, below in sorted(branch.items()):
        if below is None:
            yield f"{indent}{disk.printable(name)}"
        else:
            yield f"{indent}{disk.printable(name)}/" + (f" ({count(below):,} files)" if depth == 1 else "")
            if depth > 1:
                yield from draw(below, depth - 1, indent + "  ")


def count(branch: Branch) -> int:
    """The files in a tree."""
    return sum(1 if below is None else count(below) for below in branch.values())
