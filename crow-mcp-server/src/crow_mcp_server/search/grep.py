"""The tool `grep`: finds lines in files."""

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
from crow_mcp_server.search.ripgrep import STDIN, list_files, relative, ripgrep, shown_as
from crow_mcp_server.tool_options import READS, Host, optional

DESCRIPTION = """\
Search files by a regular expression (ripgrep; (?i) ignores case), without those that .gitignore ignores. \
Prefer it to grep and find in the terminal."""
PAGE = 200  # lines, or files
MAX_CHARACTERS = 30_000  # of a page
MAX_LINE = 400  # bytes of a line shown
MAX_CONTEXT = 20  # lines
Mode = Literal["lines", "files", "count"]
PRINTED = {"lines": "--line-number", "files": "--files-with-matches", "count": "--count"}
FORMAT = ("--with-filename", "--no-heading", "--crlf", f"--max-columns={MAX_LINE}", "--max-columns-preview")
NAMELESS = re.compile(rb"\A(?:--\n|.*: (?:WARNING: stopped searching binary|binary file matches) .*\n)+")
"""What rg prints between groups of lines, and of a file that turns out to be no text."""
NUMBERED = re.compile(rb"(\d+)([:-]?)(.*)", re.DOTALL)


class Hit(TypedDict):
    path: str
    """Relative to the working folder where it lies in that, else absolute."""
    line: NotRequired[int]
    text: NotRequired[str]
    near: NotRequired[bool]
    """The line does not match, and is shown as context."""
    count: NotRequired[int]
    """Lines that match."""


class Hits(TypedDict):
    hits: list[Hit]
    more: bool
    """Whether there is another page."""


def add(server: FastMCP, host: Host) -> None:
    """Add the tool to a server."""

    @server.tool(
        description=DESCRIPTION,
        annotations=READS,
        meta={"crow/kind": "search"},
        output_schema=TypeAdapter(Hits).json_schema(),
    )
    async def grep(
        call: Context,
        pattern: str,
        path: Annotated[str | SkipJsonSchema[None], optional("file or folder")],
        glob: Annotated[str | SkipJsonSchema[None], optional("only such files: *.{ts,tsx}")],
        type: Annotated[str | SkipJsonSchema[None], optional("only a language: py, js, rust")],
        mode: Annotated[Mode | SkipJsonSchema[None], optional()],
        context: Annotated[int | SkipJsonSchema[None], optional("lines around each match")],
        offset: Annotated[int | SkipJsonSchema[None], optional("results to skip")],
    ) -> ToolResult:
        workspace, start = await host.workspace(call), max(offset or 0, 0)
        place = await to_thread.run_sync(disk.locate, path or workspace.cwd, workspace)
        only = relative(glob or "", place)
        wanted = set(await list_files(place, only)) if only else None
        arguments = [PRINTED[mode or "lines"], f"--context={min(max(context or 0, 0), MAX_CONTEXT)}"]
        arguments += [f"--type={type}"] if type else []
        arguments += ["--multiline"] if "\n" in pattern or r"\n" in pattern else []
        found, passed, size, more = list[Hit](), 0, 0, False
        async with (
            ripgrep(place, *FORMAT, *arguments, f"--regexp={pattern}", only=only) as output,
            aclosing(hits_in(output, names_only=mode == "files")) as hits,
        ):
            async for hit in hits:
                if wanted is not None and hit["path"] not in wanted:
                    continue
                passed += 1
                if passed <= start:
                    continue
                if more := len(found) == PAGE or size > MAX_CHARACTERS:
                    break
                hit["path"] = shown_as(place, workspace, "" if hit["path"] == STDIN else hit["path"])
                found.append(hit)
                size += len(hit["path"]) + len(hit.get("text", ""))
        nothing = f"Nothing matches in {place.path} (binary and ignored files are not searched)."
        said = "\n".join(told(found)) or (f"[{passed} results in all]" if passed else nothing)
        said += f"\n[{len(found)} results; offset {start + len(found)} shows more]" if more else ""
        return ToolResult(said, Hits(hits=found, more=more))


async def hits_in(output: StreamReader, *, names_only: bool) -> AsyncGenerator[Hit]:
    """What rg prints, as it prints it; paths relative to the folder that is searched."""
    while True:
        try:
            head = await output.readuntil(b"\0")
        except IncompleteReadError:
            return
        hit = Hit(path=os.fsdecode(NAMELESS.sub(b"", head[:-1]).removeprefix(b"./")))
        if not names_only and (line := NUMBERED.match(await output.readline())):
            number, mark, text = int(line[1]), line[2], line[3].rstrip(b"\r\n").decode(errors="replace")
            if not mark:
                hit["count"] = number
            else:
                hit["line"], hit["text"] = number, text
                if mark == b"-":
                    hit["near"] = True
        yield hit


def told(hits: list[Hit]) -> Iterator[str]:
    """What the model reads: lines below the name of their file, as rg shows them to people."""
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
