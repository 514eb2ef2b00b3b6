"""The tool `tree`: show the folders and files of a project."""

from collections.abc import Iterator
from typing import Annotated

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from pydantic import TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.search.ripgrep import describe_page, list_files
from crow_mcp_server.tool_options import READ_ONLY, ToolOptions, optional_field

DESCRIPTION = """\
Show the folders and files below a folder, without what .gitignore ignores."""
DEFAULT_DEPTH = 3
PAGE_SIZE = 300  # entries

FolderTree = dict[str, "FolderTree | None"]
"""The content of a folder by name; None for a file."""


class TreeResult(TypedDict):
    tree: str
    files: int
    """The number of files at any depth."""
    entries: int
    """The number of lines on all pages."""


def register(server: FastMCP, options: ToolOptions) -> None:
    @server.tool(
        description=DESCRIPTION,
        annotations=READ_ONLY,
        meta={"crow/kind": "search"},
        output_schema=TypeAdapter(TreeResult).json_schema(),
    )
    async def tree(
        context: Context,
        path: Annotated[str | SkipJsonSchema[None], optional_field()],
        depth: Annotated[int | SkipJsonSchema[None], optional_field(f"levels, {DEFAULT_DEPTH} unless given")],
        offset: Annotated[int | SkipJsonSchema[None], optional_field("entries to skip")],
    ) -> ToolResult:
        workspace, start = await options.find_workspace(context), max(offset or 0, 0)
        target = await to_thread.run_sync(disk.resolve_path, path or workspace.cwd, workspace)
        names = await list_files(target)
        entries = list(format_tree(build_tree(names), max(DEFAULT_DEPTH if depth is None else depth, 1)))
        shown = "\n".join([f"{target.path}/ ({len(names):,} files)", *entries[start : start + PAGE_SIZE]])
        text = "\n".join([shown, *describe_page(len(entries), start, PAGE_SIZE)])
        return ToolResult(text, TreeResult(tree=shown, files=len(names), entries=len(entries)))


def build_tree(names: list[str]) -> FolderTree:
    """Convert relative paths to a tree."""
    root: FolderTree = {}
    for name in names:
        *folders, file = name.split("/")
        here = root
        for folder in folders:
            here = here.setdefault(folder, {})
            assert here is not None
        here[file] = None
    return root


def format_tree(branch: FolderTree, depth: int, indent: str = "  ") -> Iterator[str]:
    """Yield the lines of a tree, sorted; folders at the last level show how many files they contain."""
    for name, below in sorted(branch.items()):
        if below is None:
            yield f"{indent}{disk.make_printable(name)}"
        else:
            yield f"{indent}{disk.make_printable(name)}/" + (f" ({count_files(below):,} files)" if depth == 1 else "")
            if depth > 1:
                yield from format_tree(below, depth - 1, indent + "  ")


def count_files(branch: FolderTree) -> int:
    return sum(1 if below is None else count_files(below) for below in branch.values())
