"""Ctrl-B and /background in the terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from crow_core.acp.schema import AvailableCommand, AvailableCommandsUpdate, SessionInfoUpdate
from crow_terminal.abilities import Abilities
from crow_terminal.background_list import describe_work
from crow_terminal.effects import CallBackground
from crow_terminal.local_commands import find_command
from crow_terminal.state import State

if TYPE_CHECKING:
    from conftest import Screen

    Start = Callable[..., Screen]


def ready(**can: bool) -> State:
    state = State(abilities=Abilities(**can))
    state.open_session(None, [], 0.0)
    return state


def test_ctrl_b_asks_the_agent_while_a_turn_runs():
    state = ready(backgrounds=True, lists_background=True)
    assert state.send_to_background(1.0) == []
    assert state.hint == "Nothing runs that can go to the background: a command or a sub-agent."
    state.submit("go", 2.0)
    assert state.send_to_background(3.0) == [CallBackground("send")]
    assert state.end_send(0, 4.0) == []
    assert state.hint.startswith("Nothing runs")


def test_ctrl_b_says_that_another_agent_has_no_background():
    state = ready()
    state.submit("go", 1.0)
    assert state.send_to_background(2.0) == []
    assert state.hint == "This agent has no background."
    assert find_command(state, "/background") is None


@pytest.mark.parametrize(
    ("words", "effect"),
    [
        ("", CallBackground("list")),
        (" stop 1", CallBackground("stop", "1")),
        (" looker and b?", CallBackground("tell", "looker", "and b?")),
    ],
)
def test_what_background_does_without_a_turn_works_while_one_runs(words: str, effect: CallBackground):
    state = ready(backgrounds=True, lists_background=True)
    commands = [AvailableCommand(name="background", description="")]
    state.receive(AvailableCommandsUpdate(available_commands=commands), 0.0)
    found = find_command(state, f"/background{words}")
    assert found
    command, rest = found
    assert command.works_in_turn
    assert command.run(state, rest) == [effect]


def test_bringing_something_back_is_a_prompt():
    state = ready(backgrounds=True, lists_background=True)
    commands = [AvailableCommand(name="background", description="")]
    state.receive(AvailableCommandsUpdate(available_commands=commands), 0.0)
    assert find_command(state, "/background 1") is None


def test_what_ends_with_the_session_is_said_once():
    state = ready(backgrounds=True, lists_background=True)
    state.receive(SessionInfoUpdate(meta={"crow": {"background": ["sleep\x1b 9", "make"]}}), 0.0)
    assert state.describe_background_end() == r"Stopped with the session: sleep\u001b 9, make."
    assert "Stopped with the session" in str(state.leave_session())
    assert state.describe_background_end() == ""


def test_work_is_described_in_a_line():
    work = {"name": "1", "title": "make", "end": "", "lastLine": "a\x1b[2Jb"}
    assert describe_work(work) == r"1: make (running): a\u001b[2Jb"
    assert describe_work({"name": "a", "title": "Look", "end": "finished"}) == "a: Look (finished)"
    assert describe_work({}) == "(running)"


def test_a_command_goes_to_the_background_and_is_listed_and_told(start: "Start"):
    screen = start(SENDS="1")
    screen.until("small")
    screen.type("\x02")
    screen.until("Nothing runs that can go to the background")
    screen.type("wait\r")
    screen.until("waiting")
    screen.type("\x02")
    screen.until("1 in background")
    screen.type("/background\r")
    screen.until("1: sleep 9 (running): z")
    screen.type("/background stop 1\r")
    screen.until("stop 1")
    screen.type("/background 1 more words\r")
    screen.until("tell 1 more words")
    screen.type("\x04")
    assert screen.wait() == 0
    assert "Stopped with the session: sleep 9." in screen.text


def test_ctrl_b_moves_the_cursor_in_words_while_no_turn_runs(start: "Start"):
    screen = start(SENDS="1")
    screen.until("small")
    screen.type("helo\x02l\r")
    screen.until("You said: hello")
