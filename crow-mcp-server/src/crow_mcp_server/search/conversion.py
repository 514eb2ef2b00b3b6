"""Copies in UTF-8 of the files whose encoding ripgrep does not recognize, for a search in them."""

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from anyio import to_thread

from crow_mcp_server.files import disk
from crow_mcp_server.files.disk import ResolvedPath
from crow_mcp_server.files.document import decode
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.search.ripgrep import STDIN_NAME, read_names, run_ripgrep

INVALID_UTF8 = (
    r"(?-u)[\xC0\xC1\xF5-\xFF]|(?:^|[\x00-\x7F])[\x80-\xBF]"
    r"|[\xC2-\xF4](?:[^\x80-\xBF]|$)|[\xE0-\xF4][\x80-\xBF](?:[^\x80-\xBF]|$)|[\xF0-\xF4][\x80-\xBF]{2}(?:[^\x80-\xBF]|$)"
    r"|[\xC2-\xDF][\x80-\xBF]{2}|[\xE0-\xEF][\x80-\xBF]{3}"
)
"""A regular expression for a line that is not UTF-8."""
COPY_NAME = ".crow-searched-file"
"""The name of the copy if the target is one file. It cannot be STDIN_NAME, as Windows allows no `<` in a name."""
READ_BY_RIPGREP = {"utf-8", "utf-16-le", "utf-16-be"}
MAX_COPIES = 500
MAX_COPIED_CHARACTERS = 32 * 1024 * 1024  # of all copies


@dataclass(frozen=True)
class ConvertedCopies:
    """A folder with the copies, and the paths of the originals, which are those of the copies in that folder."""

    folder: ResolvedPath
    names: frozenset[str]


@asynccontextmanager
async def convert_files(target: ResolvedPath, *options: str, only: str = "") -> AsyncGenerator[ConvertedCopies | None]:
    """Context manager: copy the text files below a target, or the target, whose encoding rg does not recognize.

    The value is None if there is none. The options of rg and the glob `only` limit which files are copied.
    """
    async with run_ripgrep(
        target, "--files-with-matches", "--encoding=none", *options, f"--regexp={INVALID_UTF8}", only=only
    ) as output:
        names = await read_names(output)
    if not names:
        yield None
        return
    with TemporaryDirectory(prefix="crow-grep-") as folder:
        yield await to_thread.run_sync(_copy_files, target, names, Path(folder))


def _copy_files(target: ResolvedPath, names: Sequence[str], folder: Path) -> ConvertedCopies | None:
    """Copy the files that are text in another encoding."""
    copied, size = list[str](), 0
    for name in names:
        file = target if name == STDIN_NAME else ResolvedPath(os.path.join(target.path, name), target.root, "")
        try:
            content = disk.read_file(file)
        except (OSError, ToolRefusal):  # it has changed since, or is very large
            continue
        document = content and decode(content.data)
        if not document or document.encoding in READ_BY_RIPGREP:
            continue
        size += len(document.text)
        if len(copied) == MAX_COPIES or size > MAX_COPIED_CHARACTERS:
            break
        copy = folder / (COPY_NAME if name == STDIN_NAME else name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(document.text.encode(errors="replace"))
        copied.append(name)
    path = os.path.realpath(folder)
    return ConvertedCopies(ResolvedPath(path, path, path), frozenset(copied)) if copied else None
