"""The format of what crow notes in the log, and so in the database: `crow` of a message, and of each kind of marker.

A marker is an entry that has only the key `crow`; its note `kind` says which of MARKERS describes the others. All keys
may be missing, as in a session of an older version. Entries of the database are not checked against these types.
"""

from typing import Any, NotRequired, TypedDict

from crow_core.acp.schema import StopReason, ToolKind


class EditNotes(TypedDict):
    """A change to a file. The texts are missing if they were too long to keep."""

    path: str
    """The file, absolute, without links."""
    old: str | None
    """The whole text before; None if there was no file."""
    new: str | None
    """The whole text after; None if the file was removed."""
    before: str | None
    """The SHA-256 of the file before; None if there was none."""
    after: str | None
    """The SHA-256 of the file after; None if there is none."""
    encoding: NotRequired[str]
    """The encoding of the texts; utf-8 if it is missing."""
    mark: NotRequired[bool]
    """True if the file began with a byte order mark."""


class FilePlace(TypedDict):
    """A place in a file that a tool call is about."""

    path: str
    line: NotRequired[int]


class ShellNotes(TypedDict, total=False):
    """The state in which a command left the shell, for the next one."""

    folder: str
    """The working directory."""
    variables: list[str]
    """The names of variables that commands have set."""
    environment: str
    """A digest of the environment that commands have made; "" if they have not changed it."""
    sessions: list[str]
    """The names of terminals with a running program."""


class ShownCall(TypedDict, total=False):
    """The part of a tool call's display that the call and its answer do not hold."""

    kind: ToolKind
    """The kind of the call (ACP)."""
    title: str
    """The title of the tool."""
    call: str
    """The title of the call, if its result gave it another one."""
    arguments: dict[str, Any]
    """The arguments that ran, if they were not the model's."""
    blocks: list[dict[str, Any]]
    """The content (MCP), if it was not only text."""
    locations: list[FilePlace]
    """Files that the call read or changed."""
    exit: dict[str, Any]
    """The `exitCode` or `signal` of a command that failed."""


class OutputNotes(TypedDict):
    """The typed result that a turn is to end with."""

    schema: dict[str, Any]
    """Its JSON schema."""
    retries: int
    """The attempts after the first."""


class PromptNotes(TypedDict, total=False):
    """Notes of a user message."""

    blocks: list[dict[str, Any]]
    """The content blocks (ACP) that the user sent, without their data, if there was more than text."""
    command: str
    """The text that a command file made of what the user typed."""
    hidden: bool
    """True if crow wrote the message in the user's place; no client is shown it."""
    steer: bool
    """True if the user wrote it while a turn ran, which it joined."""
    output: OutputNotes
    """The typed result that was asked for."""
    sent: str
    """The client's own name for the prompt, by which it finds out whether it was sent already."""
    key: str
    """The key of the turn that it began."""
    prompt: str
    """A digest of the prompt as it arrived, if the turn has a key."""


class ReplyNotes(TypedDict, total=False):
    """Notes of a reply."""

    cut: str
    """Why the reply is not whole: an error, a finish reason, or `interrupted`."""
    dropped_calls: list[str]
    """The names in tool calls that were dropped because the reply was cut."""
    printed: str
    """The text of a reply whose tool calls the server sent as text."""
    called: dict[str, str]
    """The tool's name for each call that names its tool in another way, by the call's id."""
    spent: dict[str, float]
    """Tokens and money of the model call, if its turn has a key."""
    request: int
    """The number of the request that was asked again, in a session that asks another one again."""
    departs: bool
    """True if that session's tool calls differ from here on."""
    indexes: list[Any]
    """The index of each tool call; only until the reply is settled."""
    part: int
    """The number of a part of a reply that still arrives; 0 replaces all earlier parts."""


class AnswerNotes(TypedDict, total=False):
    """Notes of a tool message."""

    shown: ShownCall
    """The display of the call in a client."""
    failed: bool
    """True if the result is an error."""
    changes: list[EditNotes]
    """The changes by the call."""
    stays: list[str]
    """Its changes that cannot be undone; missing if they are not known."""
    shell: ShellNotes
    """The state in which a command left the shell."""
    plan: list[dict[str, Any]]
    """The plan's entries (ACP)."""


# Functional syntax where a key is a keyword of Python.
CompactionNotes = TypedDict(
    "CompactionNotes",
    {
        "summary": str,  # of what is left out
        "from": str,  # the id of the entry after the summary; "" for the marker itself
        "pinned": list[str],  # ids of entries that stay
        "before": int,  # estimated tokens of the request without the marker
        "after": int,  # estimated tokens with it
    },
    total=False,
)
DecisionNotes = TypedDict(
    "DecisionNotes",
    {
        "is": str,  # allow or deny
        "by": str,  # the mode, rule, hook or answer that decided
        "scope": str,  # how long the answer holds: once, or for what
        "call": str,  # the id of the tool call
        "tool": str,  # its name
        "arguments": str,  # the SHA-256 of its arguments
        "writes": bool,  # True if the command is known to write files
        "changed": list[str],  # what a command in the sandbox changed, if this is about that
    },
    total=False,
)


class ShrinkNotes(TypedDict, total=False):
    """Earlier tool results are sent shortened."""

    upto: str
    """The id of the first entry that is sent whole; "" for the marker itself."""
    limit: int
    """Characters that each result keeps."""
    tool: str
    """The tool that reads all of a result."""
    pinned: list[str]
    """Ids of entries that are sent whole."""
    before: int
    """Estimated tokens of the request without the marker."""
    after: int
    """Estimated tokens with it."""


class ImagesNotes(TypedDict, total=False):
    """The endpoint has refused images, which are not sent any more."""

    refused: list[str]
    """The SHA-256 of the address of each image."""


class RewindNotes(TypedDict, total=False):
    """The entries after an earlier one were dropped."""

    to: str
    """The id of the entry that is the last one again; "" for none."""
    undone: str
    """The id of the last entry that was dropped, if it may be restored."""
    kept: list[str]
    """Files that were not restored."""


class TitleNotes(TypedDict, total=False):
    """The session got a name."""

    title: str


class OptionNotes(TypedDict, total=False):
    """An option of the session was set."""

    option: str
    """Its id."""
    value: str


class ToolsNotes(TypedDict, total=False):
    """The list of tools that is sent from here on."""

    schemas: list[dict[str, Any]]
    """The tools, as chat completions have them."""


class RenderNotes(TypedDict, total=False):
    """A prompt was rendered."""

    purpose: str
    """The purpose of the rendering; `system` is the system prompt."""
    prompt: str
    """The name of the prompt."""
    version: str
    """The version of the prompt: a digest of its template."""
    template: str
    """The template (Jinja)."""
    variables: dict[str, Any]
    """The values that it was rendered with."""
    text: str
    """The result."""


class PinNotes(TypedDict, total=False):
    """An entry stays in every request."""

    entry: str
    """Its id."""


class StartedNotes(TypedDict, total=False):
    """A tool call of a turn with a key may have had effects from here on."""

    call: str
    """The id of the tool call."""


class TaskNotes(StartedNotes, total=False):
    """An MCP server runs a tool call as a task, whose result another process may ask for."""

    server: str
    """The name of the server."""
    task: str
    """The server's id of the task."""


class InnerNotes(StartedNotes, total=False):
    """The program that a tool call runs, or the page of a tool call, has called a tool."""

    use: dict[str, Any]
    """The call, as in a reply."""
    answer: dict[str, Any]
    """The tool message that answers it."""


class EndedNotes(TypedDict, total=False):
    """A turn with a key has ended."""

    key: str
    """The key of the turn."""
    stop: StopReason
    """The stop reason."""
    prompt: str
    """A digest of the prompt that began the turn."""
    text: str
    """The words for the user at the end."""
    usage: dict[str, int]
    """Tokens and model calls of the turn."""
    notes: dict[str, Any]
    """`_meta.crow` of the answer to the prompt, such as `stopped` with `by` and `reason`."""


class LinkNotes(TypedDict, total=False):
    """A sub-agent was started: `child` in the log of its parent, `parent` in its own."""

    session: str
    """The id of the other session."""
    call: str
    """The id of the parent's tool call."""
    name: str
    """The name by which the parent goes on with the sub-agent."""
    title: str
    """The task in a few words."""
    only: list[str]
    """Patterns of the names of the tools that it may use; empty for all."""
    sandbox: str
    """`read-only` if it may change nothing."""


class ChangesNotes(TypedDict, total=False):
    """Files were changed by a sub-agent, or by another agent."""

    session: str
    """The id of the sub-agent's session."""
    call: str
    """The id of the tool call that runs the other agent."""
    changes: list[EditNotes]


class StaysNotes(TypedDict, total=False):
    """Effects of a sub-agent cannot be undone."""

    session: str
    """The id of its session."""
    calls: list[str]
    """The titles of its tool calls that may have had such effects."""


class BackgroundNotes(StartedNotes, total=False):
    """A command or a sub-agent goes on after its tool call, in the background; a second marker notes its end."""

    name: str
    """The name by which the model and the user reach it."""
    title: str
    """The command, or the task in a few words."""
    end: str
    """The way in which it has ended, such as "exit code 1"."""


class BudgetNotes(TypedDict, total=False):
    """The usage of the session by the end of a turn."""

    spent: dict[str, float]
    """The amount of each limited thing: requests, tokens, money, minutes."""


class SourceNotes(TypedDict, total=False):
    """The session has read `private` data or `untrusted` content."""

    source: str
    """The file, address or tool that it was read from."""
    call: str
    """The id of the tool call that read it."""


class ExitNotes(StartedNotes, total=False):
    """A tool call could send private data away, and the mode yolo ran it."""

    why: str
    """The sentence for the user."""


class RatingNotes(TypedDict, total=False):
    """The user has rated a reply."""

    reply: str
    """The id of the reply."""
    rating: str
    """good or bad."""
    why: str
    """The user's words."""


class ReaskNotes(TypedDict, total=False):
    """The session asks another one again from here on."""

    origin: str
    """The id of the other session."""
    prompt: str
    """Name and version of the system prompt that replaces its own; "" for none."""
    model: str
    """Name and address of the model that replaces its own; "" for none."""
    sampling: dict[str, Any]
    """Parameters of requests that were set; None removes one."""
    start: int
    """The number of the first request that is asked again."""
    tools: str
    """`live` if the tools run again."""


class ReaskEndNotes(TypedDict, total=False):
    """The session has asked the other one again to its end."""

    stopped: str
    """The limit that ended it; "" for none."""
    denied: list[str]
    """The titles of tool calls that were not allowed."""


class ImportedNotes(TypedDict, total=False):
    """The messages after the marker are another agent's."""

    agent: str
    """The name of the other agent."""
    session: str
    """The other agent's id of the session."""
    file: str
    """The file that it was read from."""
    model: str
    """The model, as far as it is known."""
    last: str
    """The id of the last message of this import."""
    left_out: dict[str, int]
    """The number of left-out entries of each kind."""


class WorktreeNotes(TypedDict, total=False):
    """The state of the git work tree at the start of the session; see `worktree.WorkTree` for each key."""

    top: str
    folder: str
    commit: str
    branch: str
    changes: list[dict[str, Any]]
    staged: list[str]
    fault: str


class OpenedNotes(TypedDict):
    """A session without messages was opened for a caller that gave its id, so that it is stored."""


class Notes(
    PromptNotes,
    ReplyNotes,
    AnswerNotes,
    BackgroundNotes,
    BudgetNotes,
    ChangesNotes,
    CompactionNotes,
    DecisionNotes,
    EndedNotes,
    ExitNotes,
    ImagesNotes,
    ImportedNotes,
    InnerNotes,
    LinkNotes,
    OptionNotes,
    PinNotes,
    RatingNotes,
    ReaskEndNotes,
    ReaskNotes,
    RenderNotes,
    RewindNotes,
    ShrinkNotes,
    SourceNotes,
    StaysNotes,
    TaskNotes,
    TitleNotes,
    ToolsNotes,
    total=False,
):
    """The notes of any entry. An extension that appends markers of its own derives a class from this one for them."""

    id: str
    """The id of the entry, also that of its updates for the client, and of a reply's model call."""
    kind: str
    """The kind of a marker; missing in a message."""


MARKERS: dict[str, type] = {
    "background": BackgroundNotes,
    "budget": BudgetNotes,
    "changes": ChangesNotes,
    "child": LinkNotes,
    "compaction": CompactionNotes,
    "decision": DecisionNotes,
    "ended": EndedNotes,
    "exit": ExitNotes,
    "images": ImagesNotes,
    "imported": ImportedNotes,
    "inner": InnerNotes,
    "opened": OpenedNotes,
    "option": OptionNotes,
    "parent": LinkNotes,
    "pin": PinNotes,
    "private": SourceNotes,
    "rating": RatingNotes,
    "reask": ReaskNotes,
    "reask-end": ReaskEndNotes,
    "render": RenderNotes,
    "rewind": RewindNotes,
    "shrink": ShrinkNotes,
    "started": StartedNotes,
    "stays": StaysNotes,
    "task": TaskNotes,
    "title": TitleNotes,
    "tools": ToolsNotes,
    "untrusted": SourceNotes,
    "worktree": WorktreeNotes,
}
"""The notes of each kind of marker, besides `id` and `kind`."""
