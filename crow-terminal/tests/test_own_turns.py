"""Turns that the agent begins by itself, such as those of timers, and the command that leaves for a worktree."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crow_core.acp.schema import AvailableCommand, SessionInfoUpdate, TextBlock, UserMessageChunk
from crow_terminal.blocks import UserPrompt
from crow_terminal.effects import Cancel, Leave, Send, Show
from crow_terminal.local_commands import find_command, find_local_commands
from crow_terminal.state import State

if TYPE_CHECKING:
    from conftest import Screen


def ready(**fields: Any) -> State:
    state = State(agent="crow", folder="/project", **fields)
    state.open_session(None, [], 0.0)
    return state


def tell(state: State, turn: str) -> list[Any]:
    return state.receive(SessionInfoUpdate(meta={"crow": {"turn": turn}}), 1.0)


def test_a_turn_that_the_agent_begins_is_shown_as_one_and_prompts_wait_for_its_end():
    state = ready()
    tell(state, "began")
    assert state.busy
    state.receive(UserMessageChunk(content=TextBlock(text="Look.")), 1.0)
    assert not any(isinstance(one, Send) for one in state.submit("and now?", 2.0))
    *shown, sent = tell(state, "ended")
    assert Show(UserPrompt("Look.")) in shown
    assert sent == Send("and now?")


def test_esc_stops_a_turn_that_the_agent_has_begun():
    state = ready()
    tell(state, "began")
    assert Cancel() in state.stop(2.0)
    tell(state, "ended")
    assert not state.busy


def test_what_is_told_of_a_turn_during_a_prompted_one_changes_nothing():
    state = ready()
    state.submit("hi", 1.0)
    tell(state, "began")
    tell(state, "ended")
    assert state.busy


def test_the_command_worktree_leaves_for_one_where_the_caller_makes_it():
    state = ready(has_worktrees=True)
    state.commands = [AvailableCommand(name="worktree", description="…")]  # the agent's, which only explains
    found = find_command(state, "/worktree fix")
    assert found
    command, words = found
    assert command.run(state, words) == [Leave(worktree="fix")]
    [said] = command.run(state, "fix the parser")
    assert "has no spaces: /worktree fix-the-parser" in str(said)
    assert "worktree" not in [one.name for one in find_local_commands(ready())]


def test_plain_lines_ask_at_once_what_a_turn_of_the_agent_asks(
    program: list[str], start: "Callable[..., Screen]", tmp_path: Path
):
    program[3] = "plain"
    screen = start()
    screen.until(">")
    screen.type(f"timer {tmp_path}/time\r")
    screen.until(lambda: screen.text.rstrip().endswith("\n>"))
    (tmp_path / "time").touch()
    screen.until("Answer (y, a, n, e):")
    screen.type("y\r")
    screen.until("→ Yes")
    screen.until(lambda: screen.text.rstrip().endswith("\n>"))
    screen.type("hello\r")
    screen.until("You said: hello")
    assert screen.text.index("It is time.") < screen.text.index("make tea") < screen.text.index("You said: hello")
    screen.type("/quit\r")
    assert screen.wait() == 0
