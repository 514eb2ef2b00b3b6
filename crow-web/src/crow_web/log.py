"""The log of a chat: the updates of a session as blocks of HTML. The blocks are those of the terminal."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crow_core.acp.schema import (
    ContentBlock,
    DiffContent,
    ImageBlock,
    ResourceBlock,
    SessionUpdate,
    ToolCall,
    UserMessageChunk,
)
from crow_persistence.export.html import replace_invalid
from crow_persistence.export.transcript import MAX_DIFF_LENGTH, decode_media
from crow_terminal.blocks import (
    AnsweredQuestion,
    Block,
    BlockRecord,
    Call,
    CommandOutput,
    Note,
    OpenCall,
    Plan,
    UserPrompt,
    find_diffs,
    find_output,
)
from crow_terminal.markdown import CodeLines, Prose
from crow_terminal.printable_text import OVERWRITTEN, escape
from jinja2 import Environment
from markupsafe import Markup

from crow_web import markup
from crow_web.app_contexts import read_server
from crow_web.live import Source

LIVE_LINES = 12
"""Lines of a running tool call's output that are shown."""
MAX_OUTPUT = 60_000
"""Characters of a tool call's output that are shown: the last ones."""


class BlockRenderer:
    """Makes the HTML of blocks from the macros in `blocks.html`."""

    def __init__(self, templates: Environment) -> None:
        self._macros: Any = templates.get_template("blocks.html").module

    def render(self, macro: str, *values: Any) -> str:
        return str(getattr(self._macros, macro)(*values))

    def render_block(self, block: Block) -> str:
        """Make the HTML of a block that stands alone."""
        match block:
            case Prose():
                return self.render("prose", block, markup.to_markdown(block.text))
            case CodeLines():
                return self.render("code", block, render_code(block))
            case UserPrompt(text=text):
                return self.render("prompt", text)
            case Call():
                return self.render("call", block, *self.describe(block.call))
            case Plan(entries=entries):
                return self.render("plan", entries)
            case AnsweredQuestion():
                return self.render("answered", block)
            case Note():
                return self.render("note", block)
            case CommandOutput(command=command, output=output):
                return self.render("command", command, render_output(output))

    def render_running(self, running: OpenCall) -> str:
        """Make the HTML of a tool call that runs."""
        shown = running.lines[-LIVE_LINES:]
        hidden = running.hidden + len(running.lines) - len(shown)
        return self.render(
            "running", running.call, render_arguments(running.call), markup.to_output("\n".join(shown)), hidden
        )

    def render_attachment(self, content: ContentBlock) -> str:
        """Make the HTML of an image, or of what an app has told; "" for other content."""
        if isinstance(content, ImageBlock) and (url := make_image_url(content)):
            return self.render("image", url)
        if isinstance(content, ResourceBlock) and (server := read_server(content)):
            return self.render("app_told", server, content.resource.text)
        return ""

    def describe(self, call: ToolCall) -> tuple[Markup, list[tuple[str, str]], Markup, list[str]]:
        """Return the arguments, the changes, the output and the images of a tool call."""
        diffs = [(diff.path, make_diff(diff)) for diff in find_diffs(call)]
        parts: Iterable[Any] = (getattr(part, "content", None) for part in call.content or [])
        images = [url for part in parts if isinstance(part, ImageBlock) and (url := make_image_url(part))]
        return render_arguments(call), diffs, render_output(find_output(call)), images


class Log:
    """Gives each block of a session its place: an id that stays, in the order in which the blocks begin."""

    def __init__(self, renderer: BlockRenderer, put: Callable[[str, Source], None], start: int = 0) -> None:
        """`put` takes the id of a block and its HTML. `start` is the number of the first block."""
        self.record = BlockRecord()
        self.put = put
        self._renderer = renderer
        self._next = start
        self._calls: dict[str, str] = {}
        """The blocks of the tool calls that run, by their ids."""
        self._container = ""
        """The block that holds the parts of the thought or the code that is open; empty for none."""
        self._parts = 0
        self._kind = ""
        """`thought` or `listing`."""

    def add(self, update: SessionUpdate, now: float) -> None:
        """Show an update."""
        if isinstance(update, UserMessageChunk) and self._renderer.render_attachment(update.content):
            self.show(self.record.end_text())
            self.show_attachment(update.content)
            return
        plan = self.record.plan
        self.show(self.record.add(update, now))
        if self.record.plan is not plan:
            self._put_plan()
        self._put_running(getattr(update, "tool_call_id", ""))
        self._put_open()

    def end_turn(self, now: float) -> None:
        """Show what is still open, as nothing more comes."""
        self.show(self.record.end_turn(now))
        self._put_plan()
        self._put_open()
        self._container = ""

    def show(self, blocks: Sequence[Block]) -> None:
        """Show finished blocks."""
        for block in blocks:
            if isinstance(block, Prose | CodeLines):
                self._show_text(block)
                continue
            self._container = ""
            id = self._calls.pop(block.call.tool_call_id, "") if isinstance(block, Call) else ""
            self.put(id or self.take_id(), self._renderer.render_block(block))
        self._put_open()

    def show_attachment(self, content: ContentBlock) -> None:
        """Show what goes along with the text of a prompt."""
        if html := self._renderer.render_attachment(content):
            self.put(self.take_id(), html)

    def take_id(self) -> str:
        """Return the id of the next block."""
        self._container = ""
        self._next += 1
        return f"b{self._next}"

    def find_place(self, call: str) -> str:
        """Return the id of the block of a tool call that runs; empty if it has none."""
        return self._calls.get(call, "")

    def _show_text(self, block: Prose | CodeLines) -> None:
        """Show a part of a message. The parts of a thought are one block, and so are the lines of a code block."""
        match block:
            case CodeLines(thought=False):
                html, kind, goes_on = str(render_code(block)), "listing", block.joined and bool(block.before)
            case _:
                html, kind, goes_on = self._renderer.render_block(block), "thought", True
        if kind == "thought" and not block.thought:
            self.put(self.take_id(), html)
            return
        if not (self._container and goes_on and self._kind == kind):
            id = self.take_id()
            self.put(id, self._renderer.render(kind))
            self._container, self._kind, self._parts = id, kind, 0
        self._parts += 1
        self.put(f"{self._container}.{self._parts}", html)

    def _put_running(self, id: str) -> None:
        if running := self.record.running.get(id):
            if id not in self._calls:
                self._calls[id] = self.take_id()
            self.put(self._calls[id], lambda: self._renderer.render_running(running))
        elif place := self._calls.pop(id, ""):
            self.put(place, None)  # the plan shows what the call did

    def _put_plan(self) -> None:
        plan = self.record.plan
        self.put("plan", self._renderer.render_block(plan) if plan else "")

    def _put_open(self) -> None:
        self.put("tail", self._render_open)

    def _render_open(self) -> str:
        block = self.record.open
        return self._renderer.render("open", block, Markup(self._renderer.render_block(block))) if block else ""


def render_code(block: CodeLines) -> Markup:
    """Return lines of code, coloured as a part of the code before them."""
    code = replace_invalid("\n".join((*block.before, *block.lines, "")))
    lines = markup.colour(code, block.language).split("\n")
    return Markup("\n".join(lines[len(block.before) : len(block.before) + len(block.lines)]) + "\n")


def render_arguments(call: ToolCall) -> Markup:
    """Return the arguments of a tool call: a command as it is, others as JSON."""
    match call.raw_input:
        case {"command": str(command)} if len(call.raw_input) == 1:
            return Markup("{}").format(escape(command))
        case {} | None:
            return Markup("")
        case {**arguments}:
            return markup.to_json(arguments)
        case _:
            return Markup("")


def render_output(output: str) -> Markup:
    """Return the output of a program with its colours."""
    text = output[-MAX_OUTPUT:].rstrip()
    return markup.to_output(OVERWRITTEN.sub("", text))


def make_diff(diff: DiffContent) -> str:
    """Return the edit to a file as a unified diff."""
    old, new = diff.old_text or "", diff.new_text
    if len(old) + len(new) > MAX_DIFF_LENGTH:
        return "The change is too long to be shown."
    before = diff.path if diff.old_text else "/dev/null"
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), before, diff.path, lineterm="", n=3))
    return "\n".join(lines or [f"--- {before}", f"+++ {diff.path}"])


def make_image_url(image: ImageBlock) -> str:
    """Return the URL that contains an image; empty if the image is not of a safe type."""
    url = f"data:{image.mime_type};base64,{image.data}"
    found = decode_media(url)
    return url if found and found[0].startswith("image/") else ""
