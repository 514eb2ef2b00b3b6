"""One conversation, and the moments at which extensions may join it."""

import asyncio
import platform
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, Protocol, TypeVar

from msgspec import UNSET, Struct

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    AvailableCommand,
    AvailableCommandInput,
    AvailableCommandsUpdate,
    CancelledOutcome,
    ClientCapabilities,
    CompleteElicitationNotification,
    ConfigOptionUpdate,
    CreateElicitationRequest,
    CreateElicitationResponse,
    CurrentModeUpdate,
    ElicitationSchema,
    NoticeUpdate,
    PermissionOption,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionConfigOption,
    SessionInfoUpdate,
    SessionMode,
    SessionModeState,
    SessionNotification,
    SessionUpdate,
    StopReason,
    TextBlock,
    ToolCallFields,
    ToolCallUpdate,
)
from crow_core.content import to_early_announcement
from crow_core.elicitation import Answer, can_ask, check_form, check_page, checked
from crow_core.errors import ElicitationError, EndTurn, ModelError
from crow_core.hooks import Collect, First, Observe, Pipe
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolResult
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages import Delta, Message, ToolUse, View, drop_rewound, marker_kind, parse_arguments, settle
from crow_core.models.chat import Model, ModelCall, ModelRequest
from crow_core.options import Option, to_config_option
from crow_core.prompts import Prompt
from crow_core.store import Page, Record
from crow_core.trace import TRACE

W = TypeVar("W")

DRAFT_AFTER = 0.2
"""Seconds after which text that was shown is written down, while its reply still streams."""
LONG = 400
"""Characters of a call's arguments from which on it is shown, while the rest of them still streams."""


def new_id() -> str:
    """128 random bits, in hexadecimal."""
    return token_hex(16)


class Client(Protocol):
    """Who looks at a session: an editor, a terminal, a program; the client's side of an ACP connection."""

    capabilities: ClientCapabilities

    async def request(self, method: str, params: Struct) -> Any:
        """Ask the client. Raises RpcError."""
        ...

    async def notify(self, method: str, params: Struct) -> None:
        """Tell the client; returns when there is room for more."""
        ...


@dataclass(frozen=True)
class Command:
    """A slash command. `run` receives the session and the words after the command's name."""

    name: str
    description: str
    run: "Callable[[Session, str], Awaitable[str | Message]]"
    """Gives a text that ends the turn without asking the model, or the user message to go on with."""
    hint: str = ""
    """What may follow the name, shown while the user types."""


class Hooks:
    """The moments. A function registered at one is called with what the moment's type says."""

    def __init__(self) -> None:
        self.session_start = Observe[[Session]]()
        """A session has opened; its servers are starting."""
        self.session_end = Observe[[Session]]()
        """A session closes; last registered first, and all run."""
        self.app_end = Observe[[]]()
        """The app ends, after its last session; last registered first, and all run."""
        self.mcp_servers = Collect[[Session], Sequence[Server]]()
        """Servers to connect for a session."""
        self.tools = Pipe[list[dict[str, Any]], [Session]]()
        """The tool list before it is frozen, at a turn's start; may replace it. What was sent once should stay."""
        self.instructions = Collect[[Session], str]()
        """Text for the system prompt, asked for once a session."""
        self.before_prompt = Pipe[Message, [Session]]()
        """The user's message before it is appended; may replace it, or raise EndTurn."""
        self.before_model = Pipe[ModelRequest, [Session]]()
        """The request before it is sent; may replace it."""
        self.after_model = Observe[[Session, ModelCall]]()
        """A reply is complete and its tool calls, if any, are answered."""
        self.before_tool = First[[Session, ToolUse], ToolResult]()
        """A call before it runs; an answer given here stands in for the tool's."""
        self.after_tool = Pipe[ToolResult, [Session, ToolUse]]()
        """A result before the client and the model see it; may replace it."""
        self.message = Observe[[Session, Message]]()
        """The entry just appended to the log: a message, or a marker. What follows is shown only when all have run."""
        self.draft = Observe[[Session, Message]]()
        """The reply so far, under the id it will keep; at most every 250 ms while it streams."""
        self.model_call = Observe[[Session, ModelCall]]()
        """A request to a model has been sent, or (`call.ended`) has come to its end, well or not."""
        self.model_error = First[[Session, ModelError], bool]()
        """A request of the loop came to nothing; True makes it anew and asks once more."""
        self.before_end = First[[Session, StopReason], Message]()
        """The model is done; a user message given here makes the turn go on."""
        self.turn_end = Observe[[Session, StopReason | Exception]]()
        """The turn is over, well or not; last registered first, and all run."""
        self.commands = Collect[[Session], Sequence[Command]]()
        """Slash commands."""
        self.options = Collect[[Session], Option]()
        """Settings of a session, the most important first."""
        self.load_session = First[[str], Record]()
        """The stored session of that id, and from now on this process's; None when there is none. Raises StoreError,
        SessionBusy when another process has it open."""
        self.fork_session = First[[str, str, str], Record]()
        """A new session, under the second id, that goes on from a stored one: from its end, or from the entry whose id
        is the third. None when there is no such session. Raises StoreError."""
        self.list_sessions = First[[str, str, int], Page]()
        """The stored sessions of a folder ("" for all), from a cursor on ("" for the start), at most so many. Raises
        StoreError; ValueError for a cursor it never gave."""
        self.delete_session = Observe[[str]]()
        """Forget a stored session; an unknown id is fine. Raises StoreError."""

    def seal(self) -> None:
        """Take no more functions: from now on a latecomer would miss moments that have passed."""
        for hook in vars(self).values():
            if isinstance(hook, Observe | Collect | First | Pipe):
                hook.closed = True


@dataclass(eq=False)
class Session:
    """One conversation: its log, its tools, and the client that looks at it."""

    hooks: Hooks
    """The app's; its extensions join in here."""
    client: Client
    id: str
    cwd: str
    models: Mapping[str, Model]
    """By the name a user picks; the first is the default."""
    prompts: dict[str, Prompt]
    """The templates by name; `system` is the system prompt's."""
    roots: list[str] = field(default_factory=list[str])
    """Absolute folders the file tools may touch; the first is `cwd`."""
    readable: list[str] = field(default_factory=list[str])
    """Absolute folders that the file tools may look into, beside `roots`, and not change."""
    brought: Sequence[Server] = ()
    """MCP servers that the client named."""
    instructions: list[str] = field(default_factory=list[str])
    """The client's own, for the system prompt; they come before those of extensions."""
    log: list[Message] = field(default_factory=list[Message])
    """Messages and markers; only ever appended to."""
    toolbox: Toolbox = field(default_factory=Toolbox)
    max_requests: int = 200
    """Model requests a turn may take."""
    system: str | None = None
    """The system prompt, rendered once, at the first request."""
    tools: list[dict[str, Any]] | None = None
    """The tool list as it is sent; it changes only between turns, behind a marker. None before the first turn."""
    title: str = ""
    """What a list calls it; empty until it has a name."""
    damage: str = ""
    """What of it could not be restored, as a sentence."""
    fresh: bool = True
    """No turn has begun since it was opened."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """What extensions keep for this session, each under its own name."""
    options: list[Option] = field(default_factory=list[Option])
    commands: dict[str, Command] = field(default_factory=dict[str, Command])
    announced: set[str] = field(default_factory=set[str])
    """The calls that the client sees although not all of their arguments have come."""
    turns: "list[asyncio.Task[StopReason]]" = field(default_factory=list["asyncio.Task[StopReason]"])
    """The running turn and those that wait for it, in order; a turn that is ending can no longer be cancelled."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the running turn until it has ended."""
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client has learnt the session's id; before, it understands no update of it."""
    model: Model = field(init=False)
    """The one that is asked."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a permission is asked for: one at a time."""
    _view: View = field(default_factory=View)
    _drafting: asyncio.TimerHandle | None = None
    _call_ids: set[str] = field(default_factory=set[str])
    _writing: "asyncio.Task[None] | None" = None
    _scratch: "tempfile.TemporaryDirectory[str] | None" = None

    def __post_init__(self) -> None:
        self.model = next(iter(self.models.values()))

    def append(self, entry: Message) -> None:
        """Extend the log at once, and let the `message` hooks write it down behind; `written` waits for them."""
        entry.setdefault("crow", {}).setdefault("id", new_id())
        self.log.append(entry)
        if self.hooks.message:
            self._write(self.hooks.message.run, entry)

    def _write(self, hooks: "Callable[[Session, W], Awaitable[None]]", what: W) -> None:
        """Run hooks that write down, behind all that is to be written before."""
        self._writing = asyncio.ensure_future(self._behind(self._writing, hooks, what))

    async def _behind(
        self, before: "asyncio.Task[None] | None", hooks: "Callable[[Session, W], Awaitable[None]]", what: W
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await hooks(self, what)
        finally:
            if before is not None:
                before.result()  # whoever waits for this hears the first failure

    async def written(self) -> None:
        """Wait until everything has been written down; raises what one of the hooks raised."""
        if (writing := self._writing) is not None:
            try:
                await asyncio.shield(writing)
            finally:
                if writing.done() and self._writing is writing:
                    self._writing = None

    async def flush(self) -> None:
        """The same without raising: a failure has been heard, what follows starts afresh."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait([writing])
            writing.exception()

    async def update(self, update: SessionUpdate) -> None:
        """Show the client something, after everything before it has been written down."""
        if self._writing is not None:
            await self.written()
        await self.send(update)

    async def send(self, update: SessionUpdate) -> None:
        """Show the client something although nothing may be written any more: that a call has come to its end."""
        await self.client.notify("session/update", SessionNotification(session_id=self.id, update=update))

    async def say(self, text: str) -> None:
        """Show the client a message that is not the model's."""
        await self.update(AgentMessageChunk(content=TextBlock(text=text), message_id=new_id()))

    async def notice(self, title: str, severity: Literal["info", "warning", "error"] = "info") -> None:
        """Tell the person something that is no part of the conversation."""
        wanted = self.client.capabilities.session
        if wanted and wanted.notices:
            await self.update(NoticeUpdate(severity=severity, title=title))
        else:
            await self.update(AgentThoughtChunk(content=TextBlock(text=f"{title}\n"), message_id=new_id()))

    async def elicit(
        self, message: str, *, form: ElicitationSchema | None = None, url: str = "", call: str = ""
    ) -> Answer:
        """Ask the person to fill in a form, or to visit a page; `call` is the id of the tool call it is for.

        Waits as long as it takes; the question is withdrawn when whoever waits is cancelled. Raises ElicitationError
        where the client cannot ask so, or what it answers does not fit.
        """
        if not can_ask(self.client.capabilities, "form" if form else "url"):
            raise ElicitationError(f"The client cannot {'show forms' if form else 'send a person to a page'}.")
        id = "" if form else new_id()
        if form:
            check_form(message, form)
        else:
            check_page(url)
        request = CreateElicitationRequest(
            message=message,
            mode="form" if form else "url",
            session_id=self.id,
            tool_call_id=call or UNSET,
            requested_schema=form or UNSET,
            url=url or UNSET,
            elicitation_id=id or UNSET,
        )
        await self.written()
        try:
            response: CreateElicitationResponse = await self.client.request("elicitation/create", request)
        except (RpcError, ConnectionClosed) as error:
            raise ElicitationError(f"The client did not ask: {error}") from error
        match response.action:
            case "accept":
                return Answer("accept", checked(response.content or {}, form) if form else {}, id)
            case "decline":
                return Answer("decline")
            case _:
                return Answer("cancel")

    async def ask_permission(self, about: ToolCallFields, options: Sequence[PermissionOption]) -> str:
        """Ask the person to choose one of a permission's options; gives its id, or "".

        Raises ElicitationError where the client does not ask, EndTurn when it answers that the turn is cancelled.
        """
        request = RequestPermissionRequest(session_id=self.id, tool_call=about, options=[*options])
        try:
            async with self._asking:
                await self.written()
                response: RequestPermissionResponse = await self.client.request("session/request_permission", request)
        except (RpcError, ConnectionClosed) as error:
            raise ElicitationError(f"the client did not ask: {error}") from error
        match response.outcome:
            case CancelledOutcome():
                raise EndTurn("cancelled")
            case SelectedOutcome(option_id=id):
                return id
            case _:
                return ""

    async def ask_choice(self, about: ToolCallFields, choices: Sequence[str]) -> int | None:
        """Ask for one of some choices through a client that knows only permissions; gives its place, None for none.

        Raises as `ask_permission` does.
        """
        options = [PermissionOption(option_id=str(n), name=name, kind="allow_once") for n, name in enumerate(choices)]
        options.append(PermissionOption(option_id="none", name="None of these", kind="reject_once"))
        id = await self.ask_permission(about, options)
        return int(id) if id.isdecimal() and int(id) < len(choices) else None

    async def complete(self, id: str) -> None:
        """Tell the client that what a page was visited for is done; `id` is the answer's."""
        await self.client.notify("elicitation/complete", CompleteElicitationNotification(elicitation_id=id))

    def _note(self, call: ModelCall) -> None:
        """Have it written down what a model was asked, or answered."""
        if self.hooks.model_call:
            self._write(self.hooks.model_call.run, call)

    async def show_delta(self, delta: Delta, call: ModelCall) -> None:
        """Show a fragment of a reply, and see to it that it is soon written down."""
        if self.hooks.draft and self._drafting is None and ("content" in delta or "reasoning_content" in delta):
            self._drafting = asyncio.get_running_loop().call_later(DRAFT_AFTER, self._draft, call)
        if text := delta.get("reasoning_content"):
            await self.update(AgentThoughtChunk(content=TextBlock(text=text), message_id=call.id))
        if text := delta.get("content"):
            await self.update(AgentMessageChunk(content=TextBlock(text=text), message_id=call.id))
        if delta.get("tool_calls"):
            await self._begin(call.reply.get("tool_calls", []))
        await self._hear(delta, call)

    async def _hear(self, delta: Delta, call: ModelCall) -> None:
        """What is to be said and written down of a fragment of any call."""
        if "sent" in delta:
            self._note(call)
        if text := delta.get("notice"):
            await self.notice(text, "warning")

    async def _begin(self, calls: Sequence[ToolUse]) -> None:
        """Show the latest call of a reply if its arguments take long, and the id it has so far is one it can keep."""
        use, ids = calls[-1], {use["id"] for use in calls}
        if len(use["function"]["arguments"]) < LONG or use["id"] in self.announced:
            return
        own = len(ids) == len(calls) and "" not in ids and self._call_ids.isdisjoint(ids)
        if own and parse_arguments(use) is None:
            await self.written()
            self.announced.add(use["id"])
            await self.send(to_early_announcement(use, self.toolbox.kind(use), self.toolbox.title(use)))

    async def fail_announced(self) -> None:
        """Tell the client that the calls it saw begin will not run."""
        self._call_ids |= self.announced
        while self.announced:
            await self.send(ToolCallUpdate(tool_call_id=self.announced.pop(), status="failed"))

    async def ask_model(self, request: ModelRequest, purpose: str) -> ModelCall:
        """Ask the model something beside the conversation: the call is written down, its answer is neither shown nor
        kept in the log. Raises ModelError."""
        call = ModelCall(self.model, request, purpose)
        try:
            await call.run(lambda delta: self._hear(delta, call))
        finally:
            self._note(call)
        return call

    def _draft(self, call: ModelCall) -> None:
        self._drafting = None
        texts = {key: text for key in ("reasoning_content", "content") if (text := call.reply.get(key))}
        self._write(self.hooks.draft.run, Message(role="assistant", **texts, crow={"id": call.id}))

    def append_reply(self, call: ModelCall, *, whole: bool) -> None:
        """Append a reply to the log, unless it is empty. Its calls are kept only when it came whole."""
        if self._drafting is not None:
            self._drafting.cancel()
            self._drafting = None
        notes: dict[str, Any] = {"id": call.id}
        if not whole:
            notes["cut"] = call.error or call.finish_reason
        reply = settle(call.reply, used=self._call_ids, whole=whole)
        if any(reply.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            reply["crow"] = reply.get("crow", {}) | notes
            self.append(reply)
        self._note(call)

    async def set_title(self, title: str) -> None:
        """Give the session a name."""
        self.title = title
        self.append({"crow": {"kind": "title", "title": title}})
        await self.update(SessionInfoUpdate(title=title))

    def rewind(self, to: str) -> None:
        """Go back to an entry: what follows it is not the model's to read any more. "" goes back to the start."""
        self.append({"crow": {"kind": "rewind", "to": to}})
        if not any(entry.get("crow", {}).get("purpose") == "system" for entry in drop_rewound(self.log)):
            self.system = None  # its render was taken back, too

    async def request(self) -> ModelRequest:
        """The next request to the model. What it begins with never changes, so that servers can reuse their cache."""
        if self.system is None:
            self.system = await self.render_system()
        system: Message = {"role": "system", "content": self.system}
        tools: ModelRequest = {"tools": self.tools} if self.tools else {}
        request: ModelRequest = {**tools, "messages": [system, *self._view.messages(self.log)]}
        return await self.hooks.before_model.run(request, self)

    async def render_system(self) -> str:
        """The system prompt, from the app's template and the extensions' instructions."""
        return self.render(
            self.prompts["system"],
            "system",
            cwd=self.cwd,
            roots=self.roots,
            platform=f"{platform.system()} {platform.machine()}",
            date=date.today().isoformat(),
            tools=[tool["function"]["name"] for tool in self.tools or ()],
            instructions=[*self.instructions, *await self.hooks.instructions.run(self)],
        )

    def instruct(self, text: str, *, alone: bool = False) -> None:
        """Take instructions of the client's into the system prompt, behind crow's own, or `alone` in their place.

        What was sent once stays as it is: a stored session is told anew only if these are others.
        """
        self.instructions = [text]
        if alone:
            self.prompts["system"] = Prompt.from_package("client")
        renders = (
            entry.get("crow", {}) for entry in reversed(drop_rewound(self.log)) if marker_kind(entry) == "render"
        )
        told = next((render for render in renders if render.get("purpose") == "system"), None)
        if told:
            before = told.get("prompt"), told.get("variables", {}).get("instructions", [])[:1]
            self.system = self.system if before == (self.prompts["system"].name, [text]) else None

    def render(self, prompt: Prompt, purpose: str, **variables: Any) -> str:
        """Render a prompt and write down which version became what. Raises PromptError."""
        text = prompt.render(**variables)
        self.append(
            {
                "crow": {
                    "kind": "render",
                    "purpose": purpose,
                    "prompt": prompt.name,
                    "version": prompt.version,
                    "template": prompt.template,
                    "variables": variables,
                    "text": text,
                }
            }
        )
        return text

    def meta(self, call: ToolUse, **more: Any) -> dict[str, Any]:
        """What tools are told along with a call; those that are not our own learn the trace context alone."""
        roots = [*self.roots, self._scratch.name] if self._scratch else self.roots
        return {
            **TRACE.get(),
            "crow/session": self.id,
            "crow/call": call["id"],
            "crow/cwd": self.cwd,
            "crow/roots": roots,
            "crow/readable": self.readable,
            "crow/folder": self.state.get("folders", {}).get(call["id"], ""),
            **more,
        }

    def scratch(self) -> Path:
        """A folder that lives as long as the session, for what is too long to tell the model; it may read it."""
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="crow-")
        return Path(self._scratch.name)

    def recall(self, record: Record) -> None:
        """Begin with what was stored."""
        self.log += record.log
        self.system, self.tools, self.title, self.damage = record.system, record.tools, record.title, record.damage
        self.toolbox.recall(record.tools or ())
        self.state |= record.state
        self._call_ids |= {call["id"] for entry in record.log for call in entry.get("tool_calls", ())}

    async def restore(self, id: str, value: str) -> None:
        """Set an option to what was chosen in earlier days, if that is still a choice."""
        option = self.option(id)
        if option and any(choice.value == value and not choice.fleeting for choice in option.choices):
            option.set(value)
            self.options = await self.hooks.options.run(self)

    def option(self, id: str) -> Option | None:
        return next((option for option in self.options if option.id == id), None)

    async def choose(self, option: Option, value: str) -> None:
        """Set an option to one of its choices; which others there are may depend on it."""
        if option.get() != value:
            option.set(value)
            self.append({"crow": {"kind": "option", "option": option.id, "value": value}})
        self.options = await self.hooks.options.run(self)

    def config_options(self) -> list[SessionConfigOption]:
        """All options with their current values, as far as the client understands them."""
        wanted = self.client.capabilities.session
        booleans = bool(wanted and wanted.config_options and wanted.config_options.boolean)
        return [to_config_option(option, booleans=booleans) for option in self.options]

    def modes(self) -> SessionModeState | None:
        """The option of category `mode` in the older words that some clients read."""
        option = next((option for option in self.options if option.category == "mode"), None)
        if option is None:
            return None
        modes = [SessionMode(id=c.value, name=c.name, description=c.description or UNSET) for c in option.choices]
        return SessionModeState(current_mode_id=option.get(), available_modes=modes)

    async def announce_options(self) -> None:
        """Tell the client that an option has changed from this side."""
        if modes := self.modes():
            await self.update(CurrentModeUpdate(current_mode_id=modes.current_mode_id))
        await self.update(ConfigOptionUpdate(config_options=self.config_options()))

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

    async def close(self) -> None:
        """Finish writing, stop the session's servers, and remove its scratch folder."""
        await self.flush()
        await self.toolbox.close()
        if self._scratch is not None:
            with suppress(OSError):
                self._scratch.cleanup()
