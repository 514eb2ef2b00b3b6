"""Input that a terminal should survive: of the user, and of the agent."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

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
    screen.until("Esc stops all")  # the question takes keys
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
