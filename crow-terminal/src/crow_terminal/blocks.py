"""Turn the updates of a session into blocks: finished ones, which never change, and what is still open."""

import re
from typing import Any, TypeAlias

from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    CompactionUpdate,
    ContentBlock,
    DiffContent,
    NoticeUpdate,
    PlanEntry,
    PlanUpdate,
    ResourceBlock,
    ResourceLinkBlock,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallFields,
    ToolCallUpdate,
    UserMessageChunk,
)
from msgspec import UNSET, Struct, field
from msgspec.structs import asdict, replace

from crow_terminal.markdown import CodeLines, MarkdownSplitter, Prose
from crow_terminal.told_outputs import split_outputs

FINAL = ("completed", "failed")
"""The states in which a tool call has ended."""
KEPT_LINES = 200
"""Lines of a running tool call's output that are kept."""
LINES_BEFORE = re.compile(r"… (\d+) lines before")
MAX_FINISHED = 500
"""Tool calls that have ended and are remembered, to ignore what an agent repeats."""


class UserPrompt(Struct, frozen=True):
    """A prompt of the user."""

    text: str


class Call(Struct, frozen=True):
    """A tool call that has ended."""

    call: ToolCall
    seconds: float = 0.0
    diffs_shown: bool = False
    """True if its diffs were printed before, with the question for permission."""
    denied: bool = False
    not_run: bool = False
    """True if the tool did not run, because the turn ended before."""
    stopped: bool = False
    """True if it ran when the user stopped the turn."""
    answered: bool = False
    """True if the user was asked about it, and the answer was printed."""


class StyledLine(Struct, frozen=True):
    """A line of what a question is about, with the name of its style."""

    text: str
    style: str = "plain"
    indent: int = 0
    """The columns by which what does not fit in a row is indented in the rows below."""


class AnsweredQuestion(Struct, frozen=True):
    """A question for permission with its answer."""

    title: str
    lines: tuple[StyledLine, ...]
    """Its subject, whole."""
    answer: str
    written: str = ""
    """The user's text: a reason, or another command."""


class Plan(Struct, frozen=True):
    """The plan of the agent."""

    entries: tuple[PlanEntry, ...]


class Note(Struct, frozen=True):
    """A sentence for the user, of the agent or of the terminal."""

    text: str
    severity: str = "info"
    """`info`, `warning` or `error`; `done` for the line that ends a turn, `rule` for a line across the terminal."""


class CommandOutput(Struct, frozen=True):
    """A command that the user ran, with its output."""

    command: str
    output: str
    code: int | None


Block: TypeAlias = Prose | CodeLines | UserPrompt | Call | AnsweredQuestion | Plan | Note | CommandOutput


class OpenCall(Struct):
    """A tool call that has not ended."""

    call: ToolCall
    since: float
    """The time at which it began, in seconds of the clock that `BlockRecord.add` is given."""
    lines: list[str] = field(default_factory=list[str])
    """The last lines of its output so far."""
    hidden: int = 0
    """The lines before them."""
    asked_at: float | None = None
    """The time since which the user is asked about it; None if nothing is asked."""
    shows_plan: bool = False
    """True if it has shown the plan, and so has nothing else to show."""
    is_left: bool = False
    """True if the user cancelled the turn instead of answering the question about this call."""

    def get_seconds(self, now: float) -> float:
        """Return how long it has run, without the time in which the user was asked about it."""
        return (now if self.asked_at is None else self.asked_at) - self.since


class BlockRecord:
    """The updates of a session as blocks."""

    def __init__(self) -> None:
        self.running: dict[str, OpenCall] = {}
        """The tool calls that run, by id, in the order in which they began."""
        self.plan: Plan | None = None
        """The current plan, until it is printed."""
        self.answer = ""
        """The text of the last message of the agent."""
        self.diffs: list[DiffContent] = []
        """The edits of all tool calls that succeeded, in order."""
        self._splitter: MarkdownSplitter | None = None
        self._message: tuple[type[Any], object] | None = None
        """The kind and the id of the message that is open."""
        self._answer: list[str] = []
        self._prompt: list[str] = []
        self._finished: dict[str, None] = {}
        self._answered: set[str] = set()
        """The ids of the tool calls that the user was asked about."""
        self._shown: set[str] = set()
        """The ids of the tool calls whose changes were printed before they ran."""

    @property
    def open(self) -> Prose | CodeLines | None:
        """The end of the text that arrives, which may still change."""
        return self._splitter.open if self._splitter else None

    def add(self, update: SessionUpdate, now: float) -> list[Block]:
        """Take in an update at a time in seconds, and return the blocks that it finishes."""
        match update:
            case AgentMessageChunk() | AgentThoughtChunk() | UserMessageChunk():
                return self._add_text(update)
            case ToolCall() | ToolCallUpdate():
                return self._add_call(update, now)
            case PlanUpdate(entries=entries):
                done = self.end_text()
                self.plan = Plan(tuple(entries))
                for one in self.running.values():
                    one.shows_plan |= one.call.kind == "think"
                return done
            case NoticeUpdate(title=title, description=description, severity=severity):
                text = f"{title}: {description}" if description else title
                return [*self.end_text(), Note(text, severity)]
            case CompactionUpdate(status="completed"):
                return [*self.end_text(), Note("The conversation so far was compacted.")]
            case CompactionUpdate(status="failed", error=error):
                return [
                    *self.end_text(),
                    Note(f"The conversation could not be compacted: {error or 'no reason'}", "error"),
                ]
            case _:
                return []

    def end_text(self) -> list[Block]:
        """Return the rest of the open message, as another thing follows it."""
        done: list[Block] = []
        if self._prompt:
            told, text = split_outputs("".join(self._prompt))
            done += [*(CommandOutput(*each) for each in told), UserPrompt(text)]
        if self._splitter:
            done += self._splitter.end()
        if self._answer:
            self.answer = "".join(self._answer)
        self._splitter, self._message, self._prompt, self._answer = None, None, [], []
        return done

    def end_turn(self, now: float) -> list[Block]:
        """Return what is still open, as the turn has ended."""
        done = self.end_text()
        done += [Call(one.call, one.get_seconds(now), not_run=one.is_left) for one in self.running.values()]
        self.running.clear()
        if self.plan and any(entry.status != "completed" for entry in self.plan.entries):
            done.append(self.plan)
        self.plan = None
        return done

    def propose(self, fields: ToolCallFields, now: float) -> list[Block]:
        """Take in the tool call that a permission is asked for."""
        known = {key: value for key, value in asdict(fields).items() if value is not UNSET and value is not None}
        return self.add(ToolCallUpdate(**known), now)

    def note_shown(self, id: str) -> None:
        """Note that the edits of a tool call are printed with the answer to the question about it."""
        self._answered.add(id)
        if (running := self.running.get(id)) and find_diffs(running.call):
            self._shown.add(id)

    def start_question(self, id: str, now: float) -> None:
        """Stop the clock of a tool call, as the user is asked about it."""
        if (running := self.running.get(id)) and running.asked_at is None:
            running.asked_at = now

    def end_question(self, id: str, now: float) -> None:
        """Let the clock of a tool call go on, as nothing is asked about it any more."""
        if (running := self.running.get(id)) and running.asked_at is not None:
            running.since += now - running.asked_at
            running.asked_at = None

    def leave_question(self, id: str) -> None:
        """Note that the user has cancelled the turn in place of an answer: the call does not run."""
        if running := self.running.get(id):
            running.is_left = True

    def _add_text(self, update: AgentMessageChunk | AgentThoughtChunk | UserMessageChunk) -> list[Block]:
        message = type(update), update.message_id
        done: list[Block] = [] if message == self._message else self.end_text()
        self._message = message
        text = describe_content(update.content)
        if isinstance(update, UserMessageChunk):
            self._prompt.append(text)
            return done
        if isinstance(update, AgentMessageChunk):
            self._answer.append(text)
        if self._splitter is None:
            self._splitter = MarkdownSplitter(thought=isinstance(update, AgentThoughtChunk))
        return [*done, *self._splitter.feed(text)]

    def _add_call(self, update: ToolCall | ToolCallUpdate, now: float) -> list[Block]:
        id = update.tool_call_id
        if id in self._finished:
            return []
        done: list[Block] = [] if id in self.running else self.end_text()
        running = self.running.setdefault(id, OpenCall(ToolCall(tool_call_id=id, title=""), now))
        if update.status == "in_progress" and running.call.status != "in_progress":
            running.since, running.asked_at = now, None
        changed = {key: value for key, value in asdict(update).items() if value is not UNSET and value is not None}
        running.call = replace(running.call, **changed)
        if running.call.status not in FINAL:
            if running.call.content:
                running.lines, running.hidden = split_progress(find_output(running.call))
            return done
        del self.running[id]
        self._finished[id] = None
        if len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        if running.call.status == "completed":
            self.diffs += find_diffs(running.call)
        match update.meta:
            case {"crow": {**notes}}:
                denied, not_run = "denied" in notes, notes.get("notRun") is True
            case _:
                denied = not_run = False
        if running.shows_plan and running.call.status == "completed":
            return done
        not_run |= running.is_left and running.call.status == "failed"
        answered = id in self._answered
        return [
            *done,
            Call(running.call, running.get_seconds(now), id in self._shown, denied, not_run, answered=answered),
        ]


def find_diffs(call: ToolCall) -> list[DiffContent]:
    """Return the edits to files in the content of a tool call."""
    return [part for part in call.content or [] if isinstance(part, DiffContent)]


def describe_content(content: ContentBlock) -> str:
    """Return a content block as text: of what is not text, what it is."""
    match content:
        case TextBlock(text=text):
            return text
        case ResourceLinkBlock(name=name):
            return f"[{name}]"
        case ResourceBlock(resource=resource):
            return resource.text if isinstance(resource.text, str) else f"[{resource.uri}]"
        case _:
            kind = getattr(content, "mime_type", None) or "content of an unknown type"
            return f"[{kind}]"


def find_output(call: ToolCall) -> str:
    """Return the text in the content of a tool call, without the marks of a code block around it."""
    texts: list[str] = []
    for part in call.content or []:
        content = getattr(part, "content", None)
        if content is not None:
            texts.append(strip_fence(describe_content(content)))
    return "\n".join(texts).strip("\n")


def strip_fence(text: str) -> str:
    """Return the inside of a text that is one code block."""
    lines = text.strip("\n").split("\n")
    marks = lines[0][: len(lines[0]) - len(lines[0].lstrip("`"))]
    if len(marks) >= 3 and len(lines) > 1 and lines[-1].strip() == marks:
        return "\n".join(lines[1:-1])
    return text


def split_progress(output: str) -> tuple[list[str], int]:
    """Split the output of a running tool call so far into its last lines, and the number of those before them.

    crow's own terminal leaves out the beginning of a long output, and says so in its first line.
    """
    lines = output.split("\n")
    before = LINES_BEFORE.fullmatch(lines[0])
    hidden = int(before[1]) if before else 0
    lines = lines[1:] if before else lines
    return lines[-KEPT_LINES:], hidden + max(len(lines) - KEPT_LINES, 0)
