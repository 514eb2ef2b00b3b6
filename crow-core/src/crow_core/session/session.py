"""A session, one conversation with its client, its tools and its log; and the hooks by which extensions join it."""

import asyncio
import platform
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET
from msgspec.structs import asdict

from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    AvailableCommand,
    AvailableCommandInput,
    AvailableCommandsUpdate,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    NoticeUpdate,
    SessionInfoUpdate,
    SessionNotification,
    SessionUpdate,
    StopReason,
    TextBlock,
    ToolCallUpdate,
)
from crow_core.content import to_announcement, to_early_announcement
from crow_core.errors import ModelError
from crow_core.hooks import Collect, First, Hook, Observe, Pipe, Unwind
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages.message import Delta, Message, settle
from crow_core.messages.notes import Notes
from crow_core.messages.passes import find_shell
from crow_core.messages.view import View
from crow_core.models.model_call import Model, ModelCall, ModelRequest
from crow_core.models.reply import PartialCall
from crow_core.session.journal import TurnJournal
from crow_core.session.log import SessionLog, new_id
from crow_core.session.options import Option, SessionOptions
from crow_core.session.prompts import Prompt, SessionPrompts
from crow_core.session.store import Record, Store
from crow_core.session.user import Client, User
from crow_core.session_state import SessionState
from crow_core.trace import TRACE

MAX_CHANGES = 3
"""How often hooks may change one tool call."""
LONG_ARGUMENTS = 400
"""Characters of a tool call's arguments from which on the call is announced while the rest still arrives."""


@dataclass(frozen=True)
class Command:
    """A slash command. `run` receives the session and the text behind the command's name."""

    name: str
    description: str
    run: "Callable[[Session, str], Awaitable[str | Message]]"
    """Returns text, which ends the turn without a model call, or the user message to continue with."""
    hint: str = ""
    """A placeholder for the text behind the name, which clients show while the user types."""


@dataclass
class Folders:
    """The folders of a session, all absolute."""

    cwd: str
    """The working directory."""
    roots: list[str] = field(default_factory=list[str])
    """The file tools may read and change what is in these; the first is `cwd`."""
    readable: list[str] = field(default_factory=list[str])
    """The file tools may read what is in these."""
    current: str = ""
    """The folder in which the next command starts, if the last one changed its directory; empty for `cwd`."""
    starts: dict[str, str] = field(default_factory=dict[str, str])
    """The folders in which the commands of open tool calls start, by the calls' ids."""
    paths: dict[str, str] = field(default_factory=dict[str, str])
    """The files for which open tool calls are judged, absolute and without links, by the calls' ids."""
    environments: dict[str, Mapping[str, str | None]] = field(default_factory=dict[str, Mapping[str, str | None]])
    """Variables for the commands of open tool calls, by the calls' ids; None takes one away."""
    variables: Sequence[str] = ()
    """The names of the variables that commands have changed for those that follow."""
    environment: str = ""
    """The name of these variables as they are, new after each change; "" if there are none."""
    judged: dict[str, str] = field(default_factory=dict[str, str])
    """The `environment` for which rules or answers have allowed the commands of open tool calls, by the calls' ids."""
    _scratch: "tempfile.TemporaryDirectory[str] | None" = None

    def scratch(self) -> Path:
        """Return a temporary folder of the session, made at first use, for output that is too long for the model."""
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="crow-")
        return Path(self._scratch.name)

    def for_tools(self) -> list[str]:
        """List the folders in which the file tools may work: the roots, and the temporary folder."""
        return [*self.roots, self._scratch.name] if self._scratch else [*self.roots]

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._scratch is not None:
            with suppress(OSError):
                self._scratch.cleanup()


@dataclass
class Turns:
    """The turns of a session: one runs, others wait."""

    max_requests: int = 200
    """The most model calls that one turn may make."""
    tasks: "list[asyncio.Task[StopReason]]" = field(default_factory=list["asyncio.Task[StopReason]"])
    """The running turn and those that wait, in order; a turn that is ending is not in it and cannot be cancelled."""
    cancelled: "set[asyncio.Task[StopReason]]" = field(default_factory=set["asyncio.Task[StopReason]"])
    """Those that were cancelled. `Task.cancelling` does not tell: it counts the cancel scopes of libraries, too."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the running turn until it has ended."""
    is_first: bool = True
    """Whether no turn has started since the session was opened."""
    message: Message | None = None
    """The user's message of the running turn, as it arrived; before that, of the turn before."""
    requests: int = 0
    """The model calls of that turn so far."""
    id_known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client knows the session's id; it cannot understand an update before."""


class Session:
    """One conversation. Extensions receive it in every hook."""

    def __init__(
        self,
        hooks: "Hooks",
        client: Client,
        id: str,
        folders: Folders,
        models: Mapping[str, Model],
        prompts: Mapping[str, Prompt],
        *,
        max_requests: int = 200,
        parent: "Session | None" = None,
        store: Store | None = None,
    ) -> None:
        self.hooks = hooks
        """The app; its extensions have registered their functions here."""
        self.client = client
        self.id = id
        self.folders = folders
        self.cwd = folders.cwd
        """The working directory, absolute."""
        self.models = models
        """The models by the name that the user chooses; the first is the default."""
        self.model = next(iter(models.values()))
        """The model that is asked now."""
        self.log = SessionLog(
            on_message=partial(hooks.message.run, self) if hooks.message else None,
            on_draft=None if store is None else partial(store.write_draft, self),
            on_model_call=partial(hooks.model_call.run, self) if hooks.model_call else None,
            on_flush=None if store is None else partial(store.flush, self),
        )
        self.view = View(self.log)
        """The messages of the log for the next request, without the system prompt."""
        self.prompts = SessionPrompts(dict(prompts), self.log)
        self.toolbox = Toolbox()
        self.options = SessionOptions(partial(hooks.options.run, self), self.log)
        self.commands: dict[str, Command] = {}
        """Slash commands, by name."""
        self.user = User(client, id, self.log)
        self.stream = ReplyStream(self)
        self.turns = Turns(max_requests)
        self.journal = TurnJournal(self.log, self.view, self.toolbox)
        self.state = SessionState()
        """Values of extensions for this session. A store adds `Record.state`."""
        self.parent = parent
        """The session that this one works for, if it is a sub-agent's."""

    @property
    def secrets(self) -> set[str]:
        """All values that must be shown and stored nowhere."""
        return self.toolbox.secrets

    async def update(self, update: SessionUpdate) -> None:
        """Send the client an update, after everything before it has been written."""
        await self.log.written()
        await self.send(update)

    async def send(self, update: SessionUpdate) -> None:
        """Send the client an update without waiting for the log.

        For the end of a tool call, which must be sent even when writing has failed, and for notices.
        """
        await self.client.notify("session/update", SessionNotification(session_id=self.id, update=update))

    async def say(self, text: str, *, is_answer: bool = True) -> None:
        """Send the client a message that is not the model's.

        With `is_answer` false, it is a notice to a client that takes notices, so that it is not read as the answer to
        the prompt.
        """
        if not is_answer and self.takes_notices:
            await self.notice(text)
            return
        await self.update(AgentMessageChunk(content=TextBlock(text=text), message_id=new_id()))

    @property
    def takes_notices(self) -> bool:
        """True if the client takes notices."""
        wanted = self.client.capabilities.session
        return bool(wanted and wanted.notices)

    async def notice(self, title: str, severity: Literal["info", "warning", "error"] = "info") -> None:
        """Tell the user something that is not part of the conversation. Does not wait for the log."""
        if self.takes_notices:
            await self.send(NoticeUpdate(severity=severity, title=title))
        else:
            await self.send(AgentThoughtChunk(content=TextBlock(text=f"{title}\n"), message_id=new_id()))

    async def announce_options(self) -> None:
        """Tell the client that an option was changed by something else than the client."""
        if modes := self.options.to_modes():
            await self.update(CurrentModeUpdate(current_mode_id=modes.current_mode_id))
        await self.update(ConfigOptionUpdate(config_options=self.options.to_config_options(self.client.capabilities)))

    async def announce_commands(self) -> None:
        """Tell the client which slash commands there are."""
        commands = [
            AvailableCommand(
                name=command.name,
                description=command.description,
                input=AvailableCommandInput(hint=command.hint) if command.hint else UNSET,
            )
            for command in self.commands.values()
        ]
        await self.update(AvailableCommandsUpdate(available_commands=commands))

    async def ask_model(self, request: ModelRequest, purpose: str) -> ModelCall:
        """Ask the model something beside the conversation.

        The call is recorded; its answer is neither shown nor appended to the log. Raises ModelError.
        """
        model_call = ModelCall(self.model, request, purpose)
        try:
            await model_call.run(lambda delta: self.stream.report(delta, model_call))
        finally:
            self.log.record(model_call)
        return model_call

    async def request(self) -> ModelRequest:
        """Make the next request to the model.

        Its beginning never changes, so that servers can reuse their cache of it.
        """
        if self.prompts.system is None:
            self.prompts.system = await self.render_system_prompt()
        system: Message = {"role": "system", "content": self.prompts.system}
        tools: ModelRequest = {"tools": self.toolbox.sent} if self.toolbox.sent else {}
        request: ModelRequest = {**tools, "messages": [system, *self.view.messages()]}
        return await self.hooks.before_model.run(request, self)

    async def render_system_prompt(self) -> str:
        """Render the system prompt from its template and the instructions of the client and of extensions."""
        return self.prompts.render(
            self.prompts.templates["system"],
            "system",
            cwd=self.cwd,
            roots=[*self.folders.roots],
            platform=f"{platform.system()} {platform.machine()}",
            date=date.today().isoformat(),
            tools=[tool["function"]["name"] for tool in self.toolbox.sent or ()],
            instructions=[*self.prompts.instructions, *await self.hooks.instructions.run(self)],
        )

    async def set_title(self, title: str) -> None:
        """Give the session a name."""
        self.log.title = title
        self.log.append({"crow": {"kind": "title", "title": title}})
        await self.update(SessionInfoUpdate(title=title))

    def rewind(self, to: str, last: str = "", kept: Sequence[str] = ()) -> None:
        """Go to the entry with the id `to`, or to the start for "": the model no longer reads what follows it.

        `last` is the id of the last entry that is dropped, if it may be restored later; `kept` are the files that were
        not restored.
        """
        notes: Notes = {"kind": "rewind", "to": to}
        if last:
            notes["undone"] = last
        if kept:
            notes["kept"] = [*kept]
        self.log.append({"crow": notes})
        if not any(entry.get("crow", {}).get("purpose") == "system" for entry in self.view.entries()):
            self.prompts.system = None

    async def decide(self, tool_call: ToolCall) -> tuple[ToolCall, ToolResult | None]:
        """Ask `before_tool` about a tool call. Return the call as it runs, and the result that refuses it, if one does.

        The client is shown a call that a function has changed, and all functions decide about it again.
        """
        for _ in range(MAX_CHANGES + 1):
            answer = await self.hooks.before_tool.run(self, tool_call)
            if not isinstance(answer, ToolCall):
                return tool_call, answer
            tool_call = answer
            await self.update(ToolCallUpdate(tool_call_id=answer.id, title=answer.title, raw_input=answer.raw_input))
        return tool_call, ToolResult.error(f"This was not run: extensions changed it more than {MAX_CHANGES} times.")

    async def permit(self, tool_call: ToolCall) -> ToolResult | None:
        """Ask `before_tool` whether a tool may make this call of another server's tool. Return the refusal, or None."""
        decided, refusal = await self.decide(tool_call)
        if refusal is None and decided is not tool_call:
            return ToolResult.error("This was not run: an extension changed it.")
        return refusal

    def meta(self, tool_call: ToolCall, **more: Any) -> dict[str, Any]:
        """Make the `_meta` of a request to a tool. Servers that are not built in are sent the trace context only."""
        return {
            **TRACE.get(),
            "crow/session": self.id,
            "crow/call": tool_call.id,
            "crow/cwd": self.cwd,
            "crow/roots": self.folders.for_tools(),
            "crow/readable": self.folders.readable,
            "crow/folder": self.folders.starts.get(tool_call.id, ""),
            "crow/path": self.folders.paths.get(tool_call.id, ""),
            "crow/env": self.folders.environments.get(tool_call.id, {}),
            "crow/environment": self.folders.judged.get(tool_call.id),
            **more,
        }

    def restore(self, record: Record) -> None:
        """Continue from a stored session."""
        self.log.entries += record.log
        self.log.title, self.log.damage = record.title, record.damage
        self.prompts.system = record.system
        self.toolbox.restore(record.tools)
        self.state.update(record.state)
        self.folders.current = find_shell(record.log).get("folder", "")
        self.stream.used_ids |= {use["id"] for entry in record.log for use in entry.get("tool_calls", ())}

    async def close(self) -> None:
        """Finish writing, disconnect the session's servers, and remove its temporary folder."""
        await self.log.finish()
        await self.toolbox.close()
        self.folders.close()


class ReplyStream:
    """Shows the replies of a session's model and their tool calls to the client, and appends them to the log."""

    def __init__(self, session: Session) -> None:
        self.used_ids: set[str] = set()
        """The ids of all tool calls of the session so far."""
        self._session = session
        self._announced: set[str] = set()
        """The tool calls that the client was shown before all of their arguments had arrived."""
        self._examined: PartialCall | None = None
        """The last tool call with long arguments that `_announce_early` has seen."""

    async def show(self, delta: Delta, model_call: ModelCall) -> None:
        """Show a fragment of a reply, and let it be written soon."""
        session = self._session
        if "content" in delta or "reasoning_content" in delta:
            session.log.schedule_draft(model_call)
        if text := delta.get("reasoning_content"):
            await session.update(AgentThoughtChunk(content=TextBlock(text=text), message_id=model_call.id))
        if text := delta.get("content"):
            await session.update(AgentMessageChunk(content=TextBlock(text=text), message_id=model_call.id))
        if delta.get("tool_calls"):
            await self._announce_early(model_call.arriving.calls)
        await self.report(delta, model_call)

    async def report(self, delta: Delta, model_call: ModelCall) -> None:
        """Record that a request was sent, and show a notice about it; for any model call."""
        if "sent" in delta:
            self._session.log.record(model_call)
        if text := delta.get("notice"):
            await self._session.notice(text, "warning")

    async def _announce_early(self, calls: Sequence[PartialCall]) -> None:
        """Announce the last tool call of a reply if its arguments are long, and its id so far is one it can keep."""
        call = calls[-1]
        if call.length < LONG_ARGUMENTS or not call.id or call is self._examined:
            return
        self._examined = call
        ids = {call.id for call in calls}
        keeps_id = len(ids) == len(calls) and "" not in ids and self.used_ids.isdisjoint(ids)
        if keeps_id and not (tool_call := self._session.toolbox.parse(call.build())).is_valid:
            await self._session.log.written()
            self._announced.add(call.id)
            await self._session.send(to_early_announcement(tool_call))

    async def announce(self, tool_call: ToolCall) -> None:
        """Show a tool call that is about to run."""
        announcement = to_announcement(tool_call, self._session.cwd)
        if tool_call.id in self._announced:
            self._announced.discard(tool_call.id)
            await self._session.send(ToolCallUpdate(**asdict(announcement)))
        else:
            await self._session.send(announcement)

    async def fail_announced(self, kept: Set[str] = frozenset()) -> None:
        """Tell the client that the tool calls it was shown early will not run, but for those to be kept."""
        self.used_ids |= self._announced
        for id in self._announced - kept:
            self._announced.discard(id)
            await self._session.send(ToolCallUpdate(tool_call_id=id, status="failed"))

    async def append(self, model_call: ModelCall, *, whole: bool) -> None:
        """Append a reply to the log, unless it is empty. Its tool calls are kept only if it arrived `whole`."""
        log = self._session.log
        log.cancel_draft()
        notes: Notes = {"id": model_call.id}
        if not whole:
            notes["cut"] = model_call.error or model_call.finish_reason
        reply = settle(model_call.reply, used=self.used_ids, whole=whole)
        if called := self._session.toolbox.find_called(reply.get("tool_calls", [])):
            notes["called"] = called
        notes |= self._session.journal.count(model_call)
        if any(reply.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            reply["crow"] = reply.get("crow", Notes()) | notes
            log.append(reply)
        log.record(model_call)
        await self.fail_announced({use["id"] for use in reply.get("tool_calls", ())})


class Hooks:
    """Every hook of an app, with its contract and an example. `help(Crow.before_tool)` shows one of them."""

    session_start: Observe[[Session]] = Observe("""
        Called when a session has opened, while its MCP servers are starting.

            @crow.session_start
            def begin(session: Session) -> None:
                session.state[TURNS] = 0
        """)

    session_end: Unwind[[Session]] = Unwind("""
        Called when a session closes.

            @crow.session_end
            async def finish(session: Session) -> None:
                session.state.pop(TURNS)
        """)

    app_end: Unwind[[]] = Unwind("""
        Called when the app shuts down, after its last session has closed.

            @crow.app_end
            async def disconnect() -> None: ...
        """)

    mcp_servers: Collect[[Session], Sequence[Server]] = Collect("""
        Returns MCP servers to connect for a session.

            @crow.mcp_servers
            def weather(session: Session) -> list[Server]:
                return [Server("weather", lambda: "http://localhost:9000/mcp")]
        """)

    tools: Pipe[list[dict[str, Any]], [Session]] = Pipe("""
        Receives the tool list at the start of a turn, as it will be sent; may return another list.

        Keep tools that were sent once: a changed list makes the server process the whole prompt again.

            @crow.tools
            def leave_out(schemas: list[dict], session: Session) -> list[dict]:
                return [schema for schema in schemas if schema["function"]["name"] != "terminal"]
        """)

    instructions: Collect[[Session], str] = Collect("""
        Returns text for the system prompt; called once a session.

            @crow.instructions
            def style(session: Session) -> str:
                return "Answer in British English."
        """)

    before_prompt: Pipe[Message, [Session]] = Pipe("""
        Receives the user's message before it enters the log; may return another message, or raise EndTurn.

        A message that joins a running turn has the note `steer` (`message["crow"]["steer"]`).

            @crow.before_prompt
            def greet(message: Message, session: Session) -> None:
                if message.get("content") == "ping":
                    raise EndTurn("end_turn", "pong")
        """)

    turn_resume: Observe[[Session, Sequence[Message]]] = Observe("""
        Called instead of `before_prompt` when an interrupted turn goes on, with the turn's entries so far.

        Another process may have begun the turn, so derive counts of the turn from the entries.

            @crow.turn_resume
            def count(session: Session, entries: list[Message]) -> None:
                session.state[REPLIES] = sum(entry.get("role") == "assistant" for entry in entries)
        """)

    before_model: Pipe[ModelRequest, [Session]] = Pipe("""
        Receives the request to the model before crow sends it; may return another request, or raise EndTurn.

            @crow.before_model
            def cool_down(request: ModelRequest, session: Session) -> ModelRequest:
                return {"temperature": 0, **request}
        """)

    after_model: Observe[[Session, ModelCall]] = Observe("""
        Called when a reply is complete and all its tool calls are answered. May raise EndTurn.

            @crow.after_model
            def count(session: Session, model_call: ModelCall) -> None:
                print(model_call.usage)
        """)

    before_announcement: Observe[[Session, ToolCall]] = Observe("""
        Called with each tool call of a complete reply, before the client is shown the call.

        An entry that you append to the log here is stored together with the reply. Do not wait for anybody here.

            @crow.before_announcement
            def note(session: Session, tool_call: ToolCall) -> None:
                session.log.append({"crow": {"kind": "note", "tool": tool_call.name}})
        """)

    before_tool: First[[Session, ToolCall], ToolResult | ToolCall] = First("""
        Decides whether a tool call runs. Return a ToolResult to refuse the call: the model receives it as the answer.

        Return `tool_call.change_arguments(…)` to run the call with other arguments. The user is shown the changed call,
        and all functions are called again to decide about it.

        A function only judges; the work of a tool is done by its server or its handler (`Server.handlers`). Extensions
        that ask the user register with `before_tool.last`, so that a call that is refused here is not asked about.

        A tool that passes the model's text to another server asks first whether it may, with the call of that server's
        tool: `session.permit(its_call)` returns the refusal, or None. So a function may be called more than once for a
        call.

            @crow.before_tool
            async def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
                return ToolResult.error("Reading only.") if tool_call.kind != "read" else None
        """)

    must_ask: Collect[[Session, ToolCall], str] = Collect("""
        Returns why the user must be asked about a tool call, whatever allows it; the question shows the text.

        `permissions` calls it for each call that it does not deny, in every mode but yolo, and asks one question with
        all texts. It may be called more than once for a call, and must not wait for anybody.

            @crow.must_ask
            def guard(session: Session, tool_call: ToolCall) -> str | None:
                return "It is late." if tool_call.name == "deploy" else None
        """)

    after_tool: Pipe[ToolResult, [Session, ToolCall]] = Pipe("""
        Receives the result of a tool call before the client and the model do; may return another.

            @crow.after_tool
            def shorten(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult:
                return ToolResult(result.content[:1], result.is_error, result.meta)
        """)

    message: Observe[[Session, Message]] = Observe("""
        Called for each entry that was appended to the log, a message or a marker, in order.

        The client is shown what follows only when all functions have returned.

            @crow.message
            async def write(session: Session, entry: Message) -> None:
                print(session.id, entry.get("role", "marker"))
        """)

    model_call: Observe[[Session, ModelCall]] = Observe("""
        Called when a request to a model has been sent, and again when it has ended (`model_call.ended`) or failed.

        Unlike `after_model`, it is also called for requests beside the conversation, such as a summary.

            @crow.model_call
            def log_call(session: Session, model_call: ModelCall) -> None:
                print(model_call.purpose, model_call.error or model_call.finish_reason)
        """)

    model_error: First[[Session, ModelError], bool] = First("""
        Called when a request of a turn failed; True makes the request again and sends it.

            @crow.model_error
            async def shorten(session: Session, error: ModelError) -> bool | None:
                return True if error.too_long else None
        """)

    before_end: First[[Session, StopReason], Message] = First("""
        Called when the model is done. Return a user message to make the turn go on.

            @crow.before_end
            def remind(session: Session, stop_reason: StopReason) -> Message | None:
                return {"role": "user", "content": "Run the tests."} if not session.state.pop(TESTED) else None
        """)

    turn_end: Unwind[[Session, StopReason | Exception]] = Unwind("""
        Called when a turn has ended, with its stop reason or with the exception that ended it.

            @crow.turn_end
            def report(session: Session, outcome: StopReason | Exception) -> None:
                print("the turn ended:", outcome)
        """)

    commands: Collect[[Session], Sequence[Command]] = Collect("""
        Returns the slash commands of a session.

            @crow.commands
            def hello(session: Session) -> list[Command]:
                async def run(session: Session, words: str) -> str:
                    return f"Hello, {words}."

                return [Command("hello", "Say hello", run, hint="[name]")]
        """)

    options: Collect[[Session], Option] = Collect("""
        Returns a setting of a session that its user can change; the most important first.

            @crow.options
            def loudness(session: Session) -> Option:
                def get() -> str:
                    return session.state[LOUDNESS]

                def choose(value: str) -> None:
                    session.state[LOUDNESS] = value

                return Option("loud", "Loud", "_loud", ON_OFF, get, choose, is_switch=True)
        """)

    def seal(self) -> None:
        """Refuse further registrations: a function that is registered now has missed calls."""
        for name, hook in vars(Hooks).items():
            if isinstance(hook, Hook):
                getattr(self, name).closed = True
