"""The files and terminals of this machine, which a program offers to another agent."""

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol, cast

from crow_core.acp.client_terminals import ClientTerminals
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    INVALID_PARAMS,
    CreateTerminalRequest,
    CreateTerminalResponse,
    DiffContent,
    PermissionOption,
    ReadTextFileRequest,
    ReadTextFileResponse,
    RequestPermissionRequest,
    ToolCallFields,
    ToolCallLocation,
    WriteTextFileRequest,
)
from msgspec import UNSET

REFUSED = -32000
"""The JSON-RPC error code for what the program does not allow, or what the disk refuses."""
OPTIONS = (
    PermissionOption(option_id="allow", name="Allow", kind="allow_once"),
    PermissionOption(option_id="reject", name="Reject", kind="reject_once"),
)


class FolderOwner(Protocol):
    """A session whose agent may work in its folder."""

    id: str
    cwd: str
    allowed: list[ToolCallFields]
    """The tool calls of the running turn that were allowed, and that no write or command has followed yet."""


class LocalWorkspace:
    """Answers an agent's requests for files, in the folders of its sessions, and for terminals.

    `ask` decides about each write and each command, unless the agent has just asked about it itself; it returns why one
    is not allowed, or "".
    """

    def __init__(
        self,
        find_session: Callable[[str], FolderOwner | None],
        ask: Callable[[RequestPermissionRequest], Awaitable[str]],
        env: Mapping[str, str],
    ) -> None:
        self.terminals = ClientTerminals({**os.environ, **env})
        self._find_session = find_session
        self._ask = ask
        self._ids = count(1)

    def list_handlers(self, *, may_change: bool) -> dict[str, Callable[[Any], Any]]:
        """List the functions that answer the agent, by method: all of them, or that for reading alone."""
        if not may_change:
            return {"fs/read_text_file": self.read}
        return {
            "fs/read_text_file": self.read,
            "fs/write_text_file": self.write,
            "terminal/create": self.create_terminal,
            "terminal/output": self.terminals.output,
            "terminal/wait_for_exit": self.terminals.wait_for_exit,
            "terminal/kill": self.terminals.kill,
            "terminal/release": self.terminals.release,
        }

    async def read(self, request: ReadTextFileRequest) -> ReadTextFileResponse:
        """Read a file below the session's folder, or some of its lines. Raises RpcError."""
        session = self.get_session(request.session_id)
        text, _ = await asyncio.to_thread(read_text, request.path, session.cwd)
        if text is None:
            raise RpcError(REFUSED, "Not found", details=f"{request.path} does not exist.")
        if request.line or request.limit:
            lines, start = text.splitlines(keepends=True), max((request.line or 1) - 1, 0)
            text = "".join(lines[start : start + request.limit if request.limit else None])
        return ReadTextFileResponse(content=text)

    async def write(self, request: WriteTextFileRequest) -> None:
        """Write a file below the session's folder. Raises RpcError."""
        session, path = self.get_session(request.session_id), request.path
        old, stamp = await asyncio.to_thread(read_text, path, session.cwd)
        name = Path(path).relative_to(session.cwd).as_posix() if path.startswith(session.cwd + os.sep) else path
        await self.allow(
            session,
            {path, name},
            ToolCallFields(
                tool_call_id=f"write-{next(self._ids)}",
                title=f"Write {name}",
                kind="edit",
                locations=[ToolCallLocation(path=path)],
                content=[DiffContent(path=path, old_text=old, new_text=request.content)],
            ),
        )
        await asyncio.to_thread(write_text, path, session.cwd, request.content, stamp)

    async def create_terminal(self, request: CreateTerminalRequest) -> CreateTerminalResponse:
        """Run a command. Raises RpcError."""
        session = self.get_session(request.session_id)
        folder = request.cwd or session.cwd
        if not os.path.isabs(folder):
            raise RpcError(INVALID_PARAMS, "Invalid params", details=f"cwd must be an absolute path, not {folder!r}.")
        request.cwd = folder
        line = shlex.join([request.command, *request.args]) if request.args else request.command
        await self.allow(
            session,
            {line, request.command, *request.args[-1:]},
            ToolCallFields(
                tool_call_id=f"command-{next(self._ids)}",
                title=line,
                kind="execute",
                raw_input={"command": line, "cwd": folder},
            ),
        )
        if not request.args and any(mark in request.command for mark in " |&;<>()$`\n"):
            request.command, request.args = (
                "/bin/sh",
                ["-c", request.command],
            )  # a line for a shell, as some agents send
        return await self.terminals.create(request)

    def get_session(self, id: str) -> FolderOwner:
        """Return an open session. Raises RpcError."""
        if session := self._find_session(id):
            return session
        raise RpcError(INVALID_PARAMS, "Invalid params", details=f"There is no session {id!r}.")

    async def allow(self, session: FolderOwner, names: set[str], tool_call: ToolCallFields) -> None:
        """Return if the program allows a write or a command; `names` are the texts that stand for it in a question of
        the agent. Raises RpcError."""
        for allowed in session.allowed:
            if names & {*find_texts(allowed)}:
                session.allowed.remove(allowed)
                return
        question = RequestPermissionRequest(session_id=session.id, tool_call=tool_call, options=[*OPTIONS])
        if reason := await self._ask(question):
            raise RpcError(REFUSED, "Not allowed", details=f"{tool_call.title}: {reason}")


def find_texts(tool_call: ToolCallFields) -> Iterator[str]:
    """Iterate over the paths and the arguments of a tool call."""
    for part in tool_call.content or ():
        if isinstance(part, DiffContent):
            yield part.path
    for location in tool_call.locations or ():
        yield location.path
    yield from find_strings(None if tool_call.raw_input is UNSET else tool_call.raw_input)


def find_strings(value: Any) -> Iterator[str]:
    """Iterate over the strings in a JSON value; a list of strings is also a command line."""
    match value:
        case str():
            yield value
        case dict():
            for inner in cast("dict[str, Any]", value).values():
                yield from find_strings(inner)
        case list():
            items = cast("list[Any]", value)
            if all(isinstance(item, str) for item in items):
                yield shlex.join(items)
            for inner in items:
                yield from find_strings(inner)
        case _:
            pass


def read_text(path: str, folder: str) -> tuple[str | None, tuple[int, ...] | None]:
    """Read a file below a folder: its text, None if there is no file, and the stamp for `write_text`.

    Raises RpcError.
    """
    from crow_mcp_server.files.disk import read_file  # imports parts of FastMCP
    from crow_mcp_server.refusal import ToolRefusal

    try:
        found = read_file(resolve(path, folder))
        return (found.data.decode(), found.stamp) if found else (None, None)
    except (ToolRefusal, OSError, UnicodeDecodeError) as error:
        raise to_refusal(path, error) from error


def write_text(path: str, folder: str, text: str, stamp: Sequence[int] | None) -> None:
    """Write a file below a folder in one step, unless it has changed since. Raises RpcError."""
    from crow_mcp_server.files.disk import write_file
    from crow_mcp_server.refusal import ToolRefusal

    try:
        write_file(resolve(path, folder), text.encode(), None if stamp is None else tuple(stamp))
    except (ToolRefusal, OSError, UnicodeEncodeError) as error:
        raise to_refusal(path, error) from error


def resolve(path: str, folder: str) -> Any:
    """Find a file below a folder. Raises ToolRefusal, and RpcError for a path that is not absolute."""
    from crow_mcp_server.files.disk import resolve_path
    from crow_mcp_server.workspace import Workspace

    if not os.path.isabs(path):
        raise RpcError(INVALID_PARAMS, "Invalid params", details=f"path must be absolute, not {path!r}.")
    return resolve_path(path, Workspace(session="", cwd=folder, roots=(folder,)))


def to_refusal(path: str, error: Exception) -> RpcError:
    """Convert an error of the disk to an answer for the agent."""
    if isinstance(error, UnicodeError):
        return RpcError(REFUSED, "Not a text file", details=f"{path} is not UTF-8 text.")
    reason = getattr(error, "strerror", None)
    return RpcError(REFUSED, "ServerRefusal", details=f"{path}: {reason}." if reason else str(error))
