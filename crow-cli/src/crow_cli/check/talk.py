"""One conversation with a fresh process of the agent, every line of it kept, and what is plainly wrong noted at once.

The agent is nobody's friend here: it may flood, hang, exit, print junk, start children and never read. Each answer has
its time, what is kept has its limit, and in the end nothing that it started is left.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self, cast
from uuid import uuid4

import msgspec
from crow_core.acp.schema import AUTH_REQUIRED, METHOD_NOT_FOUND, PROTOCOL_VERSION
from crow_core.acp.transports import CHUNK_BYTES, ByteSource, open_source, open_streams
from crow_core.mcp.watchdog import MARK, ProcessWatchdog

from crow_cli.check.validity import at, brief, call_flaw, envelope_flaw, listed, result_flaw, strangers

FLOOD = 16 * 1024 * 1024
"""Bytes an agent may say in one conversation, which asks it for a few sentences."""
KEPT = 64 * 1024
"""Bytes of a line that are kept for the report."""
STDERR = 4096
"""Bytes of what it said last on standard error that are kept."""
LAST_WORDS = 5.0
"""Seconds in which what it said before its end arrives."""
GUARDED = {"fs": "CLIENTCAP-001", "terminal": "CLIENTCAP-002", "elicitation": "CLIENTCAP-003"}
"""Methods that need a capability, which this client never has, by their first word."""
TURN = {"agent_message_chunk", "agent_thought_chunk", "user_message_chunk", "tool_call", "tool_call_update", "plan"}
"""The updates that belong to a turn; names, titles, usage and commands may come at any time."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What the examination is told."""

    command: tuple[str, ...]
    timeout: float = 60.0
    """Seconds for one answer."""
    cancel_prompt: str = "Count from one to five hundred, in words, one number a line. Use no tool."
    """What keeps the agent busy until it is cancelled."""
    auth_method: str = ""
    allow_logout: bool = False
    """Logging out may cost the user a login."""
    quiet: float = 1.5
    """Seconds in which what must not come would have come."""
    grace: float = 10.0
    """Seconds the agent has, each, to end after the end of its input, and after SIGTERM."""


@dataclass(eq=False)
class Line:
    """One line on the wire, without its newline."""

    at: float
    """Seconds since the agent was started."""
    sender: Literal["client", "agent"]
    raw: bytes
    """Its first KEPT bytes."""
    message: Message | None = None
    """None: it is no JSON-RPC message."""


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong wherever it occurs."""

    id: str
    """The requirement that it breaks."""
    why: str
    line: Line | None


@dataclass(eq=False)
class Step:
    """A request of ours, and what came of it."""

    method: str
    params: Message
    sent: Line
    answer: Line | None = None
    missing: str = ""
    """Why there is no answer."""
    lost: bool = False
    """It was not answered because the agent was gone, or said too much."""
    interrupted: Line | None = None
    """What was to end it before its time."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def message(self) -> Message:
        """The answer; empty where there is none."""
        return (self.answer and self.answer.message) or {}

    @property
    def error(self) -> Message | None:
        error = self.message.get("error")
        return cast("Message", error) if isinstance(error, dict) else None

    @property
    def result(self) -> Any:
        return self.message.get("result")

    def member(self, name: str) -> Any:
        """One member of the result, whatever that is; None where there is none."""
        return at(self.result, name)


class Stop(Exception):
    """The conversation cannot go on; the words say why."""


class Talk:
    """The client's side, for the length of an `async with`. It has no capabilities, and permits what it is asked.

    Raises OSError if the agent cannot be started.
    """

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        """Where its sessions work."""
        self.lines: list[Line] = []
        self.flaws: list[Flaw] = []
        self.steps: list[Step] = []
        self.stopped = ""
        """Why it did not come to its end."""
        self.cancelled: set[str] = set()
        """Sessions whose turn was cancelled; whoever asks for a permission there is told so."""
        self.left_by = ""
        """How the process ended: `itself`, or what ended it."""
        self.stderr: deque[int] = deque(maxlen=STDERR)
        self.stderr_size = 0
        self._over = ""
        """Why nothing more comes from it."""
        self._received = 0
        self._pending: dict[int | str, Step] = {}
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._mark = uuid4().hex
        self._began = time.monotonic()
        self._process = process = subprocess.Popen(  # noqa: ASYNC220, asyncio's own way blocks as long
            self.options.command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, MARK: self._mark},
            start_new_session=True,
        )
        self._watchdog = ProcessWatchdog(self._mark)
        source, self._sink = await open_streams(cast("FileIO", process.stdout), cast("FileIO", process.stdin))
        stderr = await open_source(cast("FileIO", process.stderr))
        self._sources = [source, stderr]
        self._tasks = [asyncio.ensure_future(self._listen(source)), asyncio.ensure_future(self._overhear(stderr))]
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the agent's input, wait, terminate, wait, and kill what is left of all that it started."""
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # it takes a known time
            raise

    async def _end(self) -> None:
        ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        try:
            await self._sink.close()
            for name, number in (("", None), ("SIGTERM", signal.SIGTERM), ("SIGKILL", signal.SIGKILL)):
                if number:
                    self._signal(number)
                await asyncio.wait({ended}, timeout=self.options.grace)
                if ended.done():
                    self.left_by = name or "itself"
                    break
            self._signal(signal.SIGKILL)
            await asyncio.to_thread(self._watchdog.kill_marked)
            await asyncio.wait(self._tasks, timeout=LAST_WORDS)  # its last words
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            for source in self._sources:
                source.close()
            await ended

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    # What we say

    def begin(self, method: str, params: Message, *, id: int | str | None = None) -> Step:
        """Send a request without waiting for its answer."""
        id = len(self.steps) + 1 if id is None else id
        line = self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        step = Step(method, params, line)
        self.steps.append(step)
        self._pending[id] = step
        if self._over:
            self._miss(step, f"{method} was not answered: {self._over}", lost=True)
        return step

    async def finish(self, step: Step) -> Step:
        """Wait for an answer. Raises Stop if there is none."""
        try:
            async with asyncio.timeout(self.options.timeout):
                await step.ended.wait()
        except TimeoutError:
            self._miss(step, f"{step.method} was not answered within {self.options.timeout:g} s")
        if step.answer is None:
            raise Stop(step.missing)
        return step

    async def ask(self, method: str, params: Message, *, id: int | str | None = None) -> Step:
        """Send a request and wait for its answer. Raises Stop if there is none."""
        return await self.finish(self.begin(method, params, id=id))

    def notify(self, method: str, params: Message) -> Line:
        return self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def send(self, message: Message) -> Line:
        return self.write(msgspec.json.encode(message), message)

    def write(self, raw: bytes, message: Message | None = None) -> Line:
        """Say anything at all, on a line of its own."""
        line = self._keep("client", raw, message)
        self._sink.write(raw + b"\n")
        return line

    # What most conversations begin with

    async def initialize(self) -> Step:
        """Agree on version 1, without any capability. Raises Stop if it is not agreed upon."""
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": {},
            "clientInfo": {"name": "crow-check", "version": "1"},
        }
        step = await self.ask("initialize", params)
        if step.error or step.member("protocolVersion") != PROTOCOL_VERSION:
            raise Stop("initialize did not agree on version 1 of the protocol; see INIT-001 and INIT-002")
        if method := self.options.auth_method:
            login = await self.ask("authenticate", {"methodId": method})
            if login.error:
                raise Stop(f"authenticate with {method} was refused: {told(login.error)}")
        return step

    async def open(self, **more: Any) -> str:
        """Initialize, and open a session; gives its id. Raises Stop."""
        await self.initialize()
        return await self.open_another(**more)

    async def open_another(self, **more: Any) -> str:
        step = await self.ask("session/new", {"cwd": str(self.folder), "mcpServers": [], **more})
        if wanted := self.login_wanted(step):
            raise Stop(wanted)
        if step.error or not isinstance(session := step.member("sessionId"), str):
            raise Stop("session/new gave no session; see SESSION-001")
        return session

    def login_wanted(self, step: Step) -> str:
        """What to do where a request is refused for want of a login that the agent offers; else nothing."""
        if not step.error or step.error.get("code") != AUTH_REQUIRED:
            return ""
        offered = next((step.member("authMethods") for step in self.steps if step.method == "initialize"), None)
        methods = ", ".join(brief(at(method, "id")) for method in listed(offered))
        return f"the agent wants a login first; give --auth-method with one of: {methods}" if methods else ""

    async def prompt(self, session: str, text: str, *blocks: Message, **more: Any) -> Step:
        """Say something and wait for the end of the turn."""
        return await self.finish(self.begin_prompt(session, text, *blocks, **more))

    def begin_prompt(self, session: str, text: str, *blocks: Message, **more: Any) -> Step:
        prompt = [{"type": "text", "text": text}, *blocks]
        return self.begin("session/prompt", {"sessionId": session, "prompt": prompt, **more})

    def cancel(self, session: str) -> Line:
        self.cancelled.add(session)
        return self.notify("session/cancel", {"sessionId": session})

    async def quiet(self) -> None:
        """Wait for what must not come."""
        await asyncio.sleep(self.options.quiet)

    async def until(self, true: Callable[[], Any], seconds: float) -> None:
        """Wait until this holds, looked at after every line of the agent, but no longer than so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: true() or self._over)

    def updates(self, session: str, after: Line, before: Line | None = None) -> list[Line]:
        """The lines that update a session, of those after one line and before another, or before the end."""
        end = self.lines.index(before) if before else len(self.lines)
        return [line for line in self.lines[self.lines.index(after) + 1 : end] if is_update(line, session)]

    # What we hear

    async def _listen(self, source: ByteSource) -> None:
        begun = bytearray()
        while chunk := await read(source):
            self._received += len(chunk)
            begun += chunk
            if b"\n" in chunk:
                *whole, begun = begun.split(b"\n")
                for raw in whole:
                    self._hear(bytes(raw))
            async with self._news:
                self._news.notify_all()
            if self._received > FLOOD:
                await self._give_up(f"the agent said more than {FLOOD >> 20} MiB in one conversation")
                return
        if begun and self._process.poll() in (0, None):  # who is killed may die in the middle of a word
            line = self._keep("agent", bytes(begun))
            self._flaw("TRANSPORT-001", "the last line has no newline", line)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, LAST_WORDS)
        code = self._process.returncode
        await self._give_up(
            "the agent closed its output" + ("" if code is None else f" and ended with exit code {code}")
        )

    async def _overhear(self, source: ByteSource) -> None:
        while chunk := await read(source):
            self.stderr_size += len(chunk)
            self.stderr.extend(chunk[-STDERR:])

    async def _give_up(self, why: str) -> None:
        self._over = why
        for step in list(self._pending.values()):
            self._miss(step, f"{step.method} was not answered: {why}", lost=True)
        async with self._news:
            self._news.notify_all()

    def _miss(self, step: Step, why: str, *, lost: bool = False) -> None:
        self._pending = {id: other for id, other in self._pending.items() if other is not step}
        step.missing, step.lost = why, lost
        step.ended.set()

    def _keep(self, sender: Literal["client", "agent"], raw: bytes, message: Message | None = None) -> Line:
        line = Line(time.monotonic() - self._began, sender, raw[:KEPT], message)
        self.lines.append(line)
        return line

    def _flaw(self, id: str, why: str, line: Line) -> None:
        if why:
            self.flaws.append(Flaw(id, why, line))

    def _hear(self, raw: bytes) -> None:
        line = self._keep("agent", raw)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self._flaw("TRANSPORT-002", f"no UTF-8: {error}", line)
            text = raw.decode(errors="replace")
        try:
            message: Any = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            self._flaw("TRANSPORT-001", "an empty line" if not raw.strip() else f"no JSON: {error}", line)
            return
        if not isinstance(message, dict) or cast("Message", message).get("jsonrpc") != "2.0":
            self._flaw("TRANSPORT-001", 'JSON, but no message: it is no object with `"jsonrpc": "2.0"`', line)
            return
        line.message = message = cast("Message", message)
        if "method" in message:
            self._hear_call(line, message)
        else:
            self._hear_answer(line, message)

    def _hear_answer(self, line: Line, message: Message) -> None:
        why = envelope_flaw(message)
        self._flaw("JSONRPC-002", why, line)
        id: Any = message.get("id")
        step = self._pending.get(id) if type(id) in (int, str) else None
        if step is None:
            if id is not None:  # else it answers what the agent could not read
                self._flaw("JSONRPC-001", f"an answer with the id {brief(id)}, which no request waits for", line)
                if len(self._pending) == 1:  # no need to wait for it any longer
                    [waiting] = self._pending.values()
                    self._miss(
                        waiting, f"{waiting.method} was not answered, but something with the id {brief(id)} came"
                    )
            return
        del self._pending[id]
        step.answer = line
        step.ended.set()
        if not why and "result" in message and self.speaks_ours(step):
            why = result_flaw(step.method, message["result"])
            self._flaw("SCHEMA-001", why, line)
        if not why and self.speaks_ours(step):
            self._flaw("SCHEMA-002", ", ".join(strangers(message, step.method)), line)
        if step.error:
            words = step.error.get("message")
            lines = words.split("\n") if isinstance(words, str) else []
            unfit = "is empty" if lines == [""] else "has several lines" if len(lines) > 1 else ""
            self._flaw("ERROR-001", unfit and f"the error's message {unfit}", line)

    def speaks_ours(self, step: Step) -> bool:
        """Whether an answer is to be read in version 1: who was asked for a later one may give that."""
        return step.method != "initialize" or step.member("protocolVersion") in (None, PROTOCOL_VERSION)

    def _hear_call(self, line: Line, message: Message) -> None:
        why = call_flaw(message)
        self._flaw("SCHEMA-001", why, line)
        method: object = message["method"]
        if not isinstance(method, str) or type(message.get("id")) not in (int, str, type(None)):
            return
        if not why:
            self._flaw("SCHEMA-002", ", ".join(strangers(message, method)), line)
        if "id" not in message:
            return
        if id := GUARDED.get(method.partition("/")[0]):
            self._flaw(id, f"{method} was called, and the client has no such capability", line)
        reply: Message = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "session/request_permission" and not why:
            self.send(reply | {"result": {"outcome": self._permit(message["params"])}})
        else:
            self.send(reply | {"error": {"code": METHOD_NOT_FOUND, "message": f"Method not found: {method[:100]}"}})

    def _permit(self, params: Message) -> Message:
        """Once, if that is offered; not in a turn that was cancelled."""
        kinds = {option["kind"]: option["optionId"] for option in reversed(params["options"])}
        if params["sessionId"] in self.cancelled or not kinds:
            return {"outcome": "cancelled"}
        return {"outcome": "selected", "optionId": kinds.get("allow_once", params["options"][0]["optionId"])}


async def read(source: ByteSource) -> bytes:
    """What comes next; a reset is an end."""
    try:
        return await source.read(CHUNK_BYTES)
    except OSError:
        return b""


def is_update(line: Line, session: str) -> bool:
    """Whether a line updates this session."""
    updates = line.sender == "agent" and at(line.message, "method") == "session/update"
    return updates and at(line.message, "params", "sessionId") == session


def kind(line: Line) -> str:
    """Which update it is."""
    return str(at(line.message, "params", "update", "sessionUpdate") or "")


def of_turn(lines: Sequence[Line]) -> list[Line]:
    """Those updates that belong to a turn."""
    return [line for line in lines if kind(line) in TURN]


def told(error: Message) -> str:
    """An error as a person reads it."""
    return f"{brief(error.get('code'))} {brief(error.get('message'))}"
