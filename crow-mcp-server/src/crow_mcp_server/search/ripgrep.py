"""Run the program ripgrep (rg), on which the search tools are built."""

import asyncio
import os
import shutil
import subprocess
import sysconfig
from asyncio import StreamReader
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Event, Thread
from typing import IO

import crow_system as system
from anyio import to_thread

from crow_mcp_server.files import disk
from crow_mcp_server.files.disk import ResolvedPath
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.workspace import Workspace

SEARCH_TIMEOUT = 60.0  # seconds for one search
KILL_TIMEOUT = 0.2  # seconds in which rg, once killed, is expected to end; usually one thousandth
CHUNK_BYTES = 65_536
MAX_COMPLAINT_BYTES = 8_000  # of rg's error messages
STDIN_NAME = "<stdin>"
"""The name that rg prints for its standard input, which is how a single file is searched."""
COMMON_OPTIONS = (
    *("--no-config", "--no-messages", "--color=never", "--null", "--sort=path", "--path-separator=/"),
    *("--hidden", "--no-require-git", "--glob=!.git"),  # searches .github but not .git
)


@cache
def find_program() -> str:
    """Return the path of rg, next to this Python or else on the PATH. Raises ToolRefusal when there is none."""
    if found := shutil.which("rg", path=sysconfig.get_path("scripts")) or shutil.which("rg"):
        return found
    raise ToolRefusal("ripgrep is not installed, so nothing was searched. Use find and grep in the terminal.")


@asynccontextmanager
async def run_ripgrep(target: ResolvedPath, *options: str, only: str = "") -> AsyncGenerator[StreamReader]:
    """Context manager: run rg on a file, named `<stdin>` in its output, or on a folder, whose files are named `./…`.

    The value is rg's output. `only` is a glob of the files to search. Leaving the block kills rg. Raises ToolRefusal
    with rg's error message, or after SEARCH_TIMEOUT seconds.

    rg is started and ended without an await, which asyncio.subprocess needs: a second cancellation, as by the end of
    asyncio.run, would leave a process and its pipes behind.
    """
    opened = await to_thread.run_sync(_open_target, target)
    with TemporaryFile() as errors, _open_rules(only) as (rules, passed):
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - asyncio forks in the event loop, too
                [
                    find_program(),
                    *COMMON_OPTIONS,
                    f"--ignore-file={rules}",
                    *options,
                    "-" if isinstance(opened, int) else "./",
                ],
                # Through the descriptor, so that no link can replace the folder before rg starts.
                cwd=None if isinstance(opened, int) else opened.start,
                stdin=opened if isinstance(opened, int) else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=passed,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ToolRefusal(
                f"ripgrep cannot search for that: {why}. Nothing was searched. Give something shorter and plainer."
            ) from None
        finally:
            if isinstance(opened, int):
                os.close(opened)
            else:
                opened.close()
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT), _read_output(process) as output:
                yield output
                if output.at_eof() and errors.seek(0, os.SEEK_END):
                    errors.seek(0)
                    text = errors.read(MAX_COMPLAINT_BYTES).decode(errors="replace").removeprefix("rg: ").strip()
                    raise ToolRefusal(
                        f"{text}\nNothing was searched. Correct that; a backslash makes a character literal."
                    )
        except TimeoutError:
            raise ToolRefusal(
                f"The search took more than {SEARCH_TIMEOUT:g} s. Search a folder further down."
            ) from None
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; subprocess waits for it later
                process.wait(KILL_TIMEOUT)


@asynccontextmanager
async def _read_output(process: subprocess.Popen[bytes]) -> AsyncGenerator[StreamReader]:
    """Context manager: the value reads the output of a process. Leaving the block closes it."""
    reader = StreamReader()
    if not system.POLLS_PIPES:
        Thread(target=OutputReader(reader).read, args=(process.stdout,), daemon=True, name="search").start()
        yield reader
        return  # rg is killed now, which ends the thread
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    try:
        yield reader
    finally:
        transport.close()


class OutputReader(asyncio.ReadTransport):
    """Feeds a StreamReader from a thread, and waits while that has too much."""

    def __init__(self, reader: StreamReader) -> None:
        super().__init__()
        self._reader, self._loop = reader, asyncio.get_running_loop()
        self._wanted = Event()
        self._wanted.set()
        reader.set_transport(self)

    def pause_reading(self) -> None:
        self._wanted.clear()

    def resume_reading(self) -> None:
        self._wanted.set()

    def read(self, output: IO[bytes]) -> None:
        """Read a pipe to its end, and close it."""
        with output, suppress(RuntimeError):  # the event loop is closed
            while self._wanted.wait(SEARCH_TIMEOUT) and (data := os.read(output.fileno(), CHUNK_BYTES)):
                self._loop.call_soon_threadsafe(self._reader.feed_data, data)
            self._loop.call_soon_threadsafe(self._reader.feed_eof)


async def list_files(target: ResolvedPath, glob: str = "") -> list[str]:
    """Return the sorted relative paths of the files below a folder that match the glob and are not ignored.

    Raises ToolRefusal when the target is not a folder.
    """
    if not glob:
        async with run_ripgrep(target, "--files") as output:
            return await _read_file_names(target, output)
    # The first list has too many files if .gitignore includes some again with `!`; the second one has ignored files.
    # Both run at once in this one task: a task of its own would go on, or lose its shield, when the other one fails.
    async with run_ripgrep(target, "--files", only=glob) as not_ignored:
        async with run_ripgrep(target, "--files", f"--glob={glob}") as named:
            wanted = set(await _read_file_names(target, named))
        return [name for name in await _read_file_names(target, not_ignored) if name in wanted]


async def _read_file_names(target: ResolvedPath, output: StreamReader) -> list[str]:
    names = await read_names(output)
    if names == [STDIN_NAME]:
        raise ToolRefusal(f"{target.path} is a file. Give the path of a folder.")
    return names


async def read_names(output: StreamReader) -> list[str]:
    """Read the names of files that rg prints, relative to the folder that is searched."""
    return [os.fsdecode(name.removeprefix(b"./")) for name in (await output.read()).split(b"\0")[:-1]]


def format_path(target: ResolvedPath, workspace: Workspace, name: str = "") -> str:
    """Return the path of the file `name` below a target, relative to the working folder if it is inside of that.

    It has slashes on every system, as the names that rg prints.
    """
    path, cwd = os.path.join(target.as_given, name) if name else target.as_given, workspace.cwd.rstrip(os.sep) + os.sep
    return disk.make_printable((path.removeprefix(cwd) or ".").replace(os.sep, "/"))


def to_relative_glob(glob: str, target: ResolvedPath) -> str:
    """Make a glob relative to the target, as rg expects it."""
    folder = target.as_given.replace(os.sep, "/").rstrip("/")
    return glob.replace(os.sep, "/").removeprefix(f"{folder}/").removeprefix("./")


def describe_page(count: int, offset: int, limit: int) -> list[str]:
    """Return the note below a page of results, as no line or one."""
    if offset and offset >= count:
        return [f"[there are {count:,} in all; offset {offset} is beyond them]"]
    if offset + limit >= count:
        return []
    return [f"[{offset + 1}-{offset + limit} of {count:,}; offset {offset + limit} shows more]"]


@contextmanager
def _open_rules(only: str) -> Generator[tuple[str, tuple[int, ...]]]:
    """Context manager: a file with ignore rules that exclude other files than `only`.

    The value is its path and the descriptors that rg needs for it. Unlike --glob, such rules do not include files that
    .gitignore ignores.
    """
    rules = only[1:] if only.startswith("!") else f"*\n!*/\n!{only}" if only else ""
    data = rules.encode(errors="replace")[:4_000]
    if not system.HAS_DESCRIPTORS:
        with TemporaryDirectory(prefix="crow-search-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, "rules")
            with open(path, "wb") as file:
                file.write(data)
            yield path, ()
        return
    read, write = os.pipe()
    try:
        with open(write, "wb") as file:
            file.write(data)
        yield f"/dev/fd/{read}", (read,)
    finally:
        os.close(read)


def _open_target(target: ResolvedPath) -> "int | system.Folder":
    """Open a file or folder; return the descriptor of a file."""
    try:
        return disk.open_file(target)
    except IsADirectoryError:
        return disk.open_folder(target)
    except FileNotFoundError:
        near = disk.suggest_paths(target)
        hint = f"Did you mean {' or '.join(near)}?" if near else "Look at the folder above it for the right name."
        raise ToolRefusal(f"{target.path} does not exist. {hint}") from None
