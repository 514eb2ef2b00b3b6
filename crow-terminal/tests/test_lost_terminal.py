"""crow ends when its terminal does, whether that terminal controls it and so sends SIGHUP, or not."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Screen

    Start = Callable[..., Screen]

STEPS = {"numbers 40000 0.01": "line-00012", "ask make": "letter, or"}
"""Prompts, each with what the screen shows when the terminal is closed."""
PLAIN_STEPS = {"wait": b"wait", "numbers 40000 0.01": b"line-00012"}


@pytest.mark.parametrize("controls", ["", "1"])
@pytest.mark.parametrize("prompt", STEPS)
def test_crow_ends_with_its_terminal(prompt: str, controls: str, start: "Start"):
    screen = start(CONTROLS=controls)
    screen.until("small")
    screen.type(f"{prompt}\r")
    screen.until(lambda: STEPS[prompt].encode() in screen.written)
    assert screen.hang_up() == 0


@pytest.mark.parametrize("prompt", PLAIN_STEPS)
def test_plain_crow_ends_with_its_terminal(prompt: str, program: list[str], start: "Start"):
    program[3] = "plain"
    screen = start()
    screen.until(">")
    screen.type(f"{prompt}\r")
    screen.until(lambda: PLAIN_STEPS[prompt] in screen.written)
    assert screen.hang_up() == 1
