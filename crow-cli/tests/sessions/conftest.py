"""Read the session files of this folder and play them through `crow acp`. README.md describes the format.

A `SessionFile` is what a file holds. A `Play` is one run of it: the scripted model, which checks every request before
it answers, and the user at an ACP client, who does the other steps in order.
"""

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import msgspec
import pytest
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    BlockContent,
    ClientCapabilities,
    ClientSessionCapabilities,
    ContentBlock,
    CreateElicitationResponse,
    DiffContent,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    FileSystemCapabilities,
    LoadSessionRequest,
    NoticeCapabilities,
    NoticeUpdate,
    PlanUpdate,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UserMessageChunk,
)
from crow_core.acp.transports import ChildTransport
from crow_core.messages.message import INTERRUPTED, NOT_RUN
from crow_core.testing import Editor, Failure, Reply, ScriptedCall, ScriptedServer
from crow_core.testing.script import get_usage

if TYPE_CHECKING:
    from crow_testing.command_fixtures import ForkedAgent, Machine

Texts = str | list[str]

CALL_KEYS = ("result", "lacks", "keep")
"""Keys of a tool call in a file, besides the name of the tool."""
PATIENCE = 60.0
"""Seconds to wait for what has to happen, also on a busy machine."""


class When(msgspec.Struct, forbid_unknown_fields=True):
    """The moment of a step of the user within a turn; one of these."""

    request: bool = False
    """The next request to the model has arrived. It gets no answer."""
    question: bool = False
    """Permission is asked, or a form is shown."""
    file: str = ""
    """A file of this name exists in the project."""
    shown: str = ""
    """The client has been shown this text."""
    stored: str = ""
    """The files of the database hold this text."""


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """The user sends a prompt. The next step of the user follows when the turn has ended."""

    user: str
    attach: list[dict[str, Any]] = []
    """Content blocks besides the text, as ACP writes them."""
    stop: str = "end_turn"
    """The stop reason; `error` if the prompt is answered with an error, whose text counts as shown."""
    permit: Texts = "allow_once"
    """The kind of option that answers questions for permission; of a list, one after the other, and the last one from
    then on. "" gives no answer."""
    asked: int | None = None
    """The number of questions for permission in the turn."""
    answer: dict[str, Any] | None = None
    """The answer to a form; a form is declined without it."""
    shown: Texts = []
    """Texts that the client is shown during the turn."""
    hidden: Texts = []
    """Texts that it is not shown."""
    forgets: int = 0
    """The number of turns, this one included, that a later load does not show."""


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The model answers a request."""

    model: str
    """The text of the reply."""
    reasoning: str = ""
    call: list[dict[str, Any]] = []
    """Tool calls: `TOOL = {arguments}` or `TOOL = "their text"`, and what the result has to hold."""
    sees: Texts = []
    """Texts that the request holds."""
    lacks: Texts = []
    """Texts that it does not hold."""
    to: str = ""
    """Answer only a request whose last user message holds this text: that of a sub-agent, or for a summary."""
    afresh: str = ""
    """The reason why the request does not begin as the one before it in the same conversation."""
    finish: str | None = None
    """The finish reason, where it is not `tool_calls` or `stop`."""
    hang: bool = False
    """True for a reply that never ends."""
    cut: bool = False
    """True if the connection breaks at the end of the reply."""
    status: int = 0
    """The HTTP status of an error, whose message is the text."""
    usage: dict[str, Any] | None = None
    """The reported token counts; None for an estimate."""


class Cancel(msgspec.Struct, forbid_unknown_fields=True):
    """The user cancels the turn."""

    cancel: When


class Kill(msgspec.Struct, forbid_unknown_fields=True):
    """SIGKILL ends the agent. The client starts it again and loads the session."""

    kill: When


class Reload(msgspec.Struct, forbid_unknown_fields=True):
    """The client ends the agent, starts it again and loads the session."""

    reload: bool


class UserCommand(msgspec.Struct, forbid_unknown_fields=True):
    """The user runs a command of their own in the project."""

    shell: str


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """The user sets options of the session, such as its mode."""

    choose: dict[str, str]


Step = Prompt | Answer | Cancel | Kill | Reload | UserCommand | Choice
STEPS: dict[str, type[Step]] = {
    "user": Prompt,
    "model": Answer,
    "cancel": Cancel,
    "kill": Kill,
    "reload": Reload,
    "shell": UserCommand,
    "choose": Choice,
}
"""The kinds of steps by the key that marks them."""


class SessionFile(msgspec.Struct, forbid_unknown_fields=True):
    """A session as a file of this folder describes it."""

    about: str
    """A sentence on the behaviour that the session tests."""
    step: list[dict[str, Any]]
    files: dict[str, str] = {}
    """The files of the project at the start, by path."""
    home: dict[str, str] = {}
    """Files in the user's home."""
    prepare: str = ""
    """A command that is run in the project before the session."""
    config: str = ""
    """Lines of crow's `config.toml`."""
    endpoint: dict[str, Any] = {}
    """Settings of the model, such as its window."""
    client: list[Literal["fs", "terminal"]] = []
    """Abilities of the client, besides forms and notices."""
    unsaved: dict[str, str] = {}
    """Texts of the client's unsaved buffers, by path; with `fs` only."""
    pages: dict[str, str] = {}
    """Web pages at `@{site}`, by path."""
    after: dict[str, str | bool] = {}
    """The files that are new or changed in the end; false for one that is gone, true for one whose text may vary."""
    check: str = ""
    """A command that succeeds in the project in the end."""
    restarts: bool = True
    """True if the session ends in the same way when the agent is killed after every tool call."""

    def parse_steps(self) -> list[Step]:
        return [msgspec.convert(step, next(STEPS[key] for key in step if key in STEPS)) for step in self.step]


class Expected(NamedTuple):
    """The texts that the result of a tool call must contain, and must not."""

    where: str
    holds: list[str]
    lacks: list[str]
    keep: dict[str, str]
    """Regular expressions by the name under which their group is kept."""


class Fault(Exception):
    """A session did not go as its file says."""


class User(Editor):
    """A client whose user gives a list of answers to questions for permission."""

    permits: list[str]
    """The kinds of options that answer the next questions; the last one stays."""

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.permit = (self.permits.pop(0) if len(self.permits) > 1 else self.permits[0]) or None
        return await super().on_permission(question)


@dataclass
class Play:
    """One run of a session."""

    file: SessionFile
    steps: list[Step]
    machine: "Machine"
    server: ScriptedServer = field(init=False)
    user: User = field(init=False)
    agent: "ForkedAgent | ChildTransport" = field(init=False)
    session: str = ""
    position: int = 0
    """The steps before this one of the user are done."""
    answered: set[int] = field(default_factory=set[int])
    """The indexes of the model's steps that were sent."""
    held: bool = False
    """True while a request waits for a step of the user that comes first."""
    faults: list[str] = field(default_factory=list[str])
    values: dict[str, str] = field(default_factory=dict[str, str])
    """What stands for `@{NAME}` in the file."""
    expected: dict[str, Expected] = field(default_factory=dict[str, Expected])
    """The results that no request has shown yet, by the id of the tool call."""
    latest: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    """The messages of the latest request of each conversation."""
    usages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The token counts of the replies that were sent whole."""
    updates: list[SessionUpdate] = field(default_factory=list[SessionUpdate])
    """What clients were shown since the session began, with the user's prompts."""
    kills: int = 0
    """The number of times that the agent was killed."""
    loads: list[tuple[list[str], list[str]]] = field(default_factory=list[tuple[list[str], list[str]]])
    """For each load, the transcript of the session until then, and that of the load."""

    async def run(self) -> None:
        """Play all steps, end the agent, and load the session once more. Raises Fault."""
        machine, file = self.machine, self.file
        async with ScriptedServer(self.answer, pages=file.pages) as self.server:
            site = self.server.url.removesuffix("/v1")
            self.values |= {"site": site, "project": str(machine.project), "home": str(machine.home)}
            self.values |= {"python": sys.executable, "long": " ".join(f"and so on to {n}" for n in range(300))}
            write_files(machine.project, self.fill(file.files))
            write_files(machine.home, self.fill(file.home))
            settings = {"base_url": self.server.url, "model": "scripted", "api_key": "key", **file.endpoint}
            lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
            machine.configure("\n".join([self.fill(file.config), "[models.scripted]", *lines]))
            if file.prepare:
                self.run_command(file.prepare)
            await self.play()

    # The model

    async def answer(self, request: dict[str, Any]) -> Reply | Failure:
        """Check a request, and return the reply of the model's next step."""
        try:
            to, at = self.find_answer(request)
            if at is None:
                self.held = True
                await asyncio.Event().wait()
            step = self.steps[at or 0]
            assert isinstance(step, Answer)
            self.check_request(request, step, f"step {at + 1}", self.latest.get(to))
            self.latest[to] = request["messages"]
            self.answered.add(at or 0)
            return self.to_reply(step, at or 0, request)
        except Fault as fault:
            self.faults.append(str(fault))
            return Failure(400, {"error": {"message": "This differs from the session file."}})

    def find_answer(self, request: dict[str, Any]) -> tuple[str, int | None]:
        """Return the conversation that a request belongs to, and the step that answers it.

        The step is None if a step of the user comes first.
        """
        prompt = next(to_text(one["content"]) for one in reversed(request["messages"]) if one["role"] == "user")
        others = [step.to for step in self.steps if isinstance(step, Answer) and step.to]
        to = next((words for words in others if words in prompt), "")
        for at, step in enumerate(self.steps[self.position :], self.position):
            if isinstance(step, Answer):
                if at not in self.answered and step.to == to:
                    return to, at
            elif isinstance(step, Cancel | Kill) and get_moment(step).request:
                return to, None
            else:
                break
        raise Fault(f"no step answers this request, which ends with {shorten(request['messages'][-1])}")

    def check_request(
        self, request: dict[str, Any], step: Answer, where: str, before: list[dict[str, Any]] | None
    ) -> None:
        messages: list[dict[str, Any]] = request["messages"]
        texts = [to_text(message["content"]) for message in messages]
        check_text(f"{where}: the request", "\n".join(texts), self.fill(step.sees), self.fill(step.lacks))
        for message, text in zip(messages, texts, strict=True):
            if expected := self.expected.pop(message.get("tool_call_id", ""), None):
                check_text(expected.where, text, self.fill(expected.holds), self.fill(expected.lacks))
                for name, pattern in expected.keep.items():
                    if not (found := re.search(pattern, text)):
                        raise Fault(f"{expected.where} has nothing that matches {pattern}: {shorten(text)}")
                    self.values[name] = found[1]
        if before is not None and not step.afresh:
            for at, message in enumerate(before):
                if messages[at : at + 1] != [message]:
                    now = shorten(messages[at : at + 1])
                    raise Fault(f"{where}: message {at} was sent as {shorten(message)} before and is {now} now")

    def to_reply(self, step: Answer, at: int, request: dict[str, Any]) -> Reply | Failure:
        if step.status:
            return Failure(step.status, {"error": {"message": step.model}})
        reply = Reply(
            self.fill(step.model),
            self.fill(step.reasoning),
            [self.to_call(call, f"call_{at}_{number}", at) for number, call in enumerate(step.call)],
            step.finish,
            step.usage,
            hang=step.hang,
            error=ConnectionError() if step.cut else None,
        )
        if not (step.cut or step.hang):
            self.usages.append(get_usage(reply, request))
        return reply

    def to_call(self, call: dict[str, Any], id: str, at: int) -> ScriptedCall:
        ((tool, arguments),) = ((key, value) for key, value in call.items() if key not in CALL_KEYS)
        where = f"step {at + 1}: the result of {tool}"
        self.expected[id] = Expected(
            where, to_list(call.get("result", [])), to_list(call.get("lacks", [])), call.get("keep", {})
        )
        return {"name": tool, "arguments": self.fill(arguments), "id": id}

    # The user

    async def play(self) -> None:
        async with AsyncExitStack() as connection:
            await self.connect(connection)
            self.session = (await self.user.new_session(str(self.machine.project))).session_id
            turn: asyncio.Task[str] | None = None
            prompt: Prompt | None = None
            for at, step in enumerate([*self.steps, None]):
                if isinstance(step, Answer):
                    continue
                if isinstance(step, Cancel | Kill):
                    assert turn is not None
                    await self.wait_for(get_moment(step), turn, at)
                elif turn and prompt:
                    await self.end_turn(turn, prompt, at)
                    turn = prompt = None
                self.position, self.held = at + 1, False
                match step:
                    case Prompt():
                        prompt, turn = step, asyncio.ensure_future(self.prompt(step))
                    case Cancel():
                        await self.user.cancel(self.session)
                    case Kill():
                        assert turn is not None
                        pid = self.agent.process.pid if isinstance(self.agent, ChildTransport) else self.agent.pid
                        os.kill(pid, signal.SIGKILL)
                        self.kills += 1
                        await asyncio.wait([self.agent.exit, turn])
                        await self.load(connection)
                        turn = prompt = None
                    case Reload():
                        await self.load(connection)
                    case UserCommand():
                        self.run_command(step.shell)
                    case Choice():
                        for option, value in step.choose.items():
                            await self.user.set_option(self.session, option, value)
                    case None:
                        await self.load(connection)

    async def connect(self, connection: AsyncExitStack) -> None:
        """Start the agent, and connect a client to it."""
        self.agent = await self.machine.fork_agent()
        self.user = User(self.agent)
        await connection.enter_async_context(self.user.serving())
        self.user.buffers = {str(self.machine.project / name): text for name, text in self.file.unsaved.items()}
        fs = "fs" in self.file.client
        await self.user.initialize(
            "editor",
            ClientCapabilities(
                fs=FileSystemCapabilities(read_text_file=fs, write_text_file=fs),
                terminal="terminal" in self.file.client,
                session=ClientSessionCapabilities(notices=NoticeCapabilities()),
                elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()),
            ),
        )

    async def load(self, connection: AsyncExitStack) -> None:
        """End the agent, start it again, and load the session."""
        await connection.aclose()
        self.updates += self.user.updates
        await self.connect(connection)
        request = LoadSessionRequest(session_id=self.session, cwd=str(self.machine.project))
        await self.user.request("session/load", request)
        commands = "terminal" not in self.file.client  # a load shows their output, as the client's terminals are gone
        model_calls = {id for (id,) in self.query("SELECT id FROM calls")}
        said = [one for one in self.updates if not isinstance(one, AgentMessageChunk) or one.message_id in model_calls]
        self.loads.append((to_transcript(said, commands), to_transcript(self.user.updates, commands)))
        self.user.updates.clear()

    async def prompt(self, step: Prompt) -> str:
        """Send a prompt, and return the stop reason."""
        self.user.permits = to_list(step.permit)
        self.user.questions.clear()
        self.user.answer = CreateElicitationResponse(action="decline")
        if step.answer is not None:
            self.user.answer = CreateElicitationResponse(action="accept", content=self.fill(step.answer))
        blocks = [TextBlock(text=self.fill(step.user)), *msgspec.convert(self.fill(step.attach), list[ContentBlock])]
        self.user.updates += [UserMessageChunk(content=block) for block in blocks]
        try:
            return (await self.user.prompt(self.session, blocks)).stop_reason
        except RpcError as error:
            self.user.updates.append(NoticeUpdate(severity="error", title=f"{error.message}: {error.data}"))
            return "error"
        except ConnectionClosed:
            return "connection closed"

    async def wait_for(self, moment: When, turn: asyncio.Task[str], at: int) -> None:
        """Wait for the moment within a turn at which a step of the user takes place."""

        def has_come() -> bool:
            if moment.request:
                return self.held
            if moment.question:
                return bool(self.user.questions or self.user.forms)
            if moment.file:
                return (self.machine.project / moment.file).exists()
            if moment.stored:
                files = Path(self.machine.env["CROW_HOME"]).glob("crow.db*")
                return any(moment.stored.encode() in file.read_bytes() for file in files)
            return self.fill(moment.shown) in "\n".join(to_transcript(self.user.updates))

        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not (has_come() and not self.list_waiting(at)):
            if turn.done() or asyncio.get_running_loop().time() > deadline:
                raise self.describe(f"step {at + 1}: its moment has not come")
            await asyncio.wait([turn], timeout=0.02)

    async def end_turn(self, turn: asyncio.Task[str], step: Prompt, at: int) -> None:
        """Wait for a turn's end, and check how it went."""
        try:
            stop = await asyncio.wait_for(turn, PATIENCE)
        except TimeoutError:
            raise self.describe("the turn has not ended") from None
        if stop != step.stop:
            raise self.describe(f"the turn ended with {stop}, not {step.stop}")
        if waiting := self.list_waiting(at):
            raise self.describe(f"the turn ended before step {waiting[0] + 1}, of the model")
        if step.asked not in (None, len(self.user.questions)):
            titles = [question.tool_call.title for question in self.user.questions]
            raise self.describe(f"permission was asked {len(titles)} times: {titles}")
        check_text("the client", "\n".join(self.list_shown()), self.fill(step.shown), self.fill(step.hidden))
        for _ in range(step.forgets):
            while not isinstance(self.user.updates.pop(), UserMessageChunk):
                pass

    def list_waiting(self, at: int) -> list[int]:
        """List the steps of the model before step `at` that no request has come for."""
        return [n for n in range(at) if isinstance(self.steps[n], Answer) and n not in self.answered]

    def list_shown(self) -> list[str]:
        """List what the client was shown since the last prompt, notices included."""
        updates = self.user.updates
        starts = (n for n in range(len(updates), 0, -1) if isinstance(updates[n - 1], UserMessageChunk))
        latest = updates[next(starts, 0) :]
        notices = [update.title for update in latest if isinstance(update, NoticeUpdate)]
        return [*to_transcript(latest), *notices]

    def describe(self, problem: str) -> Fault:
        shown = shorten("\n".join(self.list_shown()))
        return Fault("\n".join([*self.faults, problem, "The client was shown:", shown]))

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows that a query finds in the database."""
        file = Path(self.machine.env["CROW_HOME"], "crow.db")
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            return connection.execute(sql).fetchall()

    def run_command(self, command: str) -> None:
        """Run a shell command in the project. Raises Fault if it fails."""
        run = subprocess.run(
            ["bash", "-c", self.fill(command)],
            cwd=self.machine.project,
            env=self.machine.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise Fault(f"{command!r} failed with status {run.returncode}: {run.stdout}{run.stderr}")

    def fill(self, value: Any) -> Any:
        """Replace each `@{NAME}` in the texts of a value."""
        match value:
            case str():
                return re.sub(r"@\{(\w+)\}", lambda name: self.values.get(name[1], name[0]), value)
            case list():
                return [self.fill(item) for item in cast("list[Any]", value)]
            case dict():
                return {self.fill(key): self.fill(item) for key, item in cast("dict[str, Any]", value).items()}
            case _:
                return value


def read_session(path: Path) -> SessionFile:
    return msgspec.convert(tomllib.loads(path.read_text()), SessionFile)


def get_moment(step: Cancel | Kill) -> When:
    return step.cancel if isinstance(step, Cancel) else step.kill


def insert_kills(steps: list[Step]) -> list[Step]:
    """Insert a kill, and a prompt to go on, before each step of the model that follows tool calls of the same turn."""
    with_kills: list[Step] = []
    prompt: Prompt | None = None
    for step in steps:
        before = with_kills[-1] if with_kills else None
        if prompt and isinstance(step, Answer) and isinstance(before, Answer) and before.call:
            go_on = msgspec.structs.replace(prompt, user="Go on.", attach=[], asked=None, shown=[])
            with_kills += [Kill(When(request=True)), go_on]
        with_kills.append(step)
        prompt = step if isinstance(step, Prompt) else prompt
    return with_kills


def to_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def to_text(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in cast("list[dict[str, Any]]", content or []))


def shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 2000 else f"{text[:1000]} … {text[-1000:]}"


def check_text(where: str, text: str, holds: Texts, lacks: Texts) -> None:
    """Raise Fault if a text lacks one of some texts, or holds one of others."""
    for words in to_list(holds):
        if words not in text:
            raise Fault(f"{where} lacks {words!r}: {shorten(text)}")
    for words in to_list(lacks):
        if words in text:
            raise Fault(f"{where} holds {words!r}: {shorten(text)}")


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def to_transcript(updates: list[SessionUpdate], commands: bool = True) -> list[str]:
    """Convert updates to texts that are equal for a session that was watched and for one that was loaded.

    Texts that follow each other are one, each tool call is shown as it ended, and plans come last, as their place among
    calls that run at the same time varies. The tool calls of sub-agents are left out, as a load does not show them, and
    the output of commands if `commands` is false.
    """
    lines: list[tuple[str, str]] = []
    calls: dict[str, dict[str, Any]] = {}
    plans: list[str] = []
    for update in updates:
        match update:
            case AgentThoughtChunk(content=TextBlock(text="Interrupted here.\n")):
                pass  # a load says so of a reply that was cut
            case UserMessageChunk() | AgentMessageChunk() | AgentThoughtChunk():
                who = type(update).__name__.removesuffix("MessageChunk").removesuffix("Chunk")
                content = update.content
                text = content.text if isinstance(content, TextBlock) else msgspec.json.encode(content).decode()
                if lines and lines[-1][0] == who and who != "User":
                    text = lines.pop()[1] + text
                lines.append((who, text))
            case ToolCall() | ToolCallUpdate() if "/" not in update.tool_call_id:
                if update.tool_call_id not in calls:
                    calls[update.tool_call_id] = {}
                    lines.append(("Call", update.tool_call_id))
                known = {
                    name: getattr(update, name) for name in ("title", "name", "kind", "status", "content", "raw_input")
                }
                calls[update.tool_call_id] |= {k: v for k, v in known.items() if v is not msgspec.UNSET}
            case PlanUpdate():
                plans.append("Plan: " + " / ".join(f"{one.content} [{one.status}]" for one in update.entries))
            case _:
                pass
    return [
        *(f"{who}: {describe_call(calls[text], commands) if who == 'Call' else text}" for who, text in lines),
        *plans,
    ]


def describe_call(call: dict[str, Any], commands: bool) -> str:
    hidden = call.get("kind") == "execute" and not commands
    parts = [] if hidden else [describe_content(part) for part in call.get("content") or []]
    status = call.get("status")
    if status in ("pending", "in_progress") or (status == "failed" and parts in ([], [INTERRUPTED], [NOT_RUN])):
        return f"{call.get('name')}({call.get('raw_input')}) was interrupted"
    return "\n".join([f"{call.get('title')} ({call.get('kind')}, {status})", *parts])


def describe_content(part: Any) -> str:
    match part:
        case BlockContent(content=TextBlock(text=text)):
            lines = text.removeprefix("```\n").removesuffix("\n```").splitlines()
            return "\n".join(filter(None, lines))  # a load joins several texts to one, with an empty line between them
        case DiffContent():
            return f"{part.path}\n--- {part.old_text}\n+++ {part.new_text}"
        case _:
            return msgspec.json.encode(part).decode()


@pytest.fixture
def play_session(machine: "Machine") -> Any:
    """Return a function that plays a session file, and returns the play."""

    async def play_session(path: Path, *, kills: bool = False) -> Play:
        file = read_session(path)
        steps = insert_kills(file.parse_steps()) if kills else file.parse_steps()
        machine.env["PATH"] = f"{Path(sys.executable).parent}:{machine.env['PATH']}"
        machine.env["PYTHONDONTWRITEBYTECODE"] = "1"
        play = Play(file, steps, machine)
        problem = ""
        try:
            await play.run()
        except Fault as fault:
            problem = f"{path.name}: {fault}"
        if problem:
            pytest.fail(problem, pytrace=False)
        return play

    return play_session
