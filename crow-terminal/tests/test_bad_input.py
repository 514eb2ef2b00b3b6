"""Input that a terminal should survive: of the user, and of the agent."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from crow_terminal.terminal import Terminal
from prompt_toolkit.key_binding import KeyBindings

if TYPE_CHECKING:
    from conftest import Screen

    Start = Callable[..., Screen]

BOX = "╭ Run a command ──\n│ make\n│\n│ ❯ y  Yes\n│   n  No\n╰ letter, or ↑↓ Enter\ny\n"
WORDS = ("値段は高いですか", "كم السعر اليوم؟", "🦀 👩‍👩‍👧 🏳️‍🌈 ok", "e\u0301 n\u0303o")


def test_a_paste_that_looks_like_a_question_and_its_answer_answers_nothing(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("ask\r")
    screen.until("letter, or")
    screen.type(f"\x1b[200~{BOX}\x1b[201~")
    screen.until("Ctrl-U empties the prompt")
    screen.type("\r")
    screen.until("» ╭ Run a command")  # it waits for the end of the turn, as any prompt
    assert "Answer:" not in screen.text
    screen.until("Esc stops")  # the question takes keys
    screen.type("N")
    screen.until("Answer: no")
    screen.until("You said: ╭ Run a command")


def test_a_text_of_the_agent_that_looks_like_a_question_takes_no_keys(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type(f"\x1b[200~say {BOX}\x1b[201~\r")
    screen.until("You said: say ╭ Run a command")
    screen.type("y")
    screen.until("❯ y")


def test_a_storm_of_bells_rings_nothing(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("bells\r")
    screen.until("the bells")
    assert "\\u0007\\u0007\\u0007" in screen.text
    assert b"\x07\x07" not in screen.written


def test_fifty_questions_at_once_are_numbered_and_esc_answers_them_all(start: "Start"):
    screen = start(100, 30)
    screen.until("small")
    screen.type("flood 50\r")
    screen.until("1 of 50")
    screen.answer("y", mark="1 of 50")
    screen.until("2 of 50")
    screen.type("\x1b")
    screen.until(lambda: "letter, or" not in screen.text)
    screen.until(lambda: "\n".join(screen.everything).count("Answer: ") == 50)
    assert "\n".join(screen.everything).count("Answer: cancelled") == 49


def test_a_line_that_is_printed_right_after_ctrl_l_does_not_lose_the_marks_of_pastes():
    """Without these marks each line of a paste would be sent, and would answer questions."""
    terminal = Terminal(
        above=lambda width, height: [],
        below=lambda width: [],
        label=lambda: "> ",
        shows_editor=lambda: True,
        editor_rows=lambda: 5,
        note_key=lambda: None,
        take=lambda width: [],
        is_moving=lambda: False,
        keys=KeyBindings(),
    )
    renderer: Any = terminal.application.renderer
    renderer._bracketed_paste_enabled = True  # as after a frame
    renderer.clear()
    getattr(terminal, "_print")(["a line"])  # noqa: B009 # as a frame does, when the model goes on
    assert renderer._bracketed_paste_enabled is False  # so the next frame switches them on


def test_ctrl_z_in_a_turn_shows_the_cursor(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("wait\r")
    screen.until(lambda: "waiting" in screen.text and "Esc stops" in screen.text)
    begun = len(screen.written)
    screen.type("\x1a")
    screen.until(lambda: b"\x1b[?25h" in screen.written[begun:])


@pytest.mark.parametrize("columns", [40, 80])
def test_words_of_all_scripts_are_typed_sent_and_shown(start: "Start", columns: int):
    screen = start(columns)
    screen.until("small")
    for words in WORDS:
        screen.type(f"{words}\r")
        answer = f"{words} <small>".encode()
        screen.until(lambda answer=answer: answer in screen.written)
    frame = screen.text.rstrip().split("\n")
    assert frame[-3:-1] == ["❯", "─" * (columns - 1)]
    screen.type("\x04")
    assert screen.wait() == 0
