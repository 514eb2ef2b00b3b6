"""Draw a question for permission. Pure.

The box has no right edge: terminals do not agree on the width of some characters, and would break it.
"""

from collections.abc import Sequence

from crow_terminal.blocks import StyledLine
from crow_terminal.dialogs import Row
from crow_terminal.paint import wrap
from crow_terminal.permission import LASTING, Answer
from crow_terminal.printable_text import clip, fold, hang_label, measure
from crow_terminal.question import Question
from crow_terminal.theme import Theme

SMALL = 8
"""Rows below which the answers share one row."""
RULE_ROWS = 3
"""Rows of a rule that the second step shows."""


def compose_question(
    question: Question,
    width: int,
    height: int,
    theme: Theme,
    *,
    ready: bool,
    is_typing: bool = False,
    has_words: bool = False,
    letter: str = "",
    number: int = 1,
    count: int = 1,
) -> list[str]:
    """Compose a question in at most `height` rows. `number` of `count` says which of several it is.

    `ready` tells whether keys answer it now, `is_typing` whether some have come too early, `letter` which one is about
    to answer. While the prompt `has_words`, none does.
    """
    edge = theme.style("bad" if question.danger else "warning", "│")
    answers = list_answer_rows(question, width - 2, theme, letter)
    if height < SMALL or len(answers) > height - 4:
        answers = squeeze_answers(question, width - 2, theme)
    keys = compose_hint(question, width, theme, ready=ready, is_typing=is_typing, has_words=has_words)
    hint = [] if height < 4 else [keys]
    room = height - 1 - len(hint) - len(answers)
    about = compose_about(question, width - 2, room, theme) if room > 0 else []
    title = compose_title(question, width, theme, number, count)
    return [title, *(f"{edge} {line}" if line else edge for line in [*about, *answers]), *hint][: max(height, 2)]


def compose_subject(question: Question, width: int, height: int, theme: Theme) -> list[str]:
    """Compose what a question is about without its answers, in at most `height` rows."""
    edge = theme.style("bad" if question.danger else "warning", "│")
    about = compose_about(question, width - 2, height - 1, theme)
    return [compose_title(question, width, theme, 1, 1), *(f"{edge} {line}" for line in about if line)]


def compose_title(question: Question, width: int, theme: Theme, number: int, count: int) -> str:
    right = f" {number} of {count}" if count > 1 else ""
    danger = f" ! {question.danger} " if question.danger else ""
    title = clip(question.title, width - 3 - measure(right) - measure(danger) - 1)
    line = "─" * max(0, width - 4 - measure(title) - measure(danger) - measure(right))
    style = "bad" if question.danger else "warning"
    marked = theme.style("prompt", title)
    return theme.style(style, "╭ ") + marked + theme.style(style, f" {danger}{line}{right}")


def compose_about(question: Question, width: int, room: int, theme: Theme) -> list[str]:
    """Compose what a question is about: all of it, or as much as fits, with its size."""
    rows = fold_lines(question, width)
    question.height = len(rows)
    if len(rows) + 1 <= room or (len(rows) <= 1 and room):
        question.page = len(rows)
        shown = [theme.style(line.style, line.text) for _, line in rows]
        return [*shown, ""] if len(rows) < room else shown
    question.page = max(1, room - 1)
    if question.top < 0:
        question.top = next((n for n, (number, _) in enumerate(rows) if number >= question.start), 0)
    question.scroll(0)
    part = rows[question.top : question.top + question.page]
    first, last, all = part[0][0], part[-1][0], len(question.lines)
    size = f"lines {first}-{last} of {all} · PgUp PgDn" if width > 34 else f"{first}-{last} of {all} · PgUp PgDn"
    shown = [theme.style(line.style, line.text) for _, line in part]
    return [*shown, theme.style("dim", clip(f"── {size} " + "─" * width, width).rstrip("…"))]


def fold_lines(question: Question, width: int) -> Sequence[tuple[int, StyledLine]]:
    """Break the lines that are too wide, each row with the number of its line."""
    if question.width != width:
        question.width = width
        question.folded = [
            (number, StyledLine(clip(piece, width), line.style))
            for number, line in enumerate(question.lines, 1)
            for piece in fold_line(line, width)
        ]
    return question.folded


def fold_line(line: StyledLine, width: int) -> list[str]:
    if line.style == "warning":  # it is in words
        return [piece for part in wrap(line.text, width) for piece in fold(part, width)]
    if line.indent > width // 2:
        return fold(line.text, width)
    return hang_label(line.text, line.indent, width)


def list_answer_rows(question: Question, width: int, theme: Theme, letter: str) -> list[str]:
    """List the answers, one a row; in the second step, each rule once above its answers."""
    lines: list[str] = []
    rule = ""
    for n, row in enumerate(question.shown_rows):
        answer: Answer | None = row.value
        if question.is_about_lasting and answer and answer.rule != rule:
            rule = answer.rule
            lines += [theme.style("prompt", piece) for piece in shorten_rule(rule, width)]
        chosen = row.letter == letter.lower() if letter else n == question.selected
        lines.append(compose_answer(row, width, theme, chosen=chosen, danger=question.danger))
    return lines


def compose_answer(row: Row, width: int, theme: Theme, *, chosen: bool, danger: str) -> str:
    label = row.label if measure(row.label) <= width - 5 else row.label.replace(LASTING, "always for", 1)
    text = clip(f"{'❯' if chosen else ' '} {row.letter or ' '}  {label}", width)
    allows = row.value is None or (row.value.allows and not row.value.wants)
    lasts = row.value is None or row.value.rule
    style = "bad" if danger and allows else "warning" if lasts and allows else ""
    if chosen:
        text = theme.style("prompt", text)
    shown = theme.style(style, text) if style else text
    room = width - 3 - measure(text)
    return shown + (theme.style("dim", f"  {row.detail}") if row.detail and len(row.detail) <= room - 2 else "")


def squeeze_answers(question: Question, width: int, theme: Theme) -> list[str]:
    """Compose the answers for a low screen: by their first words, in one row; in the second step the marked one."""
    if question.is_about_lasting:
        row = question.shown_rows[question.selected]
        return [theme.style("prompt", clip(f"❯ {row.letter}  {row.label}: {row.value.rule}", width))]
    words = [f"{row.letter} {row.label.split()[0].rstrip(',') if row.value else 'Always'}" for row in question.rows]
    line = "  ".join(words)
    return [clip(line if measure(line) <= width else " ".join(words), width)]


def shorten_rule(rule: str, width: int) -> list[str]:
    pieces = [piece for part in wrap(rule, width) for piece in fold(part, width)]
    return pieces if len(pieces) <= RULE_ROWS else [*pieces[: RULE_ROWS - 1], clip(pieces[RULE_ROWS - 1] + "……", width)]


def compose_hint(question: Question, width: int, theme: Theme, *, ready: bool, is_typing: bool, has_words: bool) -> str:
    """Compose the row with the keys of a question."""
    if not ready:
        text = "stop typing to answer" if is_typing else ""
    elif has_words:
        text = "Ctrl-U empties the prompt; then answer"
    elif question.is_about_lasting:
        text = "number, or ↑↓ Enter · Esc goes back"
    else:
        text = "letter, or ↑↓ Enter · Esc stops"
    style = "bad" if question.danger else "warning"
    return theme.style(style, "╰ ") + theme.style("dim", clip(text, width - 2))
