"""The tool `grep`: find lines in files by a regular expression."""

import os
import re
from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncGenerator, Container, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Literal, NotRequired

from anyio import to_thread
from fastmcp import Context, FastMCP
from fastmcp.tools.base import ToolResult
from pydantic import TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from crow_mcp_server.files import disk
from crow_mcp_server.files.disk import ResolvedPath
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.search.conversion import COPY_NAME, convert_files
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
BEFORE_PATH = re.compile(rb"\A(?:--\r?\n|.*: (?:WARNING: stopped searching binary|binary file matches) .*\n)+")
"""Lines that rg prints before a path: separators of groups, and messages about binary files."""
SHOWN_BEFORE, SHOWN_BEHIND = 120, 200  # characters of a long line around its first match
CUT = re.compile(r" ?\[\.\.\. (omitted end of long line|\d+ more match(es)?)\]$")
"""The note that rg puts at the end of a line that it has cut."""
PART = re.compile(r"(\d+):(.*)", re.DOTALL)
"""A part of a line, and the number of its first byte."""
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]|(?<!\\)(\\\\)*(\.|\[\^|\\[pPuUxwWSD])")
"""A part of a pattern that may match characters beyond ASCII, which other encodings write differently."""
NEWLINE = re.compile(r"\n|\\n")
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
        how = (*(["--ignore-case"] if ignore_case else []), *(["--multiline"] if NEWLINE.search(pattern) else []))
        shown = MODE_OPTIONS[mode or "lines"], f"--context={min(max(context or 0, 0), MAX_CONTEXT_LINES)}"
        place = SearchPlace(target, (f"--type={type}",) if type else (), only)
        search, page, count, more = Search(pattern, how, (place,)), list[GrepHit](), 0, False
        if not (has_others := BEYOND_ASCII.search(pattern) is not None):
            page, count, more = await read_page(search, shown, wanted, start)
            has_others = any("\ufffd" in hit.get("text", "") for hit in page)
        async with convert_files(target, *place.options, only=only) if has_others else nullcontext() as copies:
            if copies:
                search = replace(search, places=(replace(place, skipped=copies.names), SearchPlace(copies.folder)))
            if has_others:
                page, count, more = await read_page(search, shown, wanted, start)
            await search.show_far_matches(page)
        for hit in page:
            hit["path"] = format_path(target, workspace, "" if hit["path"] in (STDIN_NAME, COPY_NAME) else hit["path"])
        nothing = f"Nothing matches in {target.path} (binary and ignored files are not searched)."
        text = "\n".join(format_hits(page)) or (f"[{count} results in all]" if count else nothing)
        text += f"\n[{len(page)} results; offset {start + len(page)} shows more]" if more else ""
        return ToolResult(text, GrepResult(hits=page, more=more))


async def read_page(
    search: "Search", shown: Sequence[str], wanted: Container[str] | None, start: int
) -> tuple[list[GrepHit], int, bool]:
    """Return the hits from number `start` on, how many were read, and whether there are more.

    `shown` are rg's options for its output. Hits in files that are not `wanted` do not count.
    """
    page, count, size, more = list[GrepHit](), 0, 0, False
    async with aclosing(search.find_hits(*shown)) as hits:
        async for hit in hits:
            if wanted is not None and hit["path"] not in wanted:
                continue
            count += 1
            if count <= start:
                continue
            if more := len(page) == PAGE_SIZE or size > MAX_PAGE_CHARACTERS:
                break
            page.append(hit)
            size += len(hit["path"]) + len(hit.get("text", ""))
    return page, count, more


@dataclass(frozen=True)
class Search:
    """A search for a pattern below a folder or in a file, and in the copies of the files in other encodings."""

    pattern: str
    options: tuple[str, ...]
    """Options of rg that say how the pattern matches."""
    places: tuple["SearchPlace", ...]
    """The target and, if there are any, the copies."""

    async def find_hits(self, *shown: str) -> AsyncGenerator[GrepHit]:
        """Yield the hits, sorted by path. `shown` are rg's options for its output."""
        async with AsyncExitStack() as stack:
            runs = [await stack.enter_async_context(self._run(place, self.pattern, *shown)) for place in self.places]
            heads = [(hit, run) for run in runs if (hit := await anext(run, None))]
            while heads:
                first = min(heads, key=lambda head: _to_sort_key(head[0]))
                heads.remove(first)
                yield first[0]
                if following := await anext(first[1], None):
                    heads.append((following, first[1]))

    async def show_far_matches(self, hits: list[GrepHit]) -> None:
        """Replace the beginnings of long lines by the parts with their first matches."""
        cut = {
            (hit["path"], hit["line"]): hit
            for hit in hits
            if "line" in hit and "near" not in hit and CUT.search(hit.get("text", ""))
        }
        pattern = f".{{0,{SHOWN_BEFORE}}}(?:{self.pattern}).{{0,{SHOWN_BEHIND}}}"
        for place in self.places if cut else ():
            with suppress(ToolRefusal):  # the pattern cannot be a part of another one
                async with self._run(place, pattern, "--only-matching", "--line-number", "--column") as parts:
                    async for part in parts:
                        hit = cut.pop((part["path"], part.get("line", 0)), None)
                        if hit and (found := PART.fullmatch(part.get("text", ""))) and found[1] != "1":
                            hit["text"] = f"[…] {CUT.sub('', found[2])} […]"
                        if not cut:
                            break

    @asynccontextmanager
    async def _run(self, place: "SearchPlace", pattern: str, *shown: str) -> AsyncGenerator[AsyncGenerator[GrepHit]]:
        """Context manager: run rg; the value yields its hits."""
        options = (*FORMAT_OPTIONS, *self.options, *place.options, *shown, f"--regexp={pattern}")
        async with (
            run_ripgrep(place.target, *options, only=place.only) as output,
            aclosing(read_hits(output, place.skipped, names_only="--files-with-matches" in shown)) as hits,
        ):
            yield hits


@dataclass(frozen=True)
class SearchPlace:
    """A folder or file to search."""

    target: ResolvedPath
    options: tuple[str, ...] = ()
    """Options of rg that limit which files are searched."""
    only: str = ""
    """A glob that does the same."""
    skipped: frozenset[str] = frozenset()
    """Files that are not searched."""


def _to_sort_key(hit: GrepHit) -> list[bytes]:
    """Return the key by which rg sorts paths."""
    return os.fsencode(hit["path"]).split(b"/")


async def read_hits(output: StreamReader, skipped: frozenset[str], *, names_only: bool) -> AsyncGenerator[GrepHit]:
    """Parse rg's output while it comes, without the files that are skipped.

    Paths are relative to the folder that is searched.
    """
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
        if hit["path"] not in skipped:
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
