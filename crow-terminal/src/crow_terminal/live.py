"""Compose the rows below the printed ones: running calls, questions, the queue, the footer. Pure: state to lines."""

import os
from collections.abc import Sequence

from crow_core.acp.schema import Cost

from crow_terminal.blocks import OpenCall
from crow_terminal.command_menu import GROUP_END
from crow_terminal.dialogs import ListDialog, TextDialog
from crow_terminal.paint import FOLDED_LINES, format_seconds, paint_plan, wrap
from crow_terminal.printable_text import clip, clip_start, escape_line, escape_output, fold, measure
from crow_terminal.question import Question
from crow_terminal.question_view import compose_question, compose_subject
from crow_terminal.state import State
from crow_terminal.theme import Theme

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_STEP = 0.12
"""Seconds between two pictures of the spinner."""
TAIL_ROWS = 8
"""Rows of the open text. Few, because a terminal that becomes narrower pushes rows into its history."""
CALLS = 3
"""Running tool calls that are shown."""
PLAN_ROWS = 6
QUEUE_ROWS = 3
MENU_ROWS = 8
"""Rows of a list to choose from."""
ABOUT_ROWS = 10
"""Rows of what a question is about."""


def compose_above(
    state: State,
    now: float,
    width: int,
    height: int,
    theme: Theme,
    tail: Sequence[str],
    *,
    has_words: bool = False,
) -> list[str]:
    """Compose the rows above the editor. `tail` is the open text, painted."""
    room = max(2, min(TAIL_ROWS, height // 3))
    shown = state.transcript.open
    lines = [] if tail and shown and shown.joined else [""]
    lines += [*tail[-room:], ""] if tail else []
    dialog = state.dialog
    about = state.question
    if not about:
        lines += compose_running(state, now, width, height, theme)
    if state.transcript.plan and state.phase == "working" and not dialog and height >= 16:
        lines += ["", *shorten_plan(paint_plan(state.transcript.plan, width, theme), theme)]
    if state.busy and not state.asked:
        lines.append(compose_spinner(state, now, width, theme))
    if state.phase == "starting":
        lines.append(theme.style("dim", clip(f"Starting {state.agent}… Ctrl-C twice leaves", width)))
    if isinstance(dialog, ListDialog):
        lines += compose_choice(dialog, width, max(3, min(MENU_ROWS, height // 2)), theme)
    elif isinstance(dialog, TextDialog):
        if about:
            lines += compose_subject(about, width, max(2, height // 3), theme)
        remarks = [line for text in dialog.about for line in escape_output(text).split("\n")]
        lines += [clip(line, width) for line in remarks[:ABOUT_ROWS]]
        label = clip(f"{dialog.label}:", width)
        keys = "Enter sends · Esc goes back" if dialog.back else "Enter sends · Esc declines"
        shown_keys = clip(f"  {keys}", width - measure(label))
        lines.append(theme.style("warning", label) + theme.style("dim", shown_keys))
    queued: list[str] = []
    for text in [*state.queue][-QUEUE_ROWS:]:
        queued.append(theme.style("dim", clip(f"» {escape_line(text)}", width)))
    if state.queue.prompts and state.phase == "working":
        queued.append(theme.style("dim", clip("  ↑ takes it back · Enter stops the turn and sends it", width)))
    elif state.queue.steers and state.phase == "working":
        queued.append(
            theme.style("dim", clip("  read at the next step · ↑ takes it back · Enter stops and sends it", width))
        )
    height = max(3, height - 6)
    if isinstance(dialog, Question):
        queued = queued if height > 12 else []
        count = state.answered + 1 + len(state.waiting)
        lines += compose_question(
            dialog,
            width,
            height - len(queued),
            theme,
            letter=state.pause.letters[:1],
            ready=not state.pause.get_rest(now) or (dialog.is_about_lasting and not state.pause.is_typing()),
            is_typing=state.pause.is_typing(),
            has_words=has_words and not state.pause.letters,
            number=state.answered + 1,
            count=count,
        )
    elif state.asked and not state.is_open and dialog:
        lines.append(theme.style("dim", clip("  stop typing to answer", width)) if state.pause.is_typing() else "")
    return [*lines, *queued][-height:]


def compose_running(state: State, now: float, width: int, height: int, theme: Theme) -> list[str]:
    """Compose the running tool calls and the user's command, with their last lines of output."""
    lines: list[str] = []
    running = [*state.transcript.running.values()]
    for one in running[-CALLS:]:
        lines += compose_call(one, now, width, FOLDED_LINES if len(running) == 1 and height >= 16 else 1, theme)
    if len(running) > CALLS:
        lines.append(theme.style("dim", f"  and {len(running) - CALLS} more"))
    if state.command:
        lines.append(f"{theme.style('accent', '!')} {clip(escape_line(state.command), width - 2)}")
        lines += compose_output(state.command_lines, state.command_hidden, FOLDED_LINES, width, theme)
    return lines


def compose_call(running: OpenCall, now: float, width: int, rows: int, theme: Theme) -> list[str]:
    passed = running.get_seconds(now)
    seconds = f"  {format_seconds(passed)}" if passed >= 1 else ""
    title = escape_line(running.call.title or running.call.name or "…")
    head = f"{theme.style('accent', '◐')} {clip(title, width - 2 - len(seconds))}{theme.style('dim', seconds)}"
    return [head, *compose_output(running.lines, running.hidden, rows, width, theme)]


def compose_output(lines: Sequence[str], hidden: int, rows: int, width: int, theme: Theme) -> list[str]:
    """Compose the last lines of an output, after the number of those that are not shown, like a finished block."""
    shown = [line for text in lines[-rows - 1 :] for line in escape_output(text).split("\n")]
    hidden += max(len(lines) - rows - 1, 0)
    if hidden or len(shown) > rows + 1:
        hidden, shown = hidden + max(len(shown) - rows, 0), shown[-rows:]
    before = [f"… {hidden} lines before"] if hidden and rows > 1 else []
    kept = [*before, *(shown if rows > 1 else shown[-1:])]
    return [theme.style("dim", clip(f"  {line}", width).rstrip()) for line in kept] if any(shown) else []


def shorten_plan(lines: list[str], theme: Theme) -> list[str]:
    """Keep the part of a plan around the entry that is being worked on."""
    if len(lines) <= PLAN_ROWS + 1:
        return lines
    at = next((n for n, line in enumerate(lines) if "◐" in line or "○" in line), len(lines) - 1)
    start = max(1, min(at - 1, len(lines) - PLAN_ROWS))
    shown = lines[start : start + PLAN_ROWS]
    return [lines[0], *shown, theme.style("dim", f"  of {len(lines) - 1} steps")]


def compose_spinner(state: State, now: float, width: int, theme: Theme) -> str:
    picture = SPINNER[int(now / SPINNER_STEP) % len(SPINNER)]
    runs = state.command or state.transcript.running
    what = "Stopping" if state.cancelled else "Running" if runs else "Working"
    seconds = now - (state.since if state.command else state.step_since)
    passed = f"{int(seconds)}s" if seconds < 60 else format_seconds(seconds)
    shown = [] if state.transcript.running and not state.command else [passed]  # each tool call has its own
    can_go_on = state.abilities.backgrounds and any(is_command(one) for one in state.transcript.running.values())
    end = ["Ctrl-C twice leaves"] if state.cancelled else ["Esc stops", *(["Ctrl-B: background"] if can_go_on else [])]
    text = f" {what}… {' · '.join([*shown, *end])}"
    if len(text) >= width:
        text = clip(f" {what}… {' · '.join([*shown, end[0]])}", width - 1)
    return theme.style("accent", picture) + theme.style("dim", text)


def is_command(running: OpenCall) -> bool:
    """True if a tool call runs a command."""
    return running.call.kind == "execute"


def compose_choice(dialog: ListDialog, width: int, rows: int, theme: Theme) -> list[str]:
    """Compose a list to choose from."""
    lines = [theme.style("accent", "? ") + theme.style("prompt", clip(dialog.title, width - 2))]
    about = [line for text in dialog.about for line in escape_output(text).split("\n")]
    hidden = len(about) - ABOUT_ROWS
    for line in about[: ABOUT_ROWS if hidden > 0 else None]:
        lines += [f"    {piece}" for part in wrap(line, width - 4) for piece in fold(part, width - 4)]
    if hidden > 0:
        lines.append(theme.style("warning", f"    … {hidden} more lines"))
    found = dialog.found
    dialog.selected = max(0, min(dialog.selected, len(found) - 1))
    top = max(0, min(dialog.selected - rows // 2, len(found) - rows))
    for n, row in enumerate(found[top : top + rows], top):
        number = f"{row.letter}  " if row.letter else f"{n + 1} " if not dialog.searchable else ""
        box = "" if dialog.marked is None else "[x] " if n in dialog.marked else "[ ] "
        dot = "● " if row.current else ""
        label = f"{number}{box}{dot}{escape_line(row.label)}"
        chosen = n == dialog.selected
        if not row.detail and measure(label) > width - 2:  # it is read to its end
            first, *rest = [piece for part in wrap(label, width - 2) for piece in fold(part, width - 2)]
            text = [f"{'❯' if chosen else ' '} {first}", *(f"  {piece}" for piece in rest)]
            lines += [theme.style("prompt", line) if chosen else line for line in text]
            continue
        label = clip(label, width - 2)
        room = width - 4 - measure(label)
        detail = f"  {clip(escape_line(row.detail), room)}" if row.detail and room > 8 else ""
        text = f"{'❯' if chosen else ' '} {label}"
        lines.append((theme.style("prompt", text) if chosen else text) + theme.style("dim", detail))
    if not found:
        lines.append(theme.style("dim", "  nothing fits"))
    lines.append(theme.style("dim", clip("  " + describe_keys(dialog), width)))
    return lines


def describe_keys(dialog: ListDialog) -> str:
    if dialog.searchable:
        offer = "type to search · " if len(dialog.rows) > 4 else ""
        search = f"“{escape_line(dialog.search)}” · " if dialog.search else offer
        return f"{search}↑↓ Enter · Esc closes"
    if dialog.rows and dialog.rows[0].letter:
        return "letter, or ↑↓ Enter · Esc closes"
    space = "Space marks · " if dialog.marked is not None else ""
    return f"{space}↑↓ or a number, Enter · Esc declines"


def compose_menu(items: Sequence[tuple[str, str]], selected: int | None, width: int, theme: Theme) -> list[str]:
    """Compose the completions: each a text with its description."""
    at = selected or 0
    top = max(0, min(at - MENU_ROWS // 2, len(items) - MENU_ROWS))
    shown = items[top : top + MENU_ROWS]
    column = min(max((measure(text) for text, _ in shown), default=0), max(width // 2, 12))
    has_room = max((measure(detail) for _, detail in items), default=0) <= width - 4 - column
    lines: list[str] = []
    for n, (text, detail) in enumerate(shown, top):
        text = clip(escape_line(text), min(column, width - 2))
        room = width - 4 - column
        detail = detail if has_room else detail.split(GROUP_END, 1)[-1]
        more = " " * (column - measure(text)) + "  " + clip(escape_line(detail), room) if detail and room > 8 else ""
        lines.append(
            theme.style("accent", f"❯ {text}") + theme.style("dim", more)
            if n == selected
            else f"  {text}" + theme.style("dim", more)
        )
    if len(items) > MENU_ROWS:
        lines.append(theme.style("dim", f"  {at + 1} of {len(items)}"))
    return lines


def compose_footer(state: State, now: float, width: int, theme: Theme) -> str:
    """Compose the last row: a hint, or what model works where, and how full its context is."""
    if state.hint and now < state.hint_until:
        return theme.style("warning", clip(f"  {state.hint}", width))
    model = state.options.get_choice("model") or (state.abilities.name if state.agent != "crow" else "")
    folder = shorten_folder(state.folder, max(12, width // 4))
    rules = [part for part in (state.options.get_mode(), state.sandbox) if part]
    left = [part for part in (model, folder, state.branch, *rules) if part]
    right = describe_usage(state)
    while measure("  " + " · ".join(left) + ("  " + " · ".join(right) if right else "")) > width:
        if len(left) > len(rules) + 1:
            del left[1]
        elif len(right) > 1:
            right.pop()
        elif len(left) > len(rules):
            del left[0]
        elif right or len(left) > 1:  # when the user is asked stays until the end
            del (right or left)[-1]
        else:
            break
    text = "  " + " · ".join(left)
    end = " · ".join(right)
    gap = width - measure(text) - measure(end)
    return theme.style("dim", clip(text + " " * max(gap, 2) + end if end else text, width))


def describe_usage(state: State) -> list[str]:
    """Return how full the context is, the share of the server's cache, and the cost."""
    parts: list[str] = [f"{len(state.background)} in background"] if state.background else []
    usage = state.usage
    if usage and usage.size > 0:
        parts.append(f"{usage.used / usage.size:.0%} of {format_count(usage.size)}")
    elif usage and usage.used:
        parts.append(f"{format_count(usage.used)} tokens")
    if state.cached is not None:
        parts.append(f"{state.cached:.0%} cached")
    if usage and isinstance(usage.cost, Cost) and usage.cost.amount:
        sign = "$" if usage.cost.currency == "USD" else f"{escape_line(usage.cost.currency)} "
        digits = 2 if usage.cost.amount >= 1 else 4
        parts.append(f"{sign}{usage.cost.amount:.{digits}f}")
    return parts


def format_count(count: int) -> str:
    """Format a number of tokens: `900`, `33k`, `1.0M`."""
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k" if count >= 1000 else str(count)


def shorten_folder(path: str, columns: int) -> str:
    """Write a folder with `~` for the home folder, and keep its end."""
    home = os.path.expanduser("~")
    path = escape_line(path)
    path = f"~{path[len(home) :]}" if path == home or path.startswith(f"{home}/") else path
    return clip_start(path, columns)
