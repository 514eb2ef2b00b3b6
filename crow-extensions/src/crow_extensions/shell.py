"""Run a command of the user's configuration."""

import asyncio
import os
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import IO

import crow_system as system
from crow_core.mcp.limit import Limit

OUTPUT_LIMIT = 4_000
"""Bytes of the end of a command's output that are returned."""


@asynccontextmanager
async def start_command(
    command: str | list[str],
    cwd: str,
    output: int | IO[bytes],
    errors: int | IO[bytes] = STDOUT,
    *,
    stdin: int = DEVNULL,
    hidden: Collection[str] = (),
    more: Mapping[str, str] | None = None,
    limit: Limit | None = None,
) -> AsyncGenerator[Process]:
    """Start a shell command, or a program with its arguments; it is killed with its children at the end of the block.

    It does not inherit the environment variables that `hidden` names; `more` are set in addition to the others. `limit`
    starts it in a sandbox. Raises OSError.
    """
    line = system.make_shell_command(command) if isinstance(command, str) else command
    arguments = [*map(os.path.expanduser, line)]
    env = {**{name: value for name, value in os.environ.items() if name not in hidden}, **(more or {})}
    limited = nullcontext((arguments, env)) if limit is None else limit(arguments, env, cwd)
    async with limited as (arguments, env):
        process = await asyncio.create_subprocess_exec(
            *arguments,
            cwd=cwd,
            env=env,
            stdin=stdin,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            creationflags=system.NEW_GROUP,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                system.kill_group(process.pid)
                await process.communicate()  # asyncio notices the end only when the output has been read to its end


async def run_command(
    command: str | list[str],
    cwd: str,
    timeout: float,
    stdin: bytes = b"",
    *,
    with_stdout: bool = False,
    hidden: Collection[str] = (),
    more: Mapping[str, str] | None = None,
    limit: Limit | None = None,
) -> tuple[int, str]:
    """Run a command for at most `timeout` seconds; the other arguments are those of `start_command`.

    Returns the exit code and the end of the standard error, together with the standard output if that is wanted.
    Raises OSError; TimeoutError with the end of the output so far.
    """
    with tempfile.TemporaryFile() as output:  # not a pipe, which a process left in the background could hold open
        stdout, in_time = output if with_stdout else DEVNULL, True
        async with start_command(
            command, cwd, stdout, output, stdin=PIPE, hidden=hidden, more=more, limit=limit
        ) as process:
            try:
                async with asyncio.timeout(timeout):
                    await process.communicate(stdin)
            except TimeoutError:
                in_time = False
        output.seek(max(output.seek(0, os.SEEK_END) - OUTPUT_LIMIT, 0))
        said = output.read().decode(errors="replace").strip()
        if not in_time:
            raise TimeoutError(said)
        assert process.returncode is not None
        return process.returncode, said
