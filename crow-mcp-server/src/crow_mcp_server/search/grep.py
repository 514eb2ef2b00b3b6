"""The tool `grep`: find lines in files by a regular expression."""

import os
import re
from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import groupby
from typing import Annotated, Literal, NotRequired

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from pydantic import TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.search.ripgrep import STDIN_NAME, format_path, list_files, run_ripgrep, to_relative_glob
from crow_mcp_server.tool_options import READ_ONLY, ToolOptions, optional_field

DESCRIPTION = """\
Search files by a regular expression (ripgrep), without those that .gitignore ignores. \
Prefer it to grep and find in the terminal."""
PAGE_SIZE = 200  # lines, or files
MAX_PAGE_CHARACTERS = 30_000
MAX_LINE_BYTES = 400  # longer lines are cut
MAX_CONTEXT_LINES = 20  # before and after a match
GrepMode = Literal["lines", "files", "count"]
MODE_OPTIONS = {"lines": "--line-number", "files": "--files-with-matches", "count": "--count"}
FORMAT_OPTIONS = (
    "--with-filename",
    "--no-heading",
    "--crlf",
    f"--max-columns={MAX_LINE_BYTES}",
    "--max-columns-preview",
)
BEFORE_PATH = re.compile(rb"\A(?:--\n|.*: (?:WARNING: stopped searching binary|binary file matches) .*\n)+")
"""Lines that rg prints before a path: separators of groups, and messages about binary files."""
NUMBERED_LINE = re.compile(rb"(\d+)([:-]?)(.*)", re.DOTALL)


class GrepHit(TypedDict):
    path: str
    """Relative to the working folder if it is inside of it, else absolute."""
    line: NotRequired[int]
    text: NotRequired[str]
    near: NotRequired[bool]
    """Present and true for a line of context, which does not match."""
    count: NotRequired[int]
    """The number of lines that match."""


class GrepResult(TypedDict):
    hits: list[GrepHit]
    more: bool
    """True if there is another page."""


def register(server: FastMCP, options: ToolOptions) -> None:
    """Add the tool to a server."""

    @server.tool(
        description=DESCRIPTION,
        annotations=READ_ONLY,
        meta={"crow/kind": "search"},
        output_schema=TypeAdapter(GrepResult).json_schema(),
    )
    async def grep(
        mcp_context: Context,
        pattern: str,
        path: Annotated[str | SkipJsonSchema[None], optional_field("file or folder")],
        glob: Annotated[str | SkipJsonSchema[None], optional_field("only such files: *.{ts,tsx}")],
        type: Annotated[str | SkipJsonSchema[None], optional_field("only a language: py, js, rust")],
        mode: Annotated[GrepMode | SkipJsonSchema[None], optional_field()],
        ignore_case: Annotated[bool | SkipJsonSchema[None], optional_field()],
        context: Annotated[int | SkipJsonSchema[None], optional_field("lines around each match")],
        offset: Annotated[int | SkipJsonSchema[None], optional_field("results to skip")],
    ) -> ToolResult:
        workspace, start = await options.find_workspace(mcp_context), max(offset or 0, 0)
        target = await to_thread.run_sync(disk.resolve_path, path or workspace.cwd, workspace)
        only = to_relative_glob(glob or "", target)
        wanted = set(await list_files(target, only)) if only else None
        arguments = [MODE_OPTIONS[mode or "lines"], f"--context={min(max(context or 0, 0), MAX_CONTEXT_LINES)}"]
        arguments += [f"--type={type}"] if type else []
        arguments += ["--ignore-case"] if ignore_case else []
        arguments += ["--multiline"] if "\n" in pattern or r"\n" in pattern else []
        page, count, size, more = list[GrepHit](), 0, 0, False
        async with (
            run_ripgrep(target, *FORMAT_OPTIONS, *arguments, f"--regexp={pattern}", only=only) as output,
            aclosing(read_hits(output, names_only=mode == "files")) as hits,
        ):
            async for hit in hits:
                if wanted is not None and hit["path"] not in wanted:
                    continue
                count += 1
                if count <= start:
                    continue
                if more := len(page) == PAGE_SIZE or size > MAX_PAGE_CHARACTERS:
                    break
                hit["path"] = format_path(target, workspace, "" if hit["path"] == STDIN_NAME else hit["path"])
                page.append(hit)
                size += len(hit["path"]) + len(hit.get("text", ""))
        nothing = f"Nothing matches in {target.path} (binary and ignored files are not searched)."
        text = "\n".join(format_hits(page)) or (f"[{count} results in all]" if count else nothing)
        text += f"\n[{len(page)} results; offset {start + len(page)} shows more]" if more else ""
        return ToolResult(text, GrepResult(hits=page, more=more))


async def read_hits(output: StreamReader, *, names_only: bool) -> AsyncGenerator[GrepHit]:
    """Parse rg's output while it comes. Paths are relative to the folder that is searched."""
    while True:
        try:
            head = await output.readuntil(b"\0")
        except IncompleteReadError:
            return
        hit = GrepHit(path=os.fsdecode(BEFORE_PATH.sub(b"", head[:-1]).removeprefix(b"./")))
        if not names_only and (line := NUMBERED_LINE.match(await output.readline())):
            number, mark, text = int(line[1]), line[2], line[3].rstrip(b"\r\n").decode(errors="replace")
            if not mark:
                hit["count"] = number
            else:
                hit["line"], hit["text"] = number, text
                if mark == b"-":
                    hit["near"] = True
        yield hit


def format_hits(hits: list[GrepHit]) -> Iterator[str]:
    """Yield the lines of the text for the model: each file's path, then its hits, as rg prints them on a terminal."""
    for path, group in groupby(hits, key=lambda hit: hit["path"]):
        last = 0
        for hit in group:
            if "line" not in hit or "text" not in hit:
                yield f"{path}: {hit['count']}" if "count" in hit else path
                continue
            if not last:
                yield path
            last = hit["line"]
            yield f"{last}{'-' if 'near' in hit else ':'}{hit['text']}"
