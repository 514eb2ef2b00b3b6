"""Convert the messages of an agent of ACP version 2 to version 1, for clients that are written for that."""

from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from crow_core.acp import schema, schema_v2

KINDS = frozenset(get_args(schema.ToolKind))
STATUSES = {**{name: name for name in get_args(schema.ToolCallStatus)}, "paused": "in_progress", "cancelled": "failed"}
STOP_REASONS = frozenset(get_args(schema.StopReason))
OUTPUT_LIMIT = 100_000
"""Bytes of a terminal's output that are kept; the oldest go first."""


def to_initialized(response: schema_v2.InitializeResponse) -> schema.InitializeResponse:
    can = response.capabilities
    session = can.session or schema_v2.SessionCapabilities()
    taken, mcp = session.prompt or schema_v2.PromptCapabilities(), session.mcp or schema_v2.McpCapabilities()
    return schema.InitializeResponse(
        protocol_version=response.protocol_version,
        agent_info=response.info,
        agent_capabilities=schema.AgentCapabilities(
            load_session=True,
            prompt_capabilities=schema.PromptCapabilities(
                image=bool(taken.image), audio=bool(taken.audio), embedded_context=bool(taken.embedded_context)
            ),
            mcp_capabilities=schema.McpCapabilities(http=bool(mcp.http)),
            session_capabilities=schema.SessionCapabilities(
                list=schema.SessionListCapabilities(),
                resume=schema.SessionResumeCapabilities(),
                close=schema.SessionCloseCapabilities(),
                delete=schema.SessionDeleteCapabilities() if session.delete else UNSET,
                additional_directories=schema.SessionAdditionalDirectoriesCapabilities()
                if session.additional_directories
                else UNSET,
            ),
            meta=can.meta,
        ),
        auth_methods=[
            schema.AuthMethod(id=one.method_id, name=one.name, description=one.description)
            for one in response.auth_methods or []
        ],
        meta=response.meta,
    )


def to_config_options(options: Iterable[Any]) -> list[schema.SessionConfigOption]:
    found: list[schema.SessionConfigOption] = []
    for option in options:
        match option:
            case schema_v2.SelectConfigOption():
                entries = [*map(to_select_entry, option.options)]
                found.append(schema.SelectConfigOption(**rename_id(option), options=entries))
            case schema_v2.BooleanConfigOption():
                found.append(schema.BooleanConfigOption(**rename_id(option)))
            case _:
                pass
    return found


def rename_id(option: schema_v2.SelectConfigOption | schema_v2.BooleanConfigOption) -> dict[str, Any]:
    """Return the fields of an option, but for its choices, under the names of version 1."""
    fields: dict[str, Any] = asdict(option)
    fields["id"] = fields.pop("config_id")
    fields.pop("options", None)
    return fields


def to_select_entry(entry: schema_v2.SelectEntry) -> schema.SelectEntry:
    """Convert a choice of an option, or a group of choices."""
    return schema.SelectEntry(
        value=entry.value,
        name=entry.name,
        description=entry.description,
        group=entry.group_id,
        options=UNSET if isinstance(entry.options, UnsetType) else [*map(to_select_entry, entry.options)],
    )


def to_modes(options: Sequence[schema.SessionConfigOption]) -> schema.SessionModeState | UnsetType:
    """Make the modes of version 1 of the option that has them."""
    for option in options:
        if isinstance(option, schema.SelectConfigOption) and option.category == "mode":
            modes = [
                schema.SessionMode(id=one.value, name=one.name, description=one.description)
                for one in option.options
                if isinstance(one.value, str)
            ]
            return schema.SessionModeState(current_mode_id=option.current_value, available_modes=modes)
    return UNSET


def to_commands(commands: Iterable[schema_v2.AvailableCommand]) -> list[schema.AvailableCommand]:
    """Convert slash commands."""
    found: list[schema.AvailableCommand] = []
    for one in commands:
        hint = one.input.hint if one.input else UNSET
        given = schema.AvailableCommandInput(hint=hint) if isinstance(hint, str) else UNSET
        found.append(schema.AvailableCommand(name=one.name, description=one.description, input=given))
    return found


def to_server(server: schema.McpServer) -> schema_v2.McpServer:
    """Convert an MCP server that the client names."""
    fields: dict[str, Any] = {name: value for name, value in asdict(server).items() if value is not UNSET}
    fields["type"] = server.type or "stdio"
    return schema_v2.McpServer(**fields)


@dataclass(eq=False)
class DisplayTerminal:
    """A terminal of the agent, and the tool call that shows it."""

    command: str = ""
    output: bytes = b""
    tool_call_id: str = ""


@dataclass(eq=False)
class SessionObjects:
    """The objects of a session that updates of version 2 change: they become updates of version 1."""

    contents: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """The content of each tool call that was shown."""
    titles: dict[str, str] = field(default_factory=dict[str, str])
    """The title of each tool call that has one."""
    terminals: dict[str, DisplayTerminal] = field(default_factory=dict[str, DisplayTerminal])
    messages: set[str] = field(default_factory=set[str])
    """The ids of the messages that were shown."""
    echoes: int = 0
    """The prompts of this client whose messages the agent has not echoed."""
    hidden: set[str] = field(default_factory=set[str])
    """The ids of echoed messages, which the client has shown itself."""

    def convert(self, update: "schema_v2.SessionUpdate") -> Iterator[schema.SessionUpdate]:
        """Convert an update. Unknown ones, and those about states, lead to nothing."""
        match update:
            case schema.UserMessageChunk(message_id=id) if self._is_echo(str(id)):
                pass
            case schema_v2.UserMessage() | schema_v2.AgentMessage() | schema_v2.AgentThought():
                yield from self._show_message(update)
            case schema_v2.ToolCallUpdate():
                yield self._show_call(update)
            case schema_v2.ToolCallContentChunk(tool_call_id=id):
                self.contents.setdefault(id, []).append(update.content)
                self._refer(id)
                yield schema.ToolCallUpdate(tool_call_id=id, content=self.to_content(id))
            case schema_v2.TerminalUpdate() | schema_v2.TerminalOutputChunk():
                yield from self._show_terminal(update)
            case schema_v2.PlanUpdate(plan=plan) if isinstance(plan.entries, list):
                yield schema.PlanUpdate(entries=[*filter(None, map(to_plan_entry, plan.entries))])
            case schema_v2.AvailableCommandsUpdate():
                yield schema.AvailableCommandsUpdate(available_commands=to_commands(update.available_commands))
            case schema_v2.ConfigOptionUpdate():
                yield schema.ConfigOptionUpdate(config_options=to_config_options(update.config_options))
            case schema_v2.StateUpdate() | schema_v2.PlanUpdate() | schema.Unknown():
                pass
            case _:
                yield update

    def _is_echo(self, id: str) -> bool:
        """Find out whether a message of the user is one that this client has sent as a prompt."""
        if self.echoes and id not in self.messages and id not in self.hidden:
            self.echoes -= 1
            self.hidden.add(id)
        self.messages.add(id)
        return id in self.hidden

    def _show_message(
        self, message: schema_v2.UserMessage | schema_v2.AgentMessage | schema_v2.AgentThought
    ) -> Iterator[schema.SessionUpdate]:
        """Show a whole message once; version 1 cannot replace what was shown."""
        if message.message_id in self.messages or (
            isinstance(message, schema_v2.UserMessage) and self._is_echo(message.message_id)
        ):
            return
        self.messages.add(message.message_id)
        kinds: dict[type[Any], Any] = {
            schema_v2.UserMessage: schema.UserMessageChunk,
            schema_v2.AgentMessage: schema.AgentMessageChunk,
            schema_v2.AgentThought: schema.AgentThoughtChunk,
        }
        for block in message.content or []:
            yield kinds[type(message)](content=block, message_id=message.message_id)

    def _show_call(self, update: schema_v2.ToolCallUpdate) -> schema.ToolCall | schema.ToolCallUpdate:
        id, is_new = update.tool_call_id, update.tool_call_id not in self.contents
        known = self.contents.setdefault(id, [])
        if update.title:
            self.titles[id] = update.title
        if not isinstance(update.content, UnsetType):
            known[:] = update.content or []
            self._refer(id)
        fields: dict[str, Any] = {
            "tool_call_id": id,
            "name": update.name or UNSET,
            "kind": (update.kind if update.kind in KINDS else "other") if update.kind else UNSET,
            "status": STATUSES.get(update.status, "in_progress") if update.status else UNSET,
            "content": UNSET if isinstance(update.content, UnsetType) else self.to_content(id),
            "locations": update.locations if isinstance(update.locations, list) else UNSET,
            "raw_input": update.raw_input,
            "raw_output": update.raw_output,
            "meta": update.meta,
        }
        if is_new:
            return schema.ToolCall(title=update.title or update.name or "A tool call", **fields)
        return schema.ToolCallUpdate(title=update.title or UNSET, **fields)

    def _refer(self, id: str) -> None:
        """Note which terminals a tool call shows."""
        for part in self.contents[id]:
            if isinstance(part, schema.TerminalContent):
                self.terminals.setdefault(part.terminal_id, DisplayTerminal()).tool_call_id = id

    def _show_terminal(
        self, update: schema_v2.TerminalUpdate | schema_v2.TerminalOutputChunk
    ) -> Iterator[schema.ToolCallUpdate]:
        """Show what a terminal holds in the tool call that shows it."""
        terminal = self.terminals.setdefault(update.terminal_id, DisplayTerminal())
        before = terminal.output
        if isinstance(update, schema_v2.TerminalOutputChunk):
            terminal.output += decode_base64(update.data)
        elif update.command:
            terminal.command = update.command
        if isinstance(update, schema_v2.TerminalUpdate) and update.output is not UNSET:
            terminal.output = decode_base64(update.output.data) if update.output else b""
        terminal.output = terminal.output[-OUTPUT_LIMIT:]
        if terminal.tool_call_id and terminal.output != before:
            content = self.to_content(terminal.tool_call_id)
            yield schema.ToolCallUpdate(tool_call_id=terminal.tool_call_id, content=content)

    def to_content(self, id: str) -> list[schema.ToolCallContent]:
        """Convert the content of a tool call: terminals and patches become text."""
        found: list[schema.ToolCallContent] = []
        for part in self.contents[id]:
            match part:
                case schema.BlockContent():
                    found.append(part)
                case schema.TerminalContent(terminal_id=terminal):
                    output = self.terminals.get(terminal, DisplayTerminal()).output.decode(errors="replace")
                    found += [make_block("", output)] if output else []
                case schema_v2.PatchContent():
                    text = part.patch.text if part.patch else "\n".join(map(describe_change, part.changes))
                    found.append(make_block("diff", text))
                case _:
                    pass
        return found


def make_block(language: str, text: str) -> schema.BlockContent:
    """Make a Markdown code block that the text cannot close."""
    marks = "```"
    while marks in text:
        marks += "`"
    fenced = f"{marks}{language}\n{text.removesuffix(chr(10))}\n{marks}"
    return schema.BlockContent(content=schema.TextBlock(text=fenced))


def describe_change(change: schema_v2.DiffChange) -> str:
    """Describe a change to a file without a patch."""
    old = f"{change.old_path} → " if change.old_path else ""
    return f"{change.operation} {old}{change.path or ''}"


def decode_base64(data: str) -> bytes:
    """Decode the bytes of a terminal; nothing for invalid base64."""
    try:
        return b64decode(data)
    except ValueError:
        return b""


def to_plan_entry(entry: schema_v2.PlanEntry) -> schema.PlanEntry | None:
    """Convert an entry of a plan; None for one that was cancelled."""
    if entry.status == "cancelled":
        return None
    status = entry.status if entry.status in get_args(schema.PlanEntryStatus) else "pending"
    priority = entry.priority if entry.priority in get_args(schema.PlanEntryPriority) else "medium"
    return schema.PlanEntry(content=entry.content, status=status, priority=priority)  # pyright: ignore[reportArgumentType]


def to_permission_request(request: schema_v2.RequestPermissionRequest) -> schema.RequestPermissionRequest:
    texts = [schema.BlockContent(content=schema.TextBlock(text=request.description))] if request.description else []
    match request.subject:
        case schema_v2.CommandSubject() as subject:
            about = schema.ToolCallFields(
                tool_call_id=subject.tool_call_id or "permission",
                kind="execute",
                raw_input={"command": subject.command},
                content=[*texts] or UNSET,
            )
        case schema_v2.ToolCallSubject(tool_call=call):
            objects = SessionObjects({call.tool_call_id: [*(call.content or [])]})
            about = schema.ToolCallFields(
                tool_call_id=call.tool_call_id,
                kind=call.kind if call.kind in KINDS else UNSET,  # pyright: ignore[reportArgumentType]
                raw_input=call.raw_input,
                locations=call.locations,
                content=[*texts, *objects.to_content(call.tool_call_id)] or UNSET,
            )
        case _:
            about = schema.ToolCallFields(tool_call_id="permission", kind="other", content=[*texts] or UNSET)
    about.title, about.meta = request.title, request.meta
    return schema.RequestPermissionRequest(session_id=request.session_id, tool_call=about, options=request.options)
