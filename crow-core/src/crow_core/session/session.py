"""A session, one conversation with its client, its tools and its log; and the hooks by which extensions join it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET

from crow_core.acp.complete_method import Completion
from crow_core.acp.schema import (
    AvailableCommand,
    AvailableCommandInput,
    AvailableCommandsUpdate,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    SessionInfoUpdate,
    StopReason,
    ToolCallUpdate,
)
from crow_core.errors import ModelError
from crow_core.hooks import Collect, First, Hook, Observe, Pipe, Unwind
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages.message import Message
from crow_core.messages.notes import Notes
from crow_core.messages.view import View
from crow_core.models.model_call import Model, ModelCall, ModelRequest
from crow_core.session.folders import Folders
from crow_core.session.journal import TurnJournal
from crow_core.session.log import SessionLog
from crow_core.session.options import Option, SessionOptions
from crow_core.session.prompts import Prompt, SessionPrompts
from crow_core.session.reply_stream import ReplyStream
from crow_core.session.updates import SessionUpdates
from crow_core.session.user import Client, User
from crow_core.session_state import SessionState
from crow_core.trace import TRACE

MAX_CHANGES = 3
"""The number of times that hooks may change one tool call."""


@dataclass(frozen=True)
class Command:
    """A slash command. `run` receives the session and the text behind the command's name."""

    name: str
    description: str
    run: "Callable[[Session, str], Awaitable[str | Message]]"
    """Returns text, which ends the turn without a model call, or the user message to continue with."""
    hint: str = ""
    """A placeholder for the text behind the name, which clients show while the user types."""
    complete: "Callable[[Session, str], Awaitable[Sequence[Completion]]] | None" = None
    """Receives the text behind the name, as far as it is typed, and returns the texts that may follow."""


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
    """True if no turn has started since the session was opened."""
    message: Message | None = None
    """The user's message of the running turn, as it arrived; before that, of the turn before."""
    requests: int = 0
    """The model calls of that turn so far."""
    id_known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client knows the session's id; it cannot understand an update before."""


class Session(SessionUpdates):
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
    ) -> None:
        self.hooks = hooks
        """The app; its extensions have registered their functions here."""
        log = SessionLog(
            on_message=partial(hooks.message.run, self) if hooks.message else None,
            on_model_call=partial(hooks.model_call.run, self) if hooks.model_call else None,
        )
        super().__init__(client, id, log)
        self.folders = folders
        self.cwd = folders.cwd
        """The working directory, absolute."""
        self.models = models
        """The models by the name that the user chooses; the first is the default."""
        self.model = next(iter(models.values()))
        """The model that is asked now."""
        self.view = View(self.log)
        """The messages of the log for the next request, without the system prompt."""
        self.prompts = SessionPrompts(dict(prompts), self.log)
        self.toolbox = Toolbox()
        self.options = SessionOptions(partial(hooks.options.run, self), self.log)
        self.commands: dict[str, Command] = {}
        """Slash commands, by name."""
        self.user = User(client, id, self.log, partial(hooks.question.run, self) if hooks.question else None)
        self.turns = Turns(max_requests)
        self.journal = TurnJournal(self.log, self.view, self.toolbox)
        self.stream = ReplyStream(self, self.toolbox, self.journal, folders.cwd)
        self.state = SessionState()
        """Values of extensions for this session. A store adds `Record.state`."""
        self.parent = parent
        """The session that this one works for, if it is a sub-agent's."""

    @property
    def secrets(self) -> set[str]:
        """All values that must be shown and stored nowhere."""
        return self.toolbox.secrets

    async def announce_options(self) -> None:
        """Tell the client that an option was changed by something else than the client."""
        if modes := self.options.to_modes():
            await self.update(CurrentModeUpdate(current_mode_id=modes.current_mode_id))
        await self.update(ConfigOptionUpdate(config_options=self.options.to_config_options(self.client.capabilities)))

    async def announce_commands(self) -> None:
        """Tell the client which slash commands there are."""
        await self.update(AvailableCommandsUpdate(available_commands=self.list_commands()))

    def list_commands(self) -> list[AvailableCommand]:
        """List the slash commands as clients show them."""
        return [
            AvailableCommand(
                name=command.name,
                description=command.description,
                input=AvailableCommandInput(hint=command.hint) if command.hint else UNSET,
            )
            for command in self.commands.values()
        ]

    async def ask_model(self, request: ModelRequest, purpose: str) -> ModelCall:
        """Ask the model something that is recorded, but neither shown nor appended to the log. Raises ModelError."""
        model_call = ModelCall(self.model, request, purpose)
        try:
            await model_call.run(lambda delta: self.stream.report(delta, model_call))
        finally:
            self.log.record(model_call)
        return model_call

    async def request(self) -> ModelRequest:
        """Make the next request to the model. Its beginning never changes, so that servers can reuse their cache."""
        return await self.hooks.before_model.run(await self.draft_request(), self)

    async def draft_request(self) -> ModelRequest:
        """Make the next request as far as it is known before `before_model`: the system prompt, the tools, the log."""
        if self.prompts.system is None:
            more = await self.hooks.instructions.run(self)
            self.prompts.render_system(self.cwd, self.folders.roots, self.toolbox.sent or (), more)
        system: Message = {"role": "system", "content": self.prompts.system}
        tools: ModelRequest = {"tools": self.toolbox.sent} if self.toolbox.sent else {}
        return {**tools, "messages": [system, *self.view.messages()]}

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

        The client is shown a call that a function has changed, and all functions decide about it again. A call that its
        server already runs as a task is decided.
        """
        if self.journal.find_task(tool_call.id):
            return tool_call, None
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
            **self.folders.meta(tool_call.id),
            **more,
        }

    async def close(self) -> None:
        """Finish writing, disconnect the session's servers, and remove its temporary folder."""
        await self.log.finish()
        await self.toolbox.close()
        self.folders.close()


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
        Receives the tool list at the start of a turn; may return another list.

        Keep the tools that were sent before: after a change, the server processes the whole prompt again.

            @crow.tools
            def leave_out(schemas: list[dict], session: Session) -> list[dict]:
                return [schema for schema in schemas if schema["function"]["name"] != "terminal"]
        """)

    instructions: Collect[[Session], str] = Collect("""
        Returns text for the system prompt, once a session.

            @crow.instructions
            def style(session: Session) -> str:
                return "Answer in British English."
        """)

    before_prompt: Pipe[Message, [Session]] = Pipe("""
        Receives the user's message before it enters the log; may return another message, or raise EndTurn.

        A message to a running turn has the note `steer` (`message["crow"]["steer"]`).

            @crow.before_prompt
            def greet(message: Message, session: Session) -> None:
                if message.get("content") == "ping":
                    raise EndTurn("end_turn", "pong")
        """)

    turn_resume: Observe[[Session, Sequence[Message]]] = Observe("""
        Called instead of `before_prompt` when an interrupted turn continues; receives the turn's entries so far.

        Another process may have begun the turn, so count from the entries.

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
        Called when a reply is complete and all its tool calls are answered; may raise EndTurn.

            @crow.after_model
            def count(session: Session, model_call: ModelCall) -> None:
                print(model_call.usage)
        """)

    before_announcement: Observe[[Session, ToolCall]] = Observe("""
        Called for each tool call of a reply, before the client is shown the complete call.

        Entries that you append to the log here are stored together with the reply. Do not wait here.

            @crow.before_announcement
            def note(session: Session, tool_call: ToolCall) -> None:
                session.log.append({"crow": {"kind": "note", "tool": tool_call.name}})
        """)

    before_tool: First[[Session, ToolCall], ToolResult | ToolCall] = First("""
        Decides whether a tool call runs. Return a ToolResult to refuse the call: the model receives it as the answer.

        Return `tool_call.change_arguments(…)` to run the call with other arguments. The client shows the changed call,
        and all functions decide again.

        Do not do a tool's work here: its server or its handler (`Server.handlers`) does it. To ask the user, register
        with `before_tool.last`, so that other extensions can refuse the call first.

        Before a tool passes the model's text to another server, it calls `session.permit` with the call of that
        server's tool. `permit` returns the refusal, or None. So a function may be called more than once for a call.

            @crow.before_tool
            async def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
                return ToolResult.error("Reading only.") if tool_call.kind != "read" else None
        """)

    must_ask: Collect[[Session, ToolCall], str] = Collect("""
        Returns a reason to ask the user about a tool call, even if a rule allows the call.

        `permissions` calls it for each call that it does not deny, except in yolo. One question shows all reasons.
        A function may be called more than once for a call. Do not wait here.

            @crow.must_ask
            def guard(session: Session, tool_call: ToolCall) -> str | None:
                return "It is late." if tool_call.name == "deploy" else None
        """)

    after_tool: Pipe[ToolResult, [Session, ToolCall]] = Pipe("""
        Receives the result of a tool call before the client and the model do; may return another result.

            @crow.after_tool
            def shorten(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult:
                return ToolResult(result.content[:1], result.is_error, result.meta)
        """)

    message: Observe[[Session, Message]] = Observe("""
        Called for each entry of the log, a message or a marker, in order.

        Return soon: the client sees nothing further until all functions have returned.

            @crow.message
            async def write(session: Session, entry: Message) -> None:
                print(session.id, entry.get("role", "marker"))
        """)

    model_call: Observe[[Session, ModelCall]] = Observe("""
        Called when crow has sent a request to a model, and again when it ended (`model_call.ended`) or failed.

        Unlike `after_model`, it is also called for requests outside the conversation, such as a summary.

            @crow.model_call
            def log_call(session: Session, model_call: ModelCall) -> None:
                print(model_call.purpose, model_call.error or model_call.finish_reason)
        """)

    model_error: First[[Session, ModelError], bool] = First("""
        Called when a request of a turn failed. Return True to make the request anew and send it.

            @crow.model_error
            async def shorten(session: Session, error: ModelError) -> bool | None:
                return True if error.too_long else None
        """)

    question: Observe[[Session, str]] = Observe("""
        Called when the user is asked something, with the question in a line. An answer cancels what still runs.

            @crow.question
            async def tell(session: Session, text: str) -> None: ...
        """)

    before_end: First[[Session, StopReason], Message] = First("""
        Called when the model is done. Return a user message to continue the turn.

            @crow.before_end
            def remind(session: Session, stop_reason: StopReason) -> Message | None:
                return {"role": "user", "content": "Run the tests."} if not session.state.pop(TESTED) else None
        """)

    turn_end: Unwind[[Session, StopReason | Exception]] = Unwind("""
        Called when a turn has ended; receives its stop reason, or the exception that ended it.

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
        Returns an option of a session, which the user can change.

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
