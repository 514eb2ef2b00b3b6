"""Paint a block at a width as lines with ANSI styles. Pure: nothing is printed, and no terminal is asked."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from crow_core.acp.schema import DiffContent

from crow_terminal.blocks import (
    AnsweredQuestion,
    Block,
    Call,
    CommandOutput,
    Note,
    Plan,
    UserPrompt,
    find_diffs,
    find_output,
)
from crow_terminal.markdown import CodeLines, Prose
from crow_terminal.printable_text import clip, escape, escape_line, escape_output, hang, hang_label, measure
from crow_terminal.theme import Theme

if TYPE_CHECKING:
    from crow_terminal.render import Renderer

FOLDED_LINES = 5
"""Lines of a tool's output that are printed when it is folded: the last ones."""
FAILED_LINES = 10
"""The same for a tool call that failed."""
FOLDED_DIFF = 40
"""Lines of a diff that are printed when it is folded: the first ones."""
PROMPT_LINES = 20
"""Lines of a prompt that are printed."""
CONTEXT = 2
"""Unchanged lines around a change."""
MAX_COMPARED = 3_000
"""Lines that differ, of each text, which are compared line by line."""

NO_OUTPUT = "[no output]"
"""The words of crow's terminal tool for the model."""
MARKS = {"pending": "○", "in_progress": "◐", "completed": "●"}
"""The mark of each state of a plan's entry."""


class Painter:
    """Paints blocks one after another, with empty lines where they help."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.fold_thoughts = False
        """True if thoughts are left out."""
        self.whole = False
        """True if the output of tools is painted whole."""
        self._last: Block | None = None
        self._last_lines = 0
        self._renderer: Renderer | None = None

    def paint(self, block: Block, width: int) -> list[str]:
        """Paint the next block, after an empty line if it does not belong to the block before."""
        if self.fold_thoughts and isinstance(block, Prose | CodeLines) and block.thought:
            return []
        lines = self.paint_alone(block, width, whole=self.whole)
        gap = [""] if lines and self._needs_gap(block, len(lines)) else []
        if lines:
            self._last, self._last_lines = block, len(lines)
        return [*gap, *lines]

    def _needs_gap(self, block: Block, lines: int) -> bool:
        match block, self._last:
            case _, None:
                return False
            case Prose() | CodeLines(), Prose() | CodeLines():
                return not block.joined or block.thought != self._last.thought
            case Call(), Call() | AnsweredQuestion():
                return isinstance(self._last, Call) and lines + self._last_lines > 2
            case _:
                return True

    def paint_alone(self, block: Block, width: int, *, whole: bool = False) -> list[str]:
        """Paint a block without regard to others. `whole` leaves out no line of it."""
        theme, width = self.theme, max(width, 10)
        match block:
            case Prose() | CodeLines():
                return self._render(block, width)
            case UserPrompt(text=text):
                return paint_prompt(text, width, theme)
            case Call():
                return paint_call(block, width, theme, whole=whole)
            case AnsweredQuestion():
                return paint_answered(block, width, theme)
            case Plan():
                return paint_plan(block, width, theme)
            case Note():
                return paint_note(block, width, theme)
            case CommandOutput():
                return paint_command(block, width, theme, whole=whole)

    def _render(self, block: Prose | CodeLines, width: int) -> list[str]:
        if self._renderer is None or self._renderer.theme != self.theme:
            from crow_terminal.render import Renderer  # it loads Rich and Pygments, when the screen is up already

            self._renderer = Renderer(self.theme)
        return self._renderer.render(block, width)


def paint_prompt(text: str, width: int, theme: Theme) -> list[str]:
    lines = escape(text.strip("\n")).split("\n")
    if len(lines) > PROMPT_LINES:
        lines = [*lines[: PROMPT_LINES - 1], f"… {len(lines) - PROMPT_LINES + 1} more lines"]
    rows = [row for line in lines for row in hang(line, width - 2)]
    return [theme.style("prompt", f"{'❯' if not n else ' '} {row}") for n, row in enumerate(rows)]


def paint_call(block: Call, width: int, theme: Theme, *, whole: bool) -> list[str]:
    call = block.call
    match call.status:
        case _ if block.not_run or block.stopped:
            mark, style = "○", "warning"
        case "completed":
            mark, style = "●", "good"
        case "failed":
            mark, style = "✗", "bad"
        case _:
            mark, style = "○", "warning"
    diffs = find_diffs(call)
    discarded = block.not_run and bool(diffs) and call.kind == "execute"  # it ran in the sandbox
    end = "denied" if block.denied else "discarded" if discarded else "not run" if block.not_run else ""
    end = end or ("stopped" if block.stopped else "" if mark in "●✗" else "did not end")
    remarks = [
        *([end] if end else []),
        *([format_seconds(block.seconds)] if block.seconds >= 1 and not (block.denied or block.not_run) else []),
    ]
    counts = [count_changes(diff) for diff in diffs]
    if any(map(any, counts)) and not discarded:
        remarks.insert(0, f"+{sum(added for added, _ in counts)} −{sum(removed for _, removed in counts)}")
    remark = f"  {' · '.join(remarks)}" if remarks else ""
    title = escape_line(call.title or call.name or call.tool_call_id)
    title = title if whole else clip(title, width - 2 - len(remark))
    lines = [f"{theme.style('warning' if block.denied else style, mark)} {title}{theme.style('dim', remark)}"]
    if not block.diffs_shown or whole:
        for diff in diffs:
            lines += paint_diff(diff, width, theme, whole=whole, name=len(diffs) > 1)
    output = "" if block.answered and block.denied and not whole else find_output(call).removeprefix(NO_OUTPUT)
    if output and not discarded and not (diffs and call.status == "completed"):
        failed = call.status == "failed" and not (block.denied or block.not_run or block.stopped)
        quiet = call.kind in ("read", "search") and not failed
        lines += paint_output(output, theme, width, whole=whole, quiet=quiet, failed=failed)
    return lines


def paint_output(
    output: str, theme: Theme, width: int, *, whole: bool, quiet: bool = False, failed: bool = False
) -> list[str]:
    """Paint the output of a tool: its last lines, or, if it is quiet, their number."""
    lines = escape_output(output).rstrip("\n").split("\n")
    shown = len(lines) if whole else FAILED_LINES if failed else FOLDED_LINES
    style = "bad" if failed else "dim"
    if quiet and not whole and len(lines) > 1:
        return [theme.style("dim", f"  └ {len(lines)} lines")]
    hidden = len(lines) - shown if len(lines) > shown + 1 else 0
    kept = [f"… {hidden} lines before · Ctrl-O", *lines[hidden:]] if hidden else lines
    if not whole:  # else lines that are too wide are left to the terminal to break, and are copied whole
        kept = [piece for line in kept for piece in hang(line, width - 4)]
    return [theme.style(style, f"  {'└' if not n else ' '} {line}".rstrip()) for n, line in enumerate(kept)]


def paint_command(block: CommandOutput, width: int, theme: Theme, *, whole: bool) -> list[str]:
    head = theme.style("accent", "! ") + escape_line(block.command)
    code = theme.style("bad", f"  exit code {block.code}") if block.code else ""
    return [head + code, *(paint_output(block.output, theme, width, whole=whole) if block.output.strip() else [])]


def paint_answered(block: AnsweredQuestion, width: int, theme: Theme) -> list[str]:
    """Paint a question and its answer. The terminal breaks the lines of a command, so that they are copied whole."""
    first, *rest = hang(f"{block.title} · {block.answer}", width - 2)
    title, answer = theme.style("prompt", first[: len(block.title)]), theme.style("dim", first[len(block.title) :])
    lines = [f"{theme.style('warning', '?')} {title}{answer}", *(theme.style("dim", f"  {row}") for row in rest)]
    for line in block.lines:
        rows = hang_label(line.text, line.indent, width - 2) if line.indent else [line.text]
        lines += [theme.style(line.style, f"  {row}".rstrip()) for row in rows]
    written = block.written.split("\n") if block.written else []
    return [*lines, *(theme.style("accent", f"  {' ' if n else '→'} {line}") for n, line in enumerate(written))]


def paint_plan(block: Plan, width: int, theme: Theme) -> list[str]:
    lines = [theme.style("accent", "Plan")]
    for entry in block.entries:
        style = {"completed": "dim", "in_progress": "prompt"}.get(entry.status, "")
        text = f"  {MARKS.get(entry.status, '○')} {escape_line(entry.content)}"
        text = clip(text, width)
        lines.append(theme.style(style, text) if style else text)
    return lines


def paint_note(block: Note, width: int, theme: Theme) -> list[str]:
    if block.severity == "rule":
        text = clip(f"── {escape_line(block.text)} ", width)
        return [theme.style("dim", text + "─" * (width - measure(text)))]
    mark, style = {
        "error": ("✗", "bad"),
        "warning": ("!", "warning"),
        "done": (" ", "dim"),
    }.get(block.severity, ("·", "dim"))
    lines = [piece for line in escape(block.text).split("\n") for piece in wrap(line, width - 2)]
    return [theme.style(style, f"{mark if not n else ' '} {line}") for n, line in enumerate(lines)]


def wrap(line: str, width: int) -> list[str]:
    """Break a line between words; a word that is longer than the width stays whole."""
    from textwrap import wrap  # imported here as few blocks need it

    return wrap(line, max(width, 8), break_long_words=False, break_on_hyphens=False) or [""]


def format_seconds(seconds: float) -> str:
    """Format a duration: `1.2s`, `48s`, `2m 05s`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def count_changes(diff: DiffContent) -> tuple[int, int]:
    """Return how many lines a change adds and removes."""
    added = removed = 0
    for mark, _, _ in compare(diff.old_text or "", diff.new_text):
        added += mark == "+"
        removed += mark == "-"
    return added, removed


def compare(old: str, new: str) -> Iterator[tuple[str, int, str]]:
    """Iterate over the lines of a diff: the mark ` `, `+`, `-` or `…`, the number of the line, and its text."""
    before, after = old.splitlines(), new.splitlines()
    shorter = min(len(before), len(after))
    start = next((n for n in range(shorter) if before[n] != after[n]), shorter)
    rest = shorter - start
    end = next((n for n in range(rest) if before[-1 - n] != after[-1 - n]), rest)
    old_part, new_part = before[start : len(before) - end], after[start : len(after) - end]
    first = max(0, start - CONTEXT)
    for n in range(first, start):
        yield " ", n + 1, before[n]
    if max(len(old_part), len(new_part)) > MAX_COMPARED:
        yield from (("-", start + n + 1, line) for n, line in enumerate(old_part))
        yield from (("+", start + n + 1, line) for n, line in enumerate(new_part))
    else:
        matcher = difflib.SequenceMatcher(None, old_part, new_part, autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "equal":
                for n in range(c, d):
                    if n < c + CONTEXT or n >= d - CONTEXT:
                        yield " ", start + n + 1, new_part[n]
                    elif n == c + CONTEXT:
                        yield "…", 0, ""
                continue
            yield from (("-", start + n + 1, old_part[n]) for n in range(a, b))
            yield from (("+", start + n + 1, new_part[n]) for n in range(c, d))
    stop = len(after) - end
    for n in range(stop, min(stop + CONTEXT, len(after))):
        yield " ", n + 1, after[n]


def paint_diff(diff: DiffContent, width: int, theme: Theme, *, whole: bool, name: bool = True) -> list[str]:
    """Paint a change with the numbers of its lines. The rows of a line that is too wide are indented as it is."""
    lines = [theme.style("dim", f"  {escape_line(diff.path)}")] if name else []
    changes = list(compare(diff.old_text or "", diff.new_text))
    shown = changes if whole or len(changes) <= FOLDED_DIFF + 1 else changes[:FOLDED_DIFF]
    digits = len(str(max((number for _, number, _ in shown), default=0)))
    for mark, number, text in shown:
        label = f"  {str(number) if number else '':>{digits}} {mark} "
        style = {"+": "added", "-": "removed"}.get(mark, "dim")
        for n, row in enumerate(hang(escape(text), width - len(label))):
            lines.append(theme.style(style, f"{' ' * len(label) if n else label}{row}".rstrip()))
    if len(shown) < len(changes):
        lines.append(theme.style("dim", f"  … {len(changes) - len(shown)} more lines · Ctrl-O"))
    if not changes:
        lines.append(theme.style("dim", "  an empty file"))
    return lines
