"""A conversation with a new process of the agent. All its lines are kept, and general flaws are noted at once.

The agent is not trusted: it may flood, hang, exit, print anything, start children and never read. Every answer has a
timeout, everything that is kept has a limit, and at the end all processes that the agent started are killed.
"""

import asyncio
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self, cast
from uuid import uuid4

import crow_system as system
import msgspec
from crow_core.acp.schema import AUTH_REQUIRED, METHOD_NOT_FOUND
from crow_core.acp.transports import CHUNK_BYTES, ByteSource, open_source, open_streams
from crow_core.mcp.watchdog import MARK, ProcessWatchdog

from crow_acp_tools.check.validation import (
    find_call_flaw,
    find_envelope_flaw,
    find_result_flaw,
    find_unknown_keys,
    get_path,
    list_or_empty,
    to_short_json,
)
from crow_acp_tools.check.versions import VERSION_1, ProtocolVersion, answers_in_version
from crow_acp_tools.check.wire_lines import (
    MAX_LINE_BYTES,
    CheckRequest,
    Flaw,
    Message,
    WireLine,
    describe_error,
    get_stop_reason,
    is_update,
    update_kind,
)

MAX_BYTES = 16 * 1024 * 1024
"""Bytes that an agent may write in one conversation, which asks it for a few sentences."""
MAX_STDERR_BYTES = 4096
"""Bytes at the end of standard error that are kept."""
OUTPUT_GRACE = 5.0
"""Seconds to wait for the rest of the output after the process has ended."""
CAPABILITY_METHODS = {"fs": "CLIENTCAP-001", "terminal": "CLIENTCAP-002", "elicitation": "CLIENTCAP-003"}
"""The requirement that a call breaks, by the beginning of its method. This client never has these capabilities."""


@dataclass(frozen=True)
class CheckOptions:
    """The options of `crow acp check`."""

    command: tuple[str, ...]
    timeout: float = 60.0
    """Seconds to wait for an answer."""
    cancel_prompt: str = "Count from one to five hundred, in words, one number a line. Use no tool."
    """A prompt that keeps the agent busy until it is cancelled."""
    auth_method: str = ""
    allow_logout: bool = False
    """Test `logout`, after which the user may have to log in again."""
    quiet: float = 1.5
    """Seconds to wait for messages that must not come."""
    grace: float = 10.0
    """Seconds for the agent to end after its input was closed, and again after SIGTERM."""


class CannotContinue(Exception):
    """The conversation cannot go on; the message is the reason."""


class Conversation:
    """A client of the agent, which runs during an `async with`. It has no capabilities, and gives every permission.

    Entering raises OSError if the agent cannot be started.
    """

    def __init__(self, options: CheckOptions, folder: Path, version: ProtocolVersion = VERSION_1) -> None:
        self.options = options
        self.version = version
        self.folder = folder
        """The folder of its sessions."""
        self.lines: list[WireLine] = []
        self.flaws: list[Flaw] = []
        self.requests: list[CheckRequest] = []
        self.stopped = ""
        """Why the scenario did not finish; the empty text if it did."""
        self.cancelled: set[str] = set()
        """The sessions whose turn was cancelled: requests for permission there are answered `cancelled`."""
        self.ended_by = ""
        """`itself` if the process ended by itself, else the name of the signal that ended it."""
        self.stderr: deque[int] = deque(maxlen=MAX_STDERR_BYTES)
        self.stderr_size = 0
        self._output_ended = ""
        """Why no more output comes; the empty text while the agent runs."""
        self._received = 0
        self._pending: dict[int | str, CheckRequest] = {}
        self._overdue: dict[int | str, CheckRequest] = {}
        """The requests that were not answered within the timeout."""
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None
        """The end of the process, once it has begun."""

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        await self._start()
        return self

    async def _start(self) -> None:
        self._mark = uuid4().hex
        program, *args = self.options.command
        self._process = process = subprocess.Popen(  # noqa: ASYNC220, asyncio's own way blocks as long
            [system.find_program(program, os.environ), *args],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, MARK: self._mark},
            start_new_session=True,
            creationflags=system.NEW_GROUP,
        )
        self._ending = None
        self._watchdog = ProcessWatchdog(self._mark)
        source, self._sink = await open_streams(cast("FileIO", process.stdout), cast("FileIO", process.stdin))
        stderr = await open_source(cast("FileIO", process.stderr))
        self._sources = [source, stderr]
        self._tasks = [
            asyncio.ensure_future(self._read_output(source)),
            asyncio.ensure_future(self._read_stderr(stderr)),
        ]

    async def restart(self) -> None:
        """End the process of the agent and start it anew. Raises CannotContinue."""
        await self._end()
        self._output_ended = ""
        try:
            await self._start()
        except OSError as error:
            raise CannotContinue(f"the agent could not be started again: {error}") from error
        await self.initialize()

    async def __aexit__(self, *_: object) -> None:
        """Close the agent's input, wait, send SIGTERM, wait, and kill all processes that it started."""
        await self._end()

    async def _end(self) -> None:
        """End the process, once, also if this is cancelled."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end_process())
        try:
            await asyncio.shield(self._ending)
        except asyncio.CancelledError:
            await self._ending  # this takes a limited time
            raise

    async def _end_process(self) -> None:
        ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        try:
            await self._sink.close()
            for name, end in (("", None), ("SIGTERM", system.end_group), ("SIGKILL", system.kill_group)):
                if end:
                    end(self._process.pid)
                await asyncio.wait({ended}, timeout=self.options.grace)
                if ended.done():
                    self.ended_by = name or "itself"
                    break
            system.kill_group(self._process.pid)
            await asyncio.to_thread(self._watchdog.kill_marked)
            await asyncio.wait(self._tasks, timeout=OUTPUT_GRACE)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            for source in self._sources:
                source.close()
            await ended

    # Sending

    def begin(self, method: str, params: Message, *, id: int | str | None = None) -> CheckRequest:
        """Send a request without waiting for its answer."""
        id = len(self.requests) + 1 if id is None else id
        line = self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        request = CheckRequest(method, params, line)
        self.requests.append(request)
        self._pending[id] = request
        if self._output_ended:
            self._mark_missing(request, f"{method} was not answered: {self._output_ended}", lost=True)
        return request

    async def finish(self, request: CheckRequest) -> CheckRequest:
        """Wait for an answer. Raises CannotContinue if there is none."""
        try:
            async with asyncio.timeout(self.options.timeout):
                await request.ended.wait()
        except TimeoutError:
            self._mark_overdue(request, f"within {self.options.timeout:g} s")
        if request.answer is None:
            raise CannotContinue(request.no_answer_reason)
        return request

    async def ask(self, method: str, params: Message, *, id: int | str | None = None) -> CheckRequest:
        """Send a request and wait for its answer. Raises CannotContinue if there is none."""
        return await self.finish(self.begin(method, params, id=id))

    def notify(self, method: str, params: Message) -> WireLine:
        return self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def send(self, message: Message) -> WireLine:
        return self.write(msgspec.json.encode(message), message)

    def write(self, raw: bytes, message: Message | None = None) -> WireLine:
        """Send any bytes as a line."""
        line = self._add_line("client", raw, message)
        self._sink.write(raw + b"\n")
        return line

    # Common steps

    async def initialize(self) -> CheckRequest:
        """Initialize without capabilities. Raises CannotContinue if the agent does not agree on the version."""
        request, number = await self.ask("initialize", {**self.version.initialize}), self.version.number
        if request.error or answers_in_version(request.result) != number:
            see = f"{self.version.prefix}INIT-001 and {self.version.prefix}INIT-002"
            raise CannotContinue(f"initialize did not agree on version {number} of the protocol; see {see}")
        if method := self.options.auth_method:
            login = await self.ask(self.version.login, {"methodId": method})
            if login.error:
                raise CannotContinue(f"{self.version.login} with {method} was refused: {describe_error(login.error)}")
        return request

    async def open_session(self, **more: Any) -> str:
        """Initialize, open a session, and return its id. Raises CannotContinue."""
        await self.initialize()
        return await self.open_another_session(**more)

    async def open_another_session(self, **more: Any) -> str:
        request = await self.ask("session/new", {"cwd": str(self.folder), "mcpServers": [], **more})
        if wanted := self.login_needed(request):
            raise CannotContinue(wanted)
        if request.error or not isinstance(session := request.member("sessionId"), str):
            raise CannotContinue(f"session/new gave no session; see {self.version.prefix}SESSION-001")
        return session

    def login_needed(self, request: CheckRequest) -> str:
        """Return what to do if a request was refused because the agent wants a login first; else the empty text."""
        if not request.error or request.error.get("code") != AUTH_REQUIRED:
            return ""
        offered = next(
            (request.member("authMethods") for request in self.requests if request.method == "initialize"), None
        )
        methods = ", ".join(to_short_json(get_path(method, self.version.login_id)) for method in list_or_empty(offered))
        return f"the agent wants a login first; give --auth-method with one of: {methods}" if methods else ""

    async def prompt(self, session: str, text: str, *blocks: Message, **more: Any) -> CheckRequest:
        """Send a prompt and wait for the end of the turn. Raises CannotContinue."""
        return await self.finish_turn(self.begin_prompt(session, text, *blocks, **more))

    def begin_prompt(self, session: str, text: str, *blocks: Message, **more: Any) -> CheckRequest:
        prompt = [{"type": "text", "text": text}, *blocks]
        return self.begin("session/prompt", {"sessionId": session, "prompt": prompt, **more})

    async def finish_turn(self, request: CheckRequest) -> CheckRequest:
        """Wait for the end of the turn of a prompt. Raises CannotContinue if it does not end."""
        await self.finish(request)
        await self.wait_until(lambda: self.has_ended(request), self.options.timeout)
        if not self.has_ended(request):
            why = self._output_ended or f"no `idle` with a stop reason came within {self.options.timeout:g} s"
            raise CannotContinue(f"the turn did not end: {why}; see {self.version.prefix}PROMPT-001")
        return request

    def has_ended(self, request: CheckRequest) -> bool:
        """Tell whether the turn of a prompt has ended, or has never begun."""
        refused = request.ended.is_set() and (request.answer is None or request.error is not None)
        return refused or self.find_end(request) is not None

    def find_end(self, request: CheckRequest) -> WireLine | None:
        """Return the line that ends the turn of a prompt: its answer, or in version 2 a state; None if none came."""
        if self.version.number == 1 or request.error is not None:
            return request.answer
        session = str(request.params["sessionId"])
        return next((line for line in self.updates(session, request.sent) if get_stop_reason(line) is not None), None)

    def cancel(self, session: str) -> WireLine:
        self.cancelled.add(session)
        return self.notify("session/cancel", {"sessionId": session})

    async def wait_quietly(self) -> None:
        """Wait for messages that must not come."""
        await asyncio.sleep(self.options.quiet)

    async def wait_until(self, condition: Callable[[], Any], seconds: float) -> None:
        """Wait until a condition holds, at most `seconds` seconds. It is tested after every line of the agent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: condition() or self._output_ended)

    def turn_updates(self, session: str, after: WireLine, before: WireLine | None = None) -> list[WireLine]:
        """List the updates of a session that belong to a turn, as `updates` does."""
        kinds = self.version.turn_updates
        return [line for line in self.updates(session, after, before) if update_kind(line) in kinds]

    def updates(self, session: str, after: WireLine, before: WireLine | None = None) -> list[WireLine]:
        """List the updates of a session between two lines, or from one line to the end."""
        end = self.lines.index(before) if before else len(self.lines)
        return [line for line in self.lines[self.lines.index(after) + 1 : end] if is_update(line, session)]

    # Receiving

    async def _read_output(self, source: ByteSource) -> None:
        begun = bytearray()
        while chunk := await read_chunk(source):
            self._received += len(chunk)
            begun += chunk
            if b"\n" in chunk:
                *whole, begun = begun.split(b"\n")
                for raw in whole:
                    self._handle_line(bytes(raw))
            async with self._changed:
                self._changed.notify_all()
            if self._received > MAX_BYTES:
                await self._end_output(f"the agent wrote more than {MAX_BYTES >> 20} MiB in one conversation")
                return
        if begun and self._process.poll() in (0, None):  # a process that is killed may leave an unfinished line
            line = self._add_line("agent", bytes(begun))
            self._add_flaw("TRANSPORT-001", "the last line has no newline", line)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, OUTPUT_GRACE)
        code = self._process.returncode
        await self._end_output(
            "the agent closed its output" + ("" if code is None else f" and ended with exit code {code}")
        )

    async def _read_stderr(self, source: ByteSource) -> None:
        while chunk := await read_chunk(source):
            self.stderr_size += len(chunk)
            self.stderr.extend(chunk[-MAX_STDERR_BYTES:])

    async def _end_output(self, why: str) -> None:
        self._output_ended = why
        for request in list(self._pending.values()):
            self._mark_missing(request, f"{request.method} was not answered: {why}", lost=True)
        async with self._changed:
            self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """Stop the conversation in the middle of a step."""
        self.stopped = why
        for request in list(self._pending.values()):
            self._mark_overdue(request, f"before {why}")

    def _mark_overdue(self, request: CheckRequest, when: str) -> None:
        self._overdue |= {id: other for id, other in self._pending.items() if other is request}
        self._mark_missing(request, f"{request.method} was not answered {when}")

    def _mark_missing(self, request: CheckRequest, why: str, *, lost: bool = False) -> None:
        self._pending = {id: other for id, other in self._pending.items() if other is not request}
        request.no_answer_reason, request.is_lost = why, lost
        request.ended.set()

    def _add_line(self, sender: Literal["client", "agent"], raw: bytes, message: Message | None = None) -> WireLine:
        line = WireLine(time.monotonic() - self._began, sender, raw[:MAX_LINE_BYTES], message)
        self.lines.append(line)
        return line

    def _add_flaw(self, id: str, why: str, line: WireLine) -> None:
        if why:
            self.flaws.append(Flaw(self.version.prefix + id, why, line))

    def _handle_line(self, raw: bytes) -> None:
        line = self._add_line("agent", raw)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self._add_flaw("TRANSPORT-002", f"not UTF-8: {error}", line)
            text = raw.decode(errors="replace")
        try:
            message: Any = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            self._add_flaw("TRANSPORT-001", "an empty line" if not raw.strip() else f"not JSON: {error}", line)
            return
        if not isinstance(message, dict) or cast("Message", message).get("jsonrpc") != "2.0":
            self._add_flaw(
                "TRANSPORT-001", 'JSON, but not a message: it is not an object with `"jsonrpc": "2.0"`', line
            )
            return
        line.message = message = cast("Message", message)
        if "method" in message:
            self._handle_call(line, message)
        else:
            self._handle_answer(line, message)

    def _handle_answer(self, line: WireLine, message: Message) -> None:
        why = find_envelope_flaw(message)
        self._add_flaw("JSONRPC-002", why, line)
        id: Any = message.get("id")
        request = self._pending.pop(id, None) if type(id) in (int, str) else None
        overdue = self._overdue.pop(id, None) if type(id) in (int, str) else None
        if request is not None:
            request.answer = line
            request.ended.set()
        elif overdue is not None:
            request, seconds = overdue, line.at - overdue.sent.at
            request.late_answer = line
            why = f"{request.method} was too slow ({seconds:.1f} s; --timeout is {self.options.timeout:g} s)"
            self.stopped = self.stopped and why
            request.no_answer_reason = why
        else:
            if id is not None:  # null answers a message that the agent could not parse
                self._add_flaw(
                    "JSONRPC-001", f"an answer with the id {to_short_json(id)}, which no request waits for", line
                )
                if len(self._pending) == 1:  # then it is surely the answer to that request
                    [waiting] = self._pending.values()
                    self._mark_missing(
                        waiting,
                        f"{waiting.method} was not answered, but something with the id {to_short_json(id)} came",
                    )
            return
        if not why and "result" in message and self.is_own_version(request):
            why = find_result_flaw(request.method, message["result"], self.version)
            self._add_flaw("SCHEMA-001", why, line)
        if not why and self.is_own_version(request):
            self._add_flaw("SCHEMA-002", ", ".join(find_unknown_keys(message, request.method, self.version)), line)
        if isinstance(error := message.get("error"), dict):
            text = cast("Message", error).get("message")
            lines = text.split("\n") if isinstance(text, str) else []
            unfit = "is empty" if lines == [""] else "has several lines" if len(lines) > 1 else ""
            self._add_flaw("ERROR-001", unfit and f"the error's message {unfit}", line)

    def is_own_version(self, request: CheckRequest) -> bool:
        """Tell whether an answer is in the version of the conversation: an agent may answer `initialize` in another."""
        number = answers_in_version(request.result) if request.method == "initialize" else 0
        return number in (0, self.version.number)

    def _handle_call(self, line: WireLine, message: Message) -> None:
        why = find_call_flaw(message, self.version)
        self._add_flaw("SCHEMA-001", why, line)
        method: object = message["method"]
        if not isinstance(method, str) or type(message.get("id")) not in (int, str, type(None)):
            return
        if not why:
            self._add_flaw("SCHEMA-002", ", ".join(find_unknown_keys(message, method, self.version)), line)
        if "id" not in message:
            return
        if id := CAPABILITY_METHODS.get(method.partition("/")[0]):
            self._add_flaw(id, f"{method} was called, and the client has no such capability", line)
        reply: Message = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "session/request_permission" and not why:
            self.send(reply | {"result": {"outcome": self._choose_permission(message["params"])}})
        else:
            self.send(reply | {"error": {"code": METHOD_NOT_FOUND, "message": f"Method not found: {method[:100]}"}})

    def _choose_permission(self, params: Message) -> Message:
        """Choose `allow_once` if it is offered, else the first option; `cancelled` in a turn that was cancelled."""
        kinds = {option["kind"]: option["optionId"] for option in reversed(params["options"])}
        if params["sessionId"] in self.cancelled or not kinds:
            return {"outcome": "cancelled"}
        return {"outcome": "selected", "optionId": kinds.get("allow_once", params["options"][0]["optionId"])}


async def read_chunk(source: ByteSource) -> bytes:
    """Read the next bytes. A connection that was reset counts as closed."""
    try:
        return await source.read(CHUNK_BYTES)
    except OSError:
        return b""
