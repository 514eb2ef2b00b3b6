"""Questions for permission: none is answered by accident, and each can be read. Time passes in a loop of its own."""

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import process_time
from typing import Any

import pytest
from crow_core.acp.client import answer_permission
from crow_core.acp.schema import (
    BlockContent,
    DiffContent,
    PermissionOption,
    PromptResponse,
    RequestPermissionRequest,
    TextBlock,
    ToolCallFields,
)
from crow_terminal.abilities import Abilities
from crow_terminal.agent_connections import AgentAddress
from crow_terminal.blocks import AnsweredQuestion, UserPrompt
from crow_terminal.chat import Chat
from crow_terminal.live import compose_above
from crow_terminal.printable_text import measure
from crow_terminal.question import Question
from crow_terminal.settings import Settings
from crow_terminal.state import State
from crow_terminal.theme import THEMES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_toolkit.application.current import set_app
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

END = PromptResponse(stop_reason="end_turn")
ENTER, PASTE, PAGE_DOWN = Keys.ControlM, Keys.BracketedPaste, Keys.PageDown
ARROWS = (Keys.Up, Keys.Down, Keys.Left, Keys.Right, PAGE_DOWN)
HEREDOC = "\n".join(["cat > out.txt <<'EOF'", *(f"line {n} 値段 مرحبا 🦀" for n in range(2, 30)), "EOF"])


class Waits(selectors.DefaultSelector):
    """Lets the time pass that it would wait."""

    now = 1_000.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self.now += max(timeout, 0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting: its time passes at once."""

    def __init__(self) -> None:
        self.waits = Waits()
        super().__init__(self.waits)

    def time(self) -> float:
        return self.waits.now


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def make_options(*kinds: str) -> list[PermissionOption]:
    options: list[PermissionOption] = []
    for n, kind in enumerate(kinds or ("allow_once", "session", "folder", "reject_once", "no-session")):
        scope = kind.removeprefix("no-")
        own: Any = {"crow": {"answer": {"scope": scope, "text": "git commit …" if n % 2 else "git commit -m x"}}}
        real: Any = kind if "_" in kind else "reject_always" if kind.startswith("no-") else "allow_always"
        name = {"allow_once": "Allow", "reject_once": "Reject"}.get(kind, f"Rule {n}")
        meta = {"meta": own} if "_" not in kind else {}
        options.append(PermissionOption(option_id=kind, name=name, kind=real, **meta))
    return options


def make_request(id: str = "1", *kinds: str, **fields: Any) -> RequestPermissionRequest:
    call: dict[str, Any] = {"kind": "execute", "title": "make", "raw_input": {"command": "make"}, **fields}
    about = ToolCallFields(tool_call_id=id, **call)
    return RequestPermissionRequest(session_id="s", tool_call=about, options=make_options(*kinds))


@cache
def make_chat() -> Chat:
    return Chat(Settings(AgentAddress("crow", ("true",)), "/project"))


def open_chat() -> Chat:
    """Return a chat as if it was new: making the key bindings takes longer than a test."""
    chat = make_chat()
    chat.state = State(agent="crow", folder="/project")
    chat.take_lines(79)
    chat.shown.clear()
    chat.pastes.clear()
    chat.terminal.set_text("")
    chat.terminal.application.key_processor.reset()
    return chat


@dataclass
class Person:
    """Somebody at the keyboard of a chat in a turn, whose agent takes reasons and commands."""

    chat: Chat = field(default_factory=lambda: open_chat())
    answers: list[Any] = field(default_factory=list[Any])
    """The answers that the agent was sent."""
    asked: int = 0

    def __post_init__(self) -> None:
        person, state = self, self.chat.state

        class Client:
            def answer(self, id: int, response: Any) -> None:
                person.answers.append(response)

            async def cancel(self, session: str) -> None:
                pass  # Enter in an empty editor sends what waits: that is not an answer

            async def prompt(self, session: str, blocks: Any) -> PromptResponse:
                await asyncio.get_running_loop().create_future()
                return END

        self.chat.client = Client()  # pyright: ignore[reportAttributeAccessIssue] # the agent itself is not needed
        state.abilities = Abilities(answers=("reason", "command"))
        state.open_session(None, [], 0.0)
        state.submit("begin", 0.0)

    def press(self, key: str, data: str | None = None) -> None:
        application = self.chat.terminal.application
        with set_app(application):
            application.key_processor.feed(KeyPress(key, data))
            application.key_processor.process_keys()

    def ask(self, request: RequestPermissionRequest | None = None) -> None:
        self.asked += 1
        self.chat._ask(self.asked, request or make_request(str(self.asked)))  # pyright: ignore[reportPrivateUsage]

    async def write(self, text: str, gap: float = 0.1) -> None:
        for letter in text:
            self.press(ENTER if letter == "\r" else letter)
            await asyncio.sleep(gap)

    async def press_after(self, seconds: float, *keys: str) -> None:
        for key in keys:
            await asyncio.sleep(seconds)
            self.press(key)
        await asyncio.sleep(1)

    def look(self, width: int = 79, height: int = 24, theme: str = "mono") -> list[str]:
        now = asyncio.get_running_loop().time()
        lines = compose_above(self.chat.state, now, width, height, THEMES[theme], [])
        return [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in lines] if theme == "mono" else lines

    @property
    def question(self) -> Question:
        assert isinstance(self.chat.state.dialog, Question)
        return self.chat.state.dialog

    @property
    def prompt(self) -> str:
        return self.chat.terminal.editor.text

    @property
    def written(self) -> str:
        """All prompts, and what is in the editor."""
        sent = [block.text for block in self.chat.shown if isinstance(block, UserPrompt)]
        return "".join([*sent, *self.chat.state.queue, self.chat.expand(self.prompt)])

    def list_answered(self) -> list[str]:
        return [block.answer for block in self.chat.shown if isinstance(block, AnsweredQuestion)]

    def list_chosen(self) -> list[str]:
        """List the options that were chosen, without the answers that a turn was cancelled."""
        return [answer.outcome.option_id for answer in self.answers if answer != answer_permission()]


GAPS = st.floats(1 / 15, 1 / 3)
WORDS = st.sampled_from(
    ["yes", "you", "a", "a1", "n", "e", "y", "1", "2", "no", "an", "3 eggs", "and", "never", "always", "2024", "N", "4"]
)
BEGINNINGS = st.sampled_from(["ye", "an", "no", "ea", "12", "Na"])
PASTES = st.sampled_from(["y", "a\r1\r", "1\n", "yes\n", "n"])


@st.composite
def typing(draw: st.DrawFn, *, moves: bool) -> list[tuple[float, str, str]]:
    """Make keys of somebody who types without looking up: the seconds before each, the key, and its text."""
    keys: list[tuple[str, str]] = []
    for kind in draw(st.lists(st.integers(0, 11), min_size=2, max_size=10)):
        if kind < 7:
            keys += [(letter, letter) for letter in f"{draw(WORDS)} "]
        elif kind == 7:
            pasted = draw(PASTES)
            keys.append((PASTE, pasted))
        elif kind < 10 or not moves:
            keys.append((ENTER, ""))
        else:
            keys.append((draw(st.sampled_from(ARROWS)), ""))
    return [(draw(GAPS), key, text) for key, text in keys]


def make_questions(times: Sequence[float], person: Person) -> list[asyncio.TimerHandle]:
    return [asyncio.get_running_loop().call_later(time, person.ask) for time in times]


def check_typing(keys: list[tuple[float, str, str]], times: list[float]) -> None:
    async def type_on() -> None:
        person = Person()
        make_questions(times, person)
        for gap, key, text in keys:
            await asyncio.sleep(gap)
            person.press(key, text or None)
        assert person.list_answered() == []
        assert person.list_chosen() == []

    run(type_on())


MOMENTS = st.lists(st.floats(0, 8), min_size=1, max_size=3)
LONG: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=100, **LONG)
@given(typing(moves=True), MOMENTS)
def test_nobody_answers_a_question_by_typing_on(keys: list[tuple[float, str, str]], times: list[float]):
    check_typing(keys, times)


def test_a_question_asks_for_a_pause_only_if_somebody_types():
    async def look() -> None:
        person = Person()
        await asyncio.sleep(1)
        person.ask()
        assert person.look()[-1].rstrip() == "╰"
        await asyncio.sleep(0.1)
        await person.write("x")
        assert person.look()[-1] == "╰ stop typing to answer"
        await asyncio.sleep(1)
        person.chat.terminal.set_text("")
        assert person.look()[-1] == "╰ letter, or ↑↓ Enter · Esc stops"
        await person.press_after(0.6, "a")
        assert person.look()[-1] == "╰ number, or ↑↓ Enter · Esc goes back"

    run(look())


def test_a_change_that_does_not_fit_is_shown_from_its_first_changed_line():
    async def look() -> None:
        person = Person()
        old = "".join(f"some words of line {n} that are broken\n" for n in range(9))
        diff = DiffContent(path="/project/a.py", old_text=old, new_text=old.replace("line 4", "line four"))
        person.ask(make_request(kind="edit", title="str_replace", raw_input=None, content=[diff]))
        lines = person.look(29, 20)
        assert not any(line.startswith("│ 4 ") for line in lines), lines
        assert any(line.startswith("│ 5 - some words of line 4") for line in lines), lines
        assert any(line.startswith("│ 5 + some words of line four") for line in lines)

    run(look())


def test_enter_after_a_page_down_without_a_pause_answers_nothing():
    keys = [(PASTE, "y"), (PASTE, "y"), (ENTER, ""), (PAGE_DOWN, ""), (ENTER, "")]
    check_typing([(0.25, *key) for key in keys], [0.0])


@pytest.mark.slow
@settings(max_examples=1000, **LONG)
@given(typing(moves=True), MOMENTS)
def test_nobody_answers_a_question_in_a_thousand_sessions(keys: list[tuple[float, str, str]], times: list[float]):
    check_typing(keys, times)


@settings(max_examples=100, **LONG)
@given(
    st.lists(st.tuples(st.floats(0.5, 5), BEGINNINGS, typing(moves=False)), min_size=1, max_size=3),
    st.lists(st.floats(0, 12), min_size=1, max_size=3),
)
def test_nobody_answers_by_typing_on_after_a_rest_and_no_letter_is_lost(
    bursts: list[tuple[float, str, list[tuple[float, str, str]]]], times: list[float]
):
    """After a rest the first key is a letter of a word, or a paste: Enter alone is how one answers."""

    async def type_on() -> None:
        person, expected = Person(), ""
        make_questions(times, person)
        for rest, beginning, keys in bursts:
            await asyncio.sleep(rest)
            for gap, key, text in [*((0.3, letter, letter) for letter in beginning), *keys, (0.1, ".", ".")]:
                await asyncio.sleep(gap)
                person.press(key, text or None)
                expected += text
        assert person.list_answered() == []
        assert "".join(person.written.split()) == "".join(expected.split())

    run(type_on())


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [("y", "allow_once"), ("N", "reject_once"), ("\r", "allow_once"), ("a1", "session"), ("a\r", "session")],
)
def test_a_key_after_a_pause_answers_and_leaves_the_prompt_empty(keys: str, chosen: str):
    async def answer() -> None:
        person = Person()
        person.ask()
        await person.press_after(0.9, *(ENTER if key == "\r" else key for key in keys))
        assert person.list_chosen() == [chosen]
        assert person.prompt == ""

    run(answer())


@pytest.mark.parametrize("rest", [0.9, 1.5, 60.0])
def test_no_letter_answers_while_the_prompt_has_words(rest: float):
    """Somebody who types slowly writes "hey" with a rest before the last letter."""

    async def answer() -> None:
        person = Person()
        await person.write("he")
        person.ask()
        await person.press_after(rest, "y")
        assert (person.answers, person.prompt) == ([], "hey")
        person.press(Keys.ControlU)
        await person.press_after(0.9, "y")
        assert (person.list_chosen(), person.prompt) == (["allow_once"], "")

    run(answer())


def test_what_lasts_needs_a_second_key_and_esc_goes_back():
    async def answer() -> None:
        person = Person()
        person.ask()
        await person.press_after(0.6, "a")
        assert person.answers == []
        assert [line.strip("│ ❯") for line in person.look()][-7:-1] == [
            "git commit …",
            "1  Yes, for this session",
            "git commit -m x",
            "2  Yes, always in this folder",
            "3  No, for this session",
        ][-6:] or person.look()
        person.chat.stop()
        assert not person.question.is_about_lasting
        await person.press_after(0.9, "a", Keys.Down, ENTER)
        assert person.list_chosen() == ["folder"]
        assert person.list_answered() == ["Yes, always in this folder: git commit -m x"]

    run(answer())


@pytest.mark.parametrize("gap", [0.05, 0.2, 0.34, 0.36, 0.6, 0.9])
def test_the_second_key_may_follow_the_first_at_once(gap: float):
    async def answer() -> None:
        person = Person()
        person.ask()
        await asyncio.sleep(0.6)
        await person.write("a2", gap)
        await asyncio.sleep(1)
        assert (person.list_chosen(), person.prompt) == (["folder"], "")

    run(answer())


@pytest.mark.parametrize("gap", [0.05, 0.2, 0.33])
@pytest.mark.parametrize("text", ["a1 is a sauce", "a11", "a1s", "a9", "ya1", "a\r\r"])
def test_words_that_begin_like_two_keys_answer_nothing(text: str, gap: float):
    async def answer() -> None:
        person = Person()
        person.ask()
        await asyncio.sleep(0.6)
        await person.write(text, gap)
        await asyncio.sleep(1)
        assert person.answers == []
        assert person.prompt == text.rstrip("\r").removeprefix("a" if "\r" in text else "")

    run(answer())


def test_enter_right_after_a_letter_answers_at_once():
    async def answer() -> None:
        person = Person()
        person.ask()
        await asyncio.sleep(0.6)
        person.press("y")
        await asyncio.sleep(0.1)
        person.press(ENTER)
        assert person.list_chosen() == ["allow_once"]
        assert person.prompt == ""

    run(answer())


def test_a_letter_that_came_too_early_is_not_left_behind():
    async def answer() -> None:
        person = Person()
        person.ask()
        await person.write("y", gap=0.2)
        await person.press_after(0.7, "y")
        assert (person.list_chosen(), person.prompt) == (["allow_once"], "")

    run(answer())


def test_with_words_in_the_prompt_enter_sends_them_and_answers_nothing():
    async def answer() -> None:
        person = Person()
        await person.write("stop that")
        person.ask()
        await person.press_after(0.9, ENTER)
        assert person.answers == []
        assert [*person.chat.state.queue] == ["stop that"]

    run(answer())


def test_a_reason_and_another_command_are_written():
    async def answer() -> None:
        person = Person()
        for keys, text in (("n", "use git"), ("n", ""), ("e", " -v")):
            person.ask()
            await person.press_after(0.6, keys)
            await person.write(f"{text}\r")
        assert [(answer.outcome.option_id, answer.meta) for answer in person.answers[::2]] == [
            ("reject_once", {"crow": {"reason": "use git"}}),
            ("allow_once", {"crow": {"command": "make -v"}}),
        ]
        assert person.list_answered() == ["No", "No", "Edit first"]
        assert person.prompt == ""

    run(answer())


def test_an_answer_after_the_turn_has_ended_goes_to_the_prompt():
    async def answer() -> None:
        person = Person()
        person.ask()
        await asyncio.sleep(0.9)
        person.press("y")
        person.chat.perform(person.chat.state.end_turn(END, 1.0))
        await asyncio.sleep(1)
        person.press("a")
        await asyncio.sleep(1)
        assert (person.answers, person.prompt) == ([answer_permission()], "ya")  # which cancels

    run(answer())


def test_of_fifty_questions_each_is_numbered_and_answered_alone():
    async def answer() -> None:
        person = Person()
        for _ in range(50):
            person.ask()
        for n in range(1, 51):
            assert (f"{n} of 50" in person.look()[-8]) or n == 50 or any(f"{n} of 50" in one for one in person.look())
            assert len(person.answers) == n - 1
            await person.press_after(0.6, "y")
        assert len(person.answers) == 50

    run(answer())


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 20), (160, 45), (40, 12), (30, 10)])
@pytest.mark.parametrize("step", [False, True])
def test_a_long_command_leaves_the_title_its_size_and_the_answers_visible(columns: int, rows: int, step: bool):
    async def look() -> None:
        person = Person()
        person.ask(make_request(raw_input={"command": HEREDOC}))
        await asyncio.sleep(0.6)
        person.question.enter_step(lasting=step)
        lines = person.look(columns - 1, rows)
        assert len(lines) <= max(3, rows - 6)
        assert all(measure(line) <= columns - 1 for line in lines)
        assert any("Run a command" in line for line in lines)
        for letter in "123" if step and rows >= 20 else "" if step else "yane":
            assert any(f"{letter} " in line for line in lines), lines
        if rows >= 20:
            assert any("cat > out.txt" in line for line in lines)
            assert any(f"of {len(HEREDOC.splitlines())}" in line for line in lines) or rows > 40

    run(look())


def test_all_of_a_command_is_read_page_by_page_and_printed_with_the_answer():
    async def read() -> None:
        person = Person()
        person.ask(make_request(raw_input={"command": HEREDOC}))
        seen: set[str] = set()
        for _ in range(8):
            seen |= {line.removeprefix("│ ") for line in person.look()}
            await person.press_after(0.6, Keys.PageDown)
        assert {*HEREDOC.splitlines()} <= seen
        await person.press_after(0.6, "y")
        printed = person.chat.take_lines(79)
        assert {f"  {line}" for line in HEREDOC.splitlines()} <= {*printed[-31:]} | {
            line.replace("\x1b[0m", "") for line in printed
        }

    run(read())


def test_all_of_a_command_is_read_page_by_page_while_the_reason_is_written():
    async def read() -> None:
        person = Person()
        person.ask(make_request(raw_input={"command": HEREDOC}))
        await person.press_after(0.6, "n")
        await asyncio.sleep(0.6)
        assert any("Why" in line for line in person.look())
        seen: set[str] = set()
        for _ in range(8):
            seen |= {line.removeprefix("│ ") for line in person.look()}
            await person.press_after(0.1, PAGE_DOWN)
        assert {*HEREDOC.splitlines()} <= seen

    run(read())


DIFF = DiffContent(path="/project/src/pancakes.py", old_text="a\n", new_text="b\n")


def test_a_short_command_that_has_run_stands_above_what_it_changed():
    async def look() -> None:
        person = Person()
        told = BlockContent(
            content=TextBlock(text="It ran in the sandbox, and would change:\n\n- a.txt (new, 0 bytes)")
        )
        new = DiffContent(path="/notes/a.txt", new_text="")
        fields = {"raw_input": {"command": "touch a.txt"}, "meta": {"crow": {"changed": 1}}}
        person.ask(make_request(content=[told, new], **fields))
        assert [line.text for line in person.question.lines] == [
            "touch a.txt",
            "",
            "It ran in the sandbox, and would change:",
            "",
            "- a.txt (new, 0 bytes)",
        ]

    run(look())


@pytest.mark.parametrize(
    ("fields", "title", "danger"),
    [
        ({}, "Run a command", ""),
        ({"raw_input": {"command": "cd x && sudo rm -r y"}}, "Run a command", "deletes"),
        ({"raw_input": {"command": "git  reset --hard"}}, "Run a command", "deletes"),
        ({"raw_input": {"command": "npm run format; echo rm"}}, "Run a command", ""),
        ({"kind": "edit", "content": [DIFF], "raw_input": {}}, "Edit src/pancakes.py", ""),
        (
            {"kind": "edit", "content": [BlockContent(content=TextBlock(text=".env: secrets.")), DIFF]},
            "Edit src/pancakes.py",
            "look twice",
        ),
        ({"content": [DIFF], "meta": {"crow": {"changed": 3}}}, "Apply what a command changed: 3 files", ""),
        ({"content": [DIFF]}, "Run a command: it changes 1 file", ""),
        ({"kind": "fetch", "raw_input": {"url": "https://example.org/a"}}, "Fetch example.org", ""),
        ({"kind": "other", "title": "demo_peek", "raw_input": {"key": "v\n2"}}, "demo_peek", ""),
    ],
)
def test_a_title_says_in_words_what_happens(fields: dict[str, Any], title: str, danger: str):
    async def look() -> None:
        person = Person()
        person.ask(make_request(**fields))
        assert (person.question.title, person.question.danger) == (title, danger)
        assert danger in person.look()[0] + person.look()[1]

    run(look())


@pytest.mark.parametrize("text", ["git reset a ", "find / ", "git push x ", "\n", " ", "a/", "sudo ", "{", "値 "])
def test_a_huge_command_is_asked_about_without_a_wait(text: str):
    async def look() -> None:
        person = Person()
        command = text * (300_000 // len(text))
        start = process_time()
        person.ask(make_request(raw_input={"command": f"echo {command} x"}))
        assert len(person.look()) <= 18
        assert process_time() - start < 10  # else some part takes the square of the length

    run(look())


def test_names_of_the_agent_are_the_answers():
    """Applying what a command has changed, and answers of other agents, have the same keys."""

    async def look() -> None:
        person = Person()
        options = make_options("allow_once", "session", "reject_once")
        options[0].name, options[2].name = "Apply", "Discard"
        person.ask(RequestPermissionRequest(session_id="s", tool_call=make_request().tool_call, options=options))
        assert [(row.letter, row.label) for row in person.question.rows] == [
            ("y", "Apply"),
            ("a", "Apply, and do not ask again for git commit …"),
            ("n", "Discard, and say why"),
            ("e", "Discard, and run another command"),
        ]
        person.chat.state.abilities = Abilities()
        kinds: list[Any] = ["allow_always", "allow_once", "allow_once", "reject_once"]
        options = [PermissionOption(option_id=str(n), name=f"Name {n}", kind=kind) for n, kind in enumerate(kinds)]
        person.chat.perform(person.chat.state.withdraw(1, 0.0))
        person.ask(RequestPermissionRequest(session_id="s", tool_call=make_request().tool_call, options=options))
        shown = [(row.letter, row.label) for row in person.question.rows]
        assert shown == [("y", "Name 1"), ("1", "Name 2"), ("a", "Name 0"), ("n", "Name 3")]
        await person.press_after(0.6, "1")
        assert person.list_chosen() == ["2"]

    run(look())
