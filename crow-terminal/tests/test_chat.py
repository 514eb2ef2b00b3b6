"""The terminal on a pseudo-terminal, with an agent that is not crow."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_core.acp.schema import AgentMessageChunk, TextBlock
from crow_terminal.agent_connections import AgentAddress
from crow_terminal.chat import Chat
from crow_terminal.effects import Show
from crow_terminal.settings import Settings
from crow_terminal.terminal import breaks_rows_anew

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 100_000

if TYPE_CHECKING:
    from conftest import Screen

    Start = Callable[..., Screen]


def test_a_prompt_is_answered_above_the_editor(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("hello\r")
    screen.until(lambda: "You said: hello <small>" in screen.text and "25% of 20k" in screen.text)
    lines = [line for line in screen.text.split("\n") if line]
    assert lines[0].split() == [
        "crow",
        "with",
        "parrot",
        "·",
        "/help",
        "shows",
        "the",
        "keys",
        "and",
        "the",
        "commands",
    ]
    assert lines[1:4] == ["❯ hello", "You said: hello <small>", "─" * 79]
    assert lines[4:6] == ["❯", "─" * 79]
    assert re.fullmatch(r"  small · \S+ +25% of 20k", lines[6])
    screen.type("\x04")
    assert screen.wait() == 0
    assert "❯ hello" in screen.text
    assert "25% of" not in screen.text
    assert termios.tcgetattr(screen.terminal) == screen.before


def test_the_editor_takes_text_before_the_agent_is_there(start: "Start"):
    screen = start(before="sleep 1; ")
    screen.until("Starting")
    screen.type("early\r")
    screen.until("» early")
    screen.until("You said: early")


def test_many_lines_a_paste_and_the_history(start: "Start", tmp_path: Path):
    screen = start()
    screen.until("small")
    screen.type("one\x0atwo\x1b\rthree")
    screen.until("three")
    paste = "\r".join(f"row {n}" for n in range(500))
    screen.type(f"\x1b[200~{paste}\x1b[201~")
    screen.until("[paste 1: 500 lines]")
    screen.type("\r")
    screen.until("row 499 <small>")
    screen.type("\x1b[A")
    screen.until("row 499")
    assert "+row 499" in (tmp_path / "history").read_text()
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600


def test_ctrl_r_searches_the_earlier_prompts_and_brings_one_to_the_editor(start: "Start"):
    screen = start()
    screen.until("small")
    for text in ("bake a cake", "wash the bowl", "bake a pie", "wash the bowl"):
        screen.type(f"{text}\r")
        screen.until(f"You said: {text}")
    screen.type("a draft\x12")
    screen.until("Earlier prompts")
    shown = screen.text[screen.text.index("? Earlier prompts") :]
    assert [line.strip("❯ ") for line in shown.split("\n")[1:4]] == ["wash the bowl", "bake a pie", "bake a cake"]
    screen.type("bake c")
    screen.until(lambda: "“bake c”" in screen.text and "bake a pie" not in screen.text[screen.text.index("? Earl") :])
    screen.type("\x7f\x1b")
    screen.until("❯ a draft")  # Esc leaves the prompt as it was
    screen.type("\x12")
    screen.until("Earlier prompts")
    screen.type("pie\r")
    screen.until("❯ bake a pie")
    screen.type("!\r")
    screen.until("You said: bake a pie!")


def test_ctrl_r_without_earlier_prompts_is_a_sentence(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("\x12")
    screen.until("There are no earlier prompts.")


KEEP, RESTORE = b"\x1b[22;2t", b"\x1b[23;2t"
"""Make the terminal keep, and restore, the title of its window."""


@pytest.mark.parametrize("end", ["\x04", signal.SIGTERM, signal.SIGKILL])
def test_title_of_the_window_is_the_agents_and_the_former_one_comes_back(start: "Start", end: str | signal.Signals):
    screen = start()
    screen.until("small")
    screen.until(lambda: screen.screen.title.endswith(" · parrot"))
    screen.type("ask\r")
    screen.until("letter, or")
    assert screen.screen.title.startswith("? ")
    screen.type("\x1b")
    screen.until("Answer: cancelled")
    screen.until(lambda: not screen.screen.title.startswith("?"))
    if isinstance(end, str):
        screen.type(end)
    else:
        screen.process.send_signal(end)
    screen.wait()
    screen.until(lambda: RESTORE in screen.written)
    assert screen.written.index(KEEP) < screen.written.index(b"\x1b]2;")
    assert (screen.written.count(KEEP), screen.written.count(RESTORE)) == (1, 1)
    assert screen.written.rindex(b"\x1b]2;") < screen.written.index(RESTORE)


def test_esc_cancels_and_stays_and_the_queue_comes_back_to_the_editor(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("wait\r")
    screen.until("Esc stops")
    screen.type("next\r")
    screen.until("» next")
    screen.type("\x1b")
    screen.until("Cancelled.")
    screen.until("❯ next")
    screen.type("\r")
    screen.until("You said: next")


def test_enter_once_more_sends_the_queue_now(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("wait\r")
    screen.until("waiting")
    screen.type("now\r")
    screen.until("» now")
    screen.type("\r")
    screen.until("You said: now")


def test_enter_steers_alt_q_queues_and_esc_gives_back_what_was_not_taken(start: "Start"):
    screen = start(STEERS="1")
    screen.until("small")
    screen.type("wait\r")
    screen.until("waiting")
    screen.type("rather\r")
    screen.until(lambda: {"❯ rather", "❯"} <= {*screen.text.split("\n")} and "» " not in screen.text)
    screen.type("nothing\r")
    screen.until("» nothing")
    screen.type("later\x1bq")
    screen.until("» later")
    screen.type("draft")
    screen.until("❯ draft")
    screen.type("\x1b")
    screen.until("Cancelled.")
    screen.until("❯ nothing\n  later\n  draft")
    screen.type("\r")
    screen.until("You said: nothing")


def test_ctrl_c_twice_leaves(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("draft\x03")
    screen.until("Ctrl-C again leaves.")
    assert "draft" not in screen.text
    screen.type("\x03")
    assert screen.wait() == 0


def test_a_permission_is_answered_by_arrows(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("ask\r")
    screen.until("letter, or ↑↓ Enter")
    lines = screen.text.split("\n")
    at = next(n for n, line in enumerate(lines) if line.startswith("╭"))
    assert lines[at].startswith("╭ Run a command  ! deletes ──")
    assert [line.strip("│❯ ") for line in lines[at + 1 : at + 7]] == [
        "rm -rf build",
        "",
        "y  Yes",
        "a  Allow always: rm *",
        "n  No, and say why  Shift-N: without a word",
        "e  Edit first",
    ]
    screen.type("\x1b[B")
    screen.until("❯ a  Allow always")
    screen.answer("\r", mark="e  Edit first")
    screen.until("❯ 1  Allow always: rm *")
    screen.answer("\r")
    screen.until("Answer: ever")
    assert "? Run a command · Allow always: rm *\n  rm -rf build\n" in screen.text
    screen.type("\x0f")
    screen.until(lambda: any("└ out 0" in line for line in screen.everything))


@pytest.mark.parametrize("key", ["\x1b", "\x03"])
def test_esc_and_ctrl_c_answer_all_open_questions_by_cancelled(start: "Start", key: str):
    screen = start(80, 60)
    screen.until("small")
    screen.type("flood 3\r")
    screen.until("1 of 3")
    screen.type(key)
    screen.until(lambda: screen.text.count("Answer: cancelled") == 3)
    screen.until("25% of 20k")
    assert "╭" not in screen.text
    assert screen.text.count("not answered, as the turn was stopped") == 1


def test_form_behind_a_question_is_cancelled_with_it(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("both rm x\r")
    screen.until("1 of 2")
    screen.type("\x1b")
    screen.until("Answer: cancelled")
    screen.until("Form: cancel")


def test_question_of_a_turn_that_was_cancelled_is_not_shown(start: "Start"):
    screen = start(80, 60)
    screen.until("small")
    screen.type("stubborn\r")
    screen.until("rm first")
    screen.type("\x1b")
    screen.until(lambda: screen.text.count("Answer: cancelled") == 2)
    assert "? Run a command · not answered, as the turn was stopped\n  rm first\n" in screen.text
    assert screen.text.count("not answered") == 1


def test_a_rejection_has_a_reason_and_a_command_is_edited(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("a draft stays")
    screen.until("a draft stays")
    screen.type("\x15ask\r")
    screen.answer("n")
    screen.until("Why, or what to do instead")
    screen.type("use git clean\r")
    screen.until("Answer: no {'crow': {'reason': 'use git clean'}}")
    screen.type("ask\r")
    screen.answer("e")
    screen.until("❯ rm -rf build")
    screen.type(" -v\r")
    screen.until("Answer: yes {'crow': {'command': 'rm -rf build -v'}}")


def test_what_is_typed_while_a_question_appears_stays_in_the_prompt(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("ask\r")
    for letter in "1 a y and 2 eggs":
        screen.type(letter)
        screen.read(0.05)
    screen.until("❯ 1 a y and 2 eggs")
    screen.type("\x1b[200~y\x1b[201~")
    screen.until("❯ 1 a y and 2 eggsy")
    screen.type("\x0aand a second line")
    screen.until("  and a second line")
    screen.until("Ctrl-U empties the prompt")
    assert "Answer:" not in screen.text
    screen.type("\x15")
    screen.until("letter, or")
    screen.type("y")
    screen.until("Answer: yes")
    screen.type("\x19")
    screen.until("❯ 1 a y and 2 eggsy\n  and a second line")


def test_a_question_that_is_withdrawn_takes_no_answer(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("late\r")
    screen.until("The turn is over.")
    screen.until(lambda: "rm late" not in screen.text.replace("❯ ask rm late", "") or "╭" not in screen.text)
    screen.type("y")
    screen.until("❯ y")


def test_a_form_is_filled_in(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("form\r")
    screen.answer("2", mark="❯ 1 red")
    screen.until("❯ 2 blue")
    screen.type("\r")
    screen.until("How many:")
    screen.type("many\r")
    screen.until("This field takes a number.")
    screen.type("\x153\r")
    screen.until("Form: accept {'colour': 'blue', 'count': 3}")


def test_an_agent_that_dies_is_one_sentence_and_starts_again(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("die\r")
    screen.until("✗ parrot ended with exit code 3. It said: I have had enough. Enter starts it")
    assert "Traceback" not in screen.text
    screen.type("again\r")
    screen.until("You said: again")


def test_an_agent_that_does_not_exist_is_one_sentence(start: "Start"):
    screen = start(agent="no-such-agent")
    screen.until("parrot cannot be started: No such file or directory. Enter")


def test_completion_of_commands_and_files(start: "Start", tmp_path: Path):
    (tmp_path / ".gitignore").write_text("ignored*\n")
    for name in ("parser.py", "ignored.py"):
        (tmp_path / name).touch()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    screen = start()
    screen.until("small")
    screen.type("/si")
    screen.until("a song")
    screen.type("\r")
    screen.until("You said: /sing")
    screen.type("see @pars")
    screen.until("  @parser.py")
    screen.type("\t")
    screen.until("❯ see @parser.py")
    screen.type("\r")  # the only file there is was taken: Enter sends
    screen.until("You said: see @parser.py")
    screen.type("@ign")
    screen.until("❯ @ign")
    assert "ignored.py" not in screen.text


def test_agent_completes_the_arguments_of_its_commands(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("/sing ca")
    screen.until("a long one")
    screen.type("\t\r")
    screen.until("You said: /sing canon")


def test_tab_right_after_the_last_letter_completes(start: "Start", tmp_path: Path):
    (tmp_path / "my notes.txt").touch()
    screen = start()
    screen.until("small")
    screen.type("see @my\t")
    screen.until('❯ see @"my notes.txt"')
    screen.type("\x15/mod\t")
    screen.until(lambda: screen.text.count("/model") > 1)


def test_a_model_is_chosen_from_a_list(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("/model\r")
    screen.until("● small")
    screen.type("lar\r")
    screen.until("  large ·")
    screen.type("hi\r")
    screen.until("You said: hi <large>")
    for name in ("small", "large"):  # F2 goes back to the one before
        screen.type("\x1bOQ")
        screen.until(f"  {name} ·")


def test_f2_lists_the_models_while_no_other_was_used(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("\x1bOQ")
    screen.until("● small")


def test_a_command_of_the_user_is_told_to_the_agent(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("!echo it-is-$((6*7)); false\r")
    screen.until("exit code 1")
    screen.until("└ it-is-42")
    screen.type("so?\r")
    screen.until("I ran this command, which ended with exit code 1")


def test_images_are_pasted_from_the_clipboard_and_as_paths(start: "Start", tmp_path: Path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("wl-paste", "xclip"):
        (programs / name).write_text(f'#!/bin/sh\ncat "{tmp_path}/clipboard" || exit 1\n')
        (programs / name).chmod(0o755)
    screen = start(PATH=f"{programs}:{os.environ['PATH']}")
    screen.until("small")
    screen.type("\x16")
    screen.until("There is no image in the clipboard.")
    (tmp_path / "clipboard").write_bytes(PNG)
    screen.type("look \x16")
    screen.until("❯ look [image 1]")
    screen.type("\x1b[200~\x1b[201~")  # some terminals paste an image as nothing
    screen.until("❯ look [image 1][image 2]")
    (tmp_path / "a b.png").write_bytes(PNG + b"more")
    screen.type(f" \x1b[200~file://{tmp_path}/a%20b.png\x1b[201~")
    screen.until("[image 3]")
    screen.type("\r")
    flat = "I see " + ", ".join(f"{length} bytes of image/png" for length in (len(PNG), len(PNG), len(PNG) + 4))
    screen.until(lambda: flat in screen.text.replace("\n", " "))


def test_an_image_that_is_too_large_is_named(start: "Start", tmp_path: Path):
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(10_000_001)
    screen = start()
    screen.until("small")
    screen.type(f"look {tmp_path}/large.png\r")
    screen.until("large.png: larger than 10 MB: the agent gets the path alone.")


def test_open_text_stays_until_it_is_printed():
    """A key draws the editor again between the end of a block and the frame that prints it."""
    chat = Chat(Settings(AgentAddress("crow", ("true",)), "/"))
    chat.state.transcript.add(AgentMessageChunk(content=TextBlock(text="Some words")), 0)
    tail = chat.paint_tail(80)
    assert "Some words" in "".join(tail)
    blocks = chat.state.transcript.add(AgentMessageChunk(content=TextBlock(text=" end.\n\nNext")), 0)
    chat.perform([Show(block) for block in blocks])
    assert chat.paint_tail(80) == tail
    assert "Some words end." in "".join(chat.take_lines(80))
    assert "Next" in "".join(chat.paint_tail(80))


def test_an_agent_that_takes_no_images_is_named(start: "Start"):
    screen = start(BLIND="1")
    screen.until("small")
    screen.type("\x16")
    screen.until("This agent takes no images.")


def test_what_an_agent_sends_cannot_control_the_terminal(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("evil\r")
    screen.until("before \\u001b[2J\\u001b]0;title\\u0007 after\\u202e end")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", [20, 40, 250])
def test_narrow_and_wide_terminals(start: "Start", columns: int):
    screen = start(columns, 24)
    screen.until("small")
    screen.type("ask\r")
    screen.answer("y")
    screen.until("Answer: yes")
    screen.type("/help\r")
    screen.until(lambda: any("Screen" in line for line in screen.everything))


def test_no_color(start: "Start"):
    screen = start(NO_COLOR="1")
    screen.until("small")
    screen.type("ask\r")
    screen.answer("y")
    screen.until("Answer: yes")
    colours = re.findall(rb"\x1b\[([0-9;]*)m", screen.written)
    assert {code for each in colours for code in each.split(b";")} <= {b"", b"0", b"1", b"2", b"3", b"4", b"7"}


@pytest.mark.parametrize("way", ["\x04", "\x03\x03"])
def test_nothing_waits_for_the_end_of_a_terminal_that_was_left(start: "Start", way: str):
    screen = start()
    screen.until("small")
    screen.type(way)
    assert screen.wait() == 0
    while screen.read(0.1):
        pass
    assert not screen.screen.cursor.hidden
    assert "small" not in screen.text  # the frame is gone: no guard has kept it


def test_sigterm_restores_the_terminal(start: "Start"):
    screen = start()
    screen.until("small")
    screen.process.send_signal(signal.SIGTERM)
    assert screen.wait() == 0
    assert termios.tcgetattr(screen.terminal) == screen.before


@pytest.mark.slow
def test_a_flood_is_printed_whole_while_keys_are_heard(start: "Start"):
    screen = start(100, 30)
    screen.until("small")
    screen.type("numbers 3000\r")
    screen.type("typed meanwhile")
    screen.until("line-02999")
    found = re.findall(r"line-\d+", "\n".join(screen.everything))
    assert found == [f"line-{n:05}" for n in range(3000)]
    assert "❯ typed meanwhile" in screen.text


def test_characters_that_are_not_seen_are_shown_in_a_question(program: list[str]):
    command = [*program[:3], "plain", *program[4:]]
    prompt = "ask rm a\u200bb \u202ec\nn\n"
    done = subprocess.run(command, input=prompt, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "  | rm a\\u200bb \\u202ec\n" in done.stdout


def test_plain_lines_for_pipes_and_screen_readers(program: list[str]):
    command = [*program[:3], "plain", *program[4:]]
    typed = "ask\n2\nyou\na\n1\nask\nno use git\nask\ne rm -v\nhi\n"
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "? Run a command (deletes)\n  | rm -rf build\n  y  Yes\n  a  Allow always: rm *\n" in done.stdout
    assert done.stdout.count("Type a letter: y, a, n, e.") == 2
    assert "Answer: ever" in done.stdout
    assert "Answer: no {'crow': {'reason': 'use git'}}" in done.stdout
    assert "Answer: yes {'crow': {'command': 'rm -v'}}" in done.stdout
    assert "You said: hi" in done.stdout


def test_plain_lines_show_the_text_that_an_empty_line_accepts(program: list[str]):
    command = [*program[:3], "plain", *program[4:]]
    done = subprocess.run(command, input="form\n2\n\n", capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "  Some paint\n  7\n" in done.stdout
    assert "Form: accept {'colour': 'blue', 'count': 7}" in done.stdout


def test_end_of_the_lines_at_a_question_answers_it_by_cancelled(program: list[str]):
    command = [*program[:3], "plain", *program[4:]]
    done = subprocess.run(command, input="ask\n", capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "  → not answered, as the turn was stopped\n" in done.stdout
    assert "Answer: cancelled" in done.stdout


def test_ctrl_c_at_a_question_in_plain_lines_answers_it_by_cancelled(program: list[str]):
    command = [*program[:3], "plain", *program[4:]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("ask\n")
        process.stdin.flush()
        while "e  Edit first" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        while "Answer: cancelled" not in process.stdout.readline():
            pass
        out, _ = process.communicate("hi\n", timeout=90)
    assert process.returncode == 0
    assert "You said: hi" in out


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm-256color", "XTERM_VERSION": "XTerm(379)"}, False),
        ({"TERM": "linux"}, False),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/tmux-0/default,1,0", "XTERM_VERSION": "XTerm(379)"}, True),
    ],
)
def test_rows_are_counted_as_the_terminal_breaks_them(env: dict[str, str], expected: bool):
    assert breaks_rows_anew(env) == expected


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
@pytest.mark.parametrize(
    "columns", [40, pytest.param(80, marks=pytest.mark.slow), pytest.param(160, marks=pytest.mark.slow)]
)
def test_every_line_is_there_once_and_in_order_after_five_resizes(columns: int, program: list[str], tmp_path: Path):
    socket = str(tmp_path / "tmux")

    def tmux(*words: str) -> str:
        command = ["tmux", "-S", socket, "-f", os.devnull, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def capture() -> str:
        return tmux("capture-pane", "-p", "-S", "-", "-t", "t")

    def until(condition: Callable[[str], object]) -> None:
        end = time.monotonic() + 90
        while not condition(capture()):
            assert time.monotonic() < end, capture()

    try:
        tmux("new-session", "-d", "-s", "t", "-x", str(columns), "-y", "24", shlex.join(program))
        until(lambda text: "small" in text)
        tmux("send-keys", "-t", "t", "numbers 400 0.01", "Enter")
        for number, (width, height) in enumerate(((120, 30), (50, 24), (160, 40), (40, 15), (columns, 24))):
            until(lambda text, least=number * 50: len(re.findall(r"line-\d+", text)) > least)
            tmux("resize-window", "-t", "t", "-x", str(width), "-y", str(height))
        until(lambda text: "25% of" in text and "line-00399" in text)
        found = re.findall(r"line-\d+", capture())
    finally:
        tmux("kill-server")
    assert found == [f"line-{n:05}" for n in range(400)]
