"""Convert the messages of an agent from ACP version 1 to version 2.

Chunks of messages, usage, titles and notices stay as they are, since both versions write them alike.
"""

from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from crow_core.acp import schema, schema_v2
from crow_core.acp.patches import make_git_patch


class EndedWork(Protocol):
    """Work in the background; see `crow_core.session.background_work.RunningWork`."""

    @property
    def kind(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def exit(self) -> Mapping[str, int | str]: ...


PLAN_ID = "plan"
"""The id of the plan of a session, which has one."""
THOUGHT = "-thought"
"""The end of the id of a thought, which has the id of the message of the same reply in version 1."""


def to_capabilities(capabilities: schema_v2.ClientCapabilities) -> schema.ClientCapabilities:
    """Convert what a client of version 2 can do; what version 2 requires of every client is added."""
    auth = capabilities.auth or schema_v2.ClientAuthCapabilities()
    return schema.ClientCapabilities(
        session=schema.ClientSessionCapabilities(
            config_options=schema.SessionConfigOptionsCapabilities(boolean=schema.BooleanConfigOptionCapabilities()),
            compaction=schema.CompactionCapabilities(),
            notices=schema.NoticeCapabilities(),
        ),
        auth=schema.AuthCapabilities(terminal=bool(auth.terminal)),
        elicitation=capabilities.elicitation,
        meta=capabilities.meta,
    )


def to_initialized(response: schema.InitializeResponse) -> schema_v2.InitializeResponse:
    """Convert the answer to `initialize`; `_meta` of the capabilities stays with the capabilities."""
    can = response.agent_capabilities
    taken, sessions = can.prompt_capabilities, can.session_capabilities
    info = response.agent_info or schema.Implementation(name="agent", version="0")
    return schema_v2.InitializeResponse(
        protocol_version=schema_v2.PROTOCOL_VERSION,
        info=info,
        capabilities=schema_v2.AgentCapabilities(
            session=schema_v2.SessionCapabilities(
                prompt=schema_v2.PromptCapabilities(
                    image=schema_v2.PromptImageCapabilities() if taken.image else UNSET,
                    audio=schema_v2.PromptAudioCapabilities() if taken.audio else UNSET,
                    embedded_context=schema_v2.PromptEmbeddedContextCapabilities() if taken.embedded_context else UNSET,
                ),
                mcp=schema_v2.McpCapabilities(
                    stdio=schema_v2.McpStdioCapabilities(),
                    http=schema_v2.McpHttpCapabilities() if can.mcp_capabilities.http else UNSET,
                ),
                delete=schema_v2.SessionDeleteCapabilities() if sessions.delete else UNSET,
                additional_directories=schema_v2.SessionAdditionalDirectoriesCapabilities()
                if sessions.additional_directories
                else UNSET,
            ),
            meta=can.meta,
        ),
        auth_methods=[*map(to_auth_method, response.auth_methods)],
        meta=response.meta,
    )


def to_auth_method(method: schema.AuthMethod) -> schema_v2.AuthMethod:
    return schema_v2.AuthMethod(
        type=method.type or "agent",
        method_id=method.id,
        name=method.name,
        description=method.description,
        args=method.args,
        env=[schema.EnvVariable(name=name, value=value) for name, value in method.env.items()],
        meta=method.meta,
    )


def to_server(server: schema_v2.McpServer) -> schema.McpServer | None:
    """Convert an MCP server that a client names; None for one that lacks something, or is of an unknown type."""
    known = {"stdio": UNSET, "http": "http"}
    if server.type not in known or server.name is UNSET:
        return None
    try:
        fields = {name: value for name, value in asdict(server).items() if value is not UNSET and name != "type"}
        return schema.McpServer(**fields, type=known[server.type])  # pyright: ignore[reportArgumentType]
    except ValueError:
        return None


def to_config_options(options: Iterable[schema.SessionConfigOption]) -> list[schema_v2.SessionConfigOption]:
    found: list[schema_v2.SessionConfigOption] = []
    for option in options:
        match option:
            case schema.SelectConfigOption():
                entries = [*map(to_select_entry, option.options)]
                found.append(schema_v2.SelectConfigOption(**rename_id(option), options=entries))
            case schema.BooleanConfigOption():
                found.append(schema_v2.BooleanConfigOption(**rename_id(option)))
            case _:
                pass
    return found


def rename_id(option: schema.SelectConfigOption | schema.BooleanConfigOption) -> dict[str, Any]:
    """Return the fields of an option, but for its choices, under the names of version 2."""
    fields: dict[str, Any] = asdict(option)
    fields["config_id"] = fields.pop("id")
    fields.pop("options", None)
    return fields


def to_select_entry(entry: schema.SelectEntry) -> schema_v2.SelectEntry:
    """Convert a choice of an option, or a group of choices."""
    return schema_v2.SelectEntry(
        value=entry.value,
        name=entry.name,
        description=entry.description,
        group_id=entry.group,
        options=UNSET if isinstance(entry.options, UnsetType) else [*map(to_select_entry, entry.options)],
        meta=entry.meta,
    )


def to_commands(commands: Iterable[schema.AvailableCommand]) -> list[schema_v2.AvailableCommand]:
    """Convert slash commands."""
    return [
        schema_v2.AvailableCommand(
            type="command",
            name=command.name,
            description=command.description,
            input=schema_v2.AvailableCommandInput(type="text", hint=command.input.hint) if command.input else UNSET,
            meta=command.meta,
        )
        for command in commands
    ]


def to_content(parts: Sequence[schema.ToolCallContent]) -> list[schema_v2.ToolCallContent]:
    """Convert the content of a tool call; a diff gets a patch."""
    found: list[schema_v2.ToolCallContent] = []
    for part in parts:
        match part:
            case schema.DiffContent():
                found.append(to_patch(part))
            case schema.BlockContent() | schema.TerminalContent():
                found.append(part)
            case _:
                pass
    return found


def to_patch(diff: schema.DiffContent) -> schema_v2.PatchContent:
    """Convert the texts before and after an edit to a change with a patch."""
    match diff.meta:
        case {"crow": {"deleted": True}}:
            operation, new = "delete", None
        case _:
            operation, new = "modify" if isinstance(diff.old_text, str) else "add", diff.new_text
    old = diff.old_text if isinstance(diff.old_text, str) else None
    patch = make_git_patch(diff.path, old, new)
    return schema_v2.PatchContent(
        changes=[schema_v2.DiffChange(operation=operation, path=diff.path, file_type="text")],
        patch=schema_v2.DiffPatch(format="git_patch", text=patch) if patch else UNSET,
    )


CallUpdate = schema.ToolCall | schema.ToolCallUpdate | schema.ToolCallFields


def to_call_fields(update: CallUpdate) -> dict[str, Any]:
    """Convert what is told about a tool call to the fields of version 2's updates."""
    fields = asdict(update)
    if isinstance(update.content, list):
        fields["content"] = to_content(update.content)
    return fields


def name_thought(message_id: Any) -> str:
    """Make the id of a thought from the id of the message of the same reply."""
    return f"{message_id}{THOUGHT}"


def to_update(update: schema.SessionUpdate) -> "schema_v2.SessionUpdate | None":
    """Convert an update of a running session; None for one that version 2 says in another way."""
    match update:
        case schema.AgentThoughtChunk():
            id = name_thought(update.message_id)
            return schema.AgentThoughtChunk(content=update.content, message_id=id, meta=update.meta)
        case schema.ToolCall() | schema.ToolCallUpdate():
            return schema_v2.ToolCallUpdate(**to_call_fields(update))
        case schema.PlanUpdate():
            entries = [schema_v2.PlanEntry(**asdict(entry)) for entry in update.entries]
            plan = schema_v2.PlanUpdateContent(type="items", plan_id=PLAN_ID, entries=entries)
            return schema_v2.PlanUpdate(plan=plan, meta=update.meta)
        case schema.AvailableCommandsUpdate():
            return schema_v2.AvailableCommandsUpdate(
                available_commands=to_commands(update.available_commands), meta=update.meta
            )
        case schema.ConfigOptionUpdate():
            return schema_v2.ConfigOptionUpdate(config_options=to_config_options(update.config_options))
        case schema.CurrentModeUpdate():
            return None  # the mode is a config option, too
        case schema.UnknownSessionUpdate():
            return None
        case _:
            return update


CHUNKS: dict[type[Any], Any] = {
    schema.UserMessageChunk: schema_v2.UserMessage,
    schema.AgentMessageChunk: schema_v2.AgentMessage,
    schema.AgentThoughtChunk: schema_v2.AgentThought,
}
"""Version 2's whole message, by the chunk of it."""


def to_whole_updates(
    updates: Iterable[schema.SessionUpdate], cwd: str, background: Collection[str] = ()
) -> Iterator["schema_v2.SessionUpdate"]:
    """Convert the updates of a replay: each message and each tool call becomes one update with all of it.

    A command is shown in a terminal. The work of the tool calls in `background` still runs.
    """
    for key, group in groupby(updates, find_object):
        first, *rest = group
        match first:
            case schema.UserMessageChunk() | schema.AgentMessageChunk() | schema.AgentThoughtChunk():
                blocks = [first.content, *(each.content for each in rest if isinstance(each, type(first)))]
                id = name_thought(key[1]) if isinstance(first, schema.AgentThoughtChunk) else key[1]
                yield CHUNKS[type(first)](message_id=id, content=blocks)
            case schema.ToolCall() | schema.ToolCallUpdate():
                fields: dict[str, Any] = {}
                for each in (first, *rest):
                    assert isinstance(each, schema.ToolCall | schema.ToolCallUpdate)
                    fields |= {name: value for name, value in to_call_fields(each).items() if value is not UNSET}
                goes_on = first.tool_call_id in background
                if command := find_command(first):
                    yield from filter(None, [split_off_terminal(fields, cwd, command, goes_on=goes_on)])
                elif goes_on:
                    fields["status"] = "in_progress"
                if fields.get("status") == "in_progress":
                    fields["capabilities"] = CANCELLABLE["tool_call"]
                yield schema_v2.ToolCallUpdate(**fields)
            case _:
                yield from filter(None, map(to_update, (first, *rest)))


def find_object(update: schema.SessionUpdate) -> tuple[str, Any]:
    """Find the message or the tool call that an update is a part of: its kind and its id."""
    match update:
        case schema.UserMessageChunk() | schema.AgentMessageChunk() | schema.AgentThoughtChunk():
            return type(update).__name__, update.message_id
        case schema.ToolCall() | schema.ToolCallUpdate():
            return "call", update.tool_call_id
        case _:
            return "", id(update)


def find_command(update: CallUpdate) -> str:
    """Find the command line that a tool call runs; "" for another call."""
    match update.raw_input:
        case {"command": str(command)} if command and update.kind == "execute":
            return command
        case _:
            return ""


def to_permission_request(request: schema.RequestPermissionRequest, cwd: str) -> schema_v2.RequestPermissionRequest:
    """Convert a question for permission. Its subject is the exact command, if it is about one without any diffs."""
    about = request.tool_call
    parts = about.content or []
    texts = [
        part.content.text
        for part in parts
        if isinstance(part, schema.BlockContent) and isinstance(part.content, schema.TextBlock)
    ]
    command = find_command(about)
    if command and not any(isinstance(part, schema.DiffContent) for part in parts):
        subject: schema_v2.RequestPermissionSubject = schema_v2.CommandSubject(
            command=command, cwd=cwd, tool_call_id=about.tool_call_id
        )
    else:
        subject = schema_v2.ToolCallSubject(tool_call=schema_v2.ToolCallFields(**to_call_fields(about)))
    return schema_v2.RequestPermissionRequest(
        session_id=request.session_id,
        title=about.title or "Allow this?",
        description="\n\n".join(texts) or UNSET,
        subject=subject,
        options=request.options,
        meta=request.meta or about.meta,
    )


def encode_output(text: str) -> schema_v2.TerminalOutput:
    return schema_v2.TerminalOutput(data=b64encode(text.encode(errors="replace")).decode())


FINAL = ("completed", "failed", "cancelled")
"""The states in which a tool call has ended."""
CANCELLABLE: dict[str, Any] = {
    "tool_call": schema_v2.ToolCallCapabilities(cancel=schema_v2.ToolCallCancelCapabilities()),
    "terminal": schema_v2.TerminalCapabilities(cancel=schema_v2.TerminalCancelCapabilities()),
}
"""The capabilities of a running tool call and of its terminal: a client may cancel them."""


def name_terminal(tool_call_id: str) -> str:
    """Make the id of the terminal that shows the command of a tool call."""
    return f"{tool_call_id}-terminal"


def split_off_terminal(
    fields: dict[str, Any], cwd: str = "", command: str = "", *, goes_on: bool = False
) -> schema_v2.TerminalUpdate | None:
    """Move the output of a command from the fields of its tool call to the terminal that shows it.

    Return the terminal's update; None if nothing changes there. `cwd` and `command` are those of a new terminal.
    With `goes_on`, the command does not end with its call.
    """
    told: dict[str, Any] = {name: value for name, value in (("command", command), ("cwd", cwd)) if value}
    id, status = name_terminal(fields["tool_call_id"]), fields.get("status")
    content: list[schema_v2.ToolCallContent] = fields.get("content") or []
    texts: list[str] = []
    others: list[schema_v2.ToolCallContent] = []
    for part in content:
        match part:
            case schema.BlockContent(content=schema.TextBlock(text=text)):
                texts.append(unfence(text))
            case _:
                others.append(part)
    if content or command:
        fields["content"] = [schema.TerminalContent(terminal_id=id), *others]
    if texts:
        told["output"] = encode_output("\n".join(texts) + "\n")
    if status in FINAL and not goes_on:
        told["exit_status"] = find_exit_status(fields.get("raw_output"), status)
        told["capabilities"] = None
    elif status == "in_progress" or (goes_on and command):
        told["capabilities"] = CANCELLABLE["terminal"]
    return schema_v2.TerminalUpdate(terminal_id=id, **told) if told else None


def tells_background(update: schema.SessionInfoUpdate) -> bool:
    """Find out whether an update tells what runs in the background."""
    match update.meta:
        case {"crow": {"background": _}}:
            return True
        case _:
            return False


def find_turn(update: schema.SessionInfoUpdate) -> tuple[str, str] | None:
    """Find out whether an update tells that a turn `began` or `ended` that the client has not asked for.

    Return this and the stop reason; None for another update.
    """
    match update.meta:
        case {"crow": {"turn": str(turn), **more}}:
            return turn, str(more.get("stopReason", ""))
        case _:
            return None


def to_background(call: str, work: EndedWork) -> schema_v2.BackgroundWork:
    """Convert the work of a tool call: a command is its terminal, a sub-agent its tool call."""
    if work.kind == "command":
        return schema_v2.BackgroundWork(type="terminal", terminal_id=name_terminal(call))
    return schema_v2.BackgroundWork(type="tool_call", tool_call_id=call)


def to_end_updates(call: str, work: EndedWork) -> "Iterator[schema_v2.SessionUpdate]":
    """Make the updates for the end of work in the background."""
    if work.kind == "agent":
        status = {"finished": "completed", "stopped": "cancelled"}.get(work.end, "failed")
        yield schema_v2.ToolCallUpdate(tool_call_id=call, status=status, capabilities=None)
        return
    ended = find_exit_status({"exitStatus": work.exit}, "failed")
    yield schema_v2.TerminalUpdate(terminal_id=name_terminal(call), exit_status=ended, capabilities=None)


def to_output_chunk(call: str, text: str) -> schema_v2.TerminalOutputChunk:
    """Make the update for more output of the command of a tool call."""
    return schema_v2.TerminalOutputChunk(terminal_id=name_terminal(call), data=encode_output(text).data)


def unfence(text: str) -> str:
    """Return the text in a Markdown code block; another text unchanged."""
    first, _, rest = text.partition("\n")
    marks = first.strip()
    inner = rest.removesuffix(f"\n{marks}")
    return inner if len(marks) >= 3 and set(marks) == {"`"} and inner != rest else text


def find_exit_status(raw_output: Any, status: str) -> schema_v2.TerminalExitStatus:
    """Find how a command has ended, from the `rawOutput` of its tool call; without details if it did not run."""
    match raw_output:
        case {"exitStatus": {**found}}:
            ended: dict[str, Any] = found
            code, signal = ended.get("exitCode"), ended.get("signal")
            return schema_v2.TerminalExitStatus(
                exit_code=code if isinstance(code, int) else UNSET, signal=signal if isinstance(signal, str) else UNSET
            )
        case _:
            return schema_v2.TerminalExitStatus(exit_code=0 if status == "completed" else UNSET)
