"""ripgrep: the program that the search tools are made of, bound to a target and read no further than wanted."""

import asyncio
import os
import shutil
import signal
import sysconfig
from asyncio import StreamReader, subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import cache

from anyio import CancelScope, to_thread

from crow_mcp_server.files import disk
from crow_mcp_server.files.disk import ResolvedPath
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.workspace import Workspace

SEARCH_TIMEOUT = 60.0  # seconds for one search
DESCRIPTOR_PATH = "/proc/self/fd/{}" if os.path.isdir("/proc/self/fd") else ""
STDIN_NAME = "<stdin>"
"""What rg calls a file that is searched alone."""
COMMON_OPTIONS = (
    *("--no-config", "--no-messages", "--color=never", "--null", "--sort=path"),
    *("--hidden", "--no-require-git", "--glob=!.git"),  # .github matters, .git does not
)


@cache
def find_program() -> str:
    """Where rg is: beside our Python, as its package puts it there, else on the PATH. Raises Refusal."""
    beside = os.path.join(sysconfig.get_path("scripts"), "rg")
    if found := shutil.which(beside) or shutil.which("rg"):
        return found
    raise ToolRefusal("ripgrep is not installed, so nothing was searched. Use find and grep in the terminal.")


@asynccontextmanager
async def run_ripgrep(target: ResolvedPath, *options: str, only: str = "") -> AsyncGenerator[StreamReader]:
    """What rg prints about a file, which it calls `<stdin>`, or a folder, whose files it calls `./…`.

    `only` is a glob of files wanted. Leaving the block ends rg, wherever it is. Raises Refusal with what it complains
    of, or when it takes too long.
    """
    rules = _open_rules(only)
    try:
        is_file, opened = await to_thread.run_sync(_open, target)
    except BaseException:
        os.close(rules)
        raise
    with CancelScope(shield=True) as scope:  # while it starts and ends: else nobody would wait for its end
        try:
            process = await subprocess.create_subprocess_exec(
                *(
                    find_program(),
                    *COMMON_OPTIONS,
                    f"--ignore-file=/dev/fd/{rules}",
                    *options,
                    "-" if is_file else "./",
                ),
                # Through the descriptor: no link can be swapped in before rg is there.
                cwd=None if is_file else DESCRIPTOR_PATH.format(opened) if DESCRIPTOR_PATH else target.path,
                stdin=opened if is_file else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(rules,),
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ToolRefusal(
                f"ripgrep cannot search for that: {why}. Nothing was searched. Give something shorter and plainer."
            ) from None
        finally:
            os.close(opened)
            os.close(rules)
        assert process.stdout
        assert process.stderr
        scope.shield = False
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT):
                yield process.stdout
                if process.stdout.at_eof() and (complaint := await process.stderr.read()):
                    text = complaint.decode(errors="replace").removeprefix("rg: ").strip()
                    raise ToolRefusal(
                        f"{text}\nNothing was searched. Correct that; a backslash makes a character literal."
                    )
        except TimeoutError:
            raise ToolRefusal(
                f"The search took more than {SEARCH_TIMEOUT:g} s. Search a folder further down."
            ) from None
        finally:
            scope.shield = True
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # process.kill() would look for its end, and take it away
            await process.communicate()  # wait() alone would wait for ever on a pipe that is full


async def list_files(target: ResolvedPath, glob: str = "") -> list[str]:
    """The files below a folder that are not ignored and match a glob, relative to it, sorted.

    Raises Refusal when it is no folder.
    """
    if not glob:
        return await _list_names(target)
    # What .gitignore takes in again with `!` passes the first, what it ignores the second.
    kept, named = await asyncio.gather(_list_names(target, only=glob), _list_names(target, f"--glob={glob}"))
    wanted = set(named)
    return [name for name in kept if name in wanted]


async def _list_names(target: ResolvedPath, *options: str, only: str = "") -> list[str]:
    async with run_ripgrep(target, "--files", *options, only=only) as output:
        printed = await output.read()
    if printed == f"{STDIN_NAME}\0".encode():
        raise ToolRefusal(f"{target.path} is a file. Give the path of a folder.")
    return [os.fsdecode(name.removeprefix(b"./")) for name in printed.split(b"\0")[:-1]]


def format_path(target: ResolvedPath, workspace: Workspace, name: str = "") -> str:
    """How a file below a target is told: relative to the working folder where it lies in that, else absolute."""
    path, cwd = os.path.join(target.as_given, name) if name else target.as_given, workspace.cwd.rstrip(os.sep) + os.sep
    return disk.make_printable(path.removeprefix(cwd) or ".")


def to_relative_glob(glob: str, target: ResolvedPath) -> str:
    """A glob as rg wants it: from the folder that is searched."""
    return glob.removeprefix(target.as_given.rstrip("/") + "/").removeprefix("./")


def describe_page(count: int, offset: int, limit: int) -> list[str]:
    """What is said below one page of many."""
    if offset and offset >= count:
        return [f"[there are {count:,} in all; offset {offset} is beyond them]"]
    if offset + limit >= count:
        return []
    return [f"[{offset + 1}-{offset + limit} of {count:,}; offset {offset + limit} shows more]"]


def _open_rules(only: str) -> int:
    """A descriptor with rules as in .gitignore: unlike --glob, they bring nothing back that another one ignores."""
    rules = only[1:] if only.startswith("!") else f"*\n!*/\n!{only}" if only else ""
    read, write = os.pipe()
    with open(write, "wb") as file:
        file.write(rules.encode(errors="replace")[:4_000])
    return read


def _open(target: ResolvedPath) -> tuple[bool, int]:
    try:
        return True, disk.open_file(target)
    except IsADirectoryError:
        return False, disk.open_folder(target)
    except FileNotFoundError:
        raise ToolRefusal(f"{target.path} does not exist. Look at the folder above it for the right name.") from None
