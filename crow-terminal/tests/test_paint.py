"""Blocks as lines: at every width, without anything that a terminal obeys, and whole."""

import re
from typing import Any

import pytest
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    BlockContent,
    DiffContent,
    PermissionOption,
    PlanEntry,
    PlanUpdate,
    RequestPermissionRequest,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallFields,
    ToolCallUpdate,
    UserMessageChunk,
)
from crow_terminal.blocks import (
    AnsweredQuestion,
    BlockRecord,
    Call,
    CommandOutput,
    Note,
    Plan,
    StyledLine,
    UserPrompt,
    strip_fence,
)
from crow_terminal.markdown import CodeLines, MarkdownSplitter, Prose
from crow_terminal.paint import Painter, compare, format_seconds
from crow_terminal.printable_text import ESCAPES, clip, clip_start, escape, escape_output, hang, measure
from crow_terminal.question import list_changes, make_question
from crow_terminal.question_view import compose_question
from crow_terminal.theme import THEMES, choose_theme
from hypothesis import given
from hypothesis import strategies as st

STYLE = re.compile(r"\x1b\[[0-9;]*m")
EVIL = "before \x1b[2J\x1b]0;title\x07 \x9b31m \r \u202eltr \u2066 \U000e0041 \u200f end"


def plain(lines: list[str]) -> list[str]:
    """The lines without their colours, which are the only escape sequences."""
    lines = [STYLE.sub("", line) for line in lines]
    assert not {letter for line in lines for letter in line if ord(letter) in ESCAPES}, lines
    return lines


def render(text: str, width: int = 60) -> list[str]:
    painter, splitter = Painter(THEMES["dark"]), MarkdownSplitter()
    return plain([line for block in [*splitter.feed(text), *splitter.end()] for line in painter.paint(block, width)])


def message(text: str) -> SessionUpdate:
    return AgentMessageChunk(content=TextBlock(text=text))


def output(text: str) -> list[BlockContent | DiffContent]:
    return [BlockContent(content=TextBlock(text=text))]


def test_markdown_is_shown_without_its_marks():
    assert render("# Title\nSome **bold** `code`.\n- one\n- [two](http://x.y)\n1. three\n\n> said\n\n---") == [
        *("Title", "", "Some bold code.", "• one", "• two (http://x.y)", "1. three", "", "▌ said", "", "─" * 12)
    ]


def test_nothing_of_markdown_is_left_out():
    assert render("<b>hi</b> ![alt](http://a/b.png)") == ["<b>hi</b> !alt (http://a/b.png)"]
    assert render("[ref]: http://x.y") == ["[ref]: http://x.y"]
    assert render("| a | b |\n|---|--:|\n| 1 | 2 |") == ["a  b", "────", "1  2"]


def test_code_keeps_its_lines_and_is_coloured_across_pieces():
    lines = ("'''one", "two", "three'''", "x = 1")
    painter = Painter(THEMES["dark"])
    whole = painter.paint(CodeLines(lines, "python"), 40)
    pieces = [painter.paint(CodeLines(lines[n : n + 1], "python", lines[:n], joined=True), 40) for n in range(4)]
    assert "\x1b[33mtwo" in pieces[1][0]
    assert "\x1b[33mtwo" in whole[1]
    assert [line for piece in pieces for line in plain(piece)] == plain(whole)
    assert plain(whole) == [f"  {line}" for line in lines]
    assert plain(Painter(THEMES["dark"]).paint(CodeLines(("x" * 50,), "python"), 40)) == [
        "  " + "x" * 38,
        "  " + "x" * 12,
    ]


def test_a_diff_without_lines_is_that_of_an_empty_file():
    diff = DiffContent(path="a.py", old_text=None, new_text="")
    call = ToolCall(tool_call_id="1", title="touch a.py", kind="execute", status="completed", content=[diff])
    assert plain(Painter(THEMES["mono"]).paint_alone(Call(call), 44))[-1] == "  an empty file"
    assert "an empty file" in [line.text for line in list_changes(call, "")]


@pytest.mark.parametrize("theme", ["dark", "mono"])
def test_wide_lines_of_code_and_diffs_are_broken_between_words_and_keep_their_indentation(theme: str):
    painter = Painter(THEMES[theme])
    code = "    return first_function(one, two) + second_function(three)"
    assert plain(painter.paint_alone(CodeLines((code,), "python"), 44)) == [
        "      return first_function(one, two) +",
        "      second_function(three)",
    ]
    diff = DiffContent(path="a.py", old_text="", new_text=f"{code}\n")
    call = ToolCall(tool_call_id="1", title="Edit a.py", status="completed", content=[diff])
    assert plain(painter.paint_alone(Call(call), 44))[1:] == [
        "  1 +     return first_function(one, two) +",
        "          second_function(three)",
    ]
    assert plain(painter.paint_alone(UserPrompt("three little words here"), 16)) == ["❯ three little", "  words here"]
    output = CommandOutput("x", "some words and averyveryverylongwordindeed\n", 0)
    assert plain(painter.paint_alone(output, 20))[1:] == [
        "  └ some words and",
        "    averyveryverylon",
        "    gwordindeed",
    ]


@given(st.text("ab é値🎉م", max_size=120), st.integers(4, 40))
def test_broken_lines_fit_and_lose_nothing_but_blanks(line: str, width: int):
    rows = hang(line, width)
    assert "".join(rows).replace(" ", "") == line.replace(" ", "")
    assert all(measure(row.rstrip()) <= max(width, 4) for row in rows)


@given(st.sampled_from([20, 33, 80, 250]), st.text("aé値🎉 \n-*`|#>1.", max_size=200))
def test_prose_fits_its_width(width: int, text: str):
    splitter, painter = MarkdownSplitter(), Painter(THEMES["dark"])
    for block in [*splitter.feed(text), *splitter.end()]:
        lines = plain(painter.paint_alone(block, width))
        if isinstance(block, Prose) and block.text[:4].strip():
            assert all(measure(line) <= width for line in lines)
        if isinstance(block, Prose):
            assert sorted(filter(str.isalpha, block.text)) == sorted(filter(str.isalpha, "".join(lines)))


@given(st.text(max_size=60) | st.sampled_from([EVIL, EVIL * 3]), st.sampled_from(sorted(THEMES)))
def test_no_block_lets_a_control_character_through(text: str, theme: str):
    painter = Painter(THEMES[theme])
    fields = {"tool_call_id": "1", "title": text, "content": [*output(text), DiffContent(path=text, new_text=text)]}
    for status in ("completed", "failed", "pending"):
        call = ToolCall(**fields, status=status)
        plain(painter.paint(Call(call, 3.0), 50))
        call_fields: dict[str, Any] = {**fields, "raw_input": {"command": text, text: text}, "kind": "execute"}
        for kind in ("execute", "edit", "other"):
            asked = ToolCallFields(**{**call_fields, "kind": kind})
            request = RequestPermissionRequest(session_id="s", tool_call=asked, options=[
                PermissionOption(option_id="1", name=text, kind=one) for one in ("allow_once", "allow_always")
            ])  # fmt: skip
            question = make_question(request, call, text, (), lambda row, now: [])
            plain(compose_question(question, 50, 20, painter.theme, ready=True))
            plain(painter.paint(question.record("Yes", text), 50))
    entry = PlanEntry(content=text, priority="high", status="pending")
    for block in (UserPrompt(text), Note(text, "error"), Plan((entry,)), CommandOutput(text, text, 1)):
        plain(painter.paint(block, 50))
    for block in (Prose(text), CodeLines((text,), "python"), CodeLines((text,), thought=True)):
        plain(painter.paint(block, 50))


def test_control_characters_are_visible():
    assert escape("a\x1b[2J\u202eb\r\nc\td") == "a\\u001b[2J\\u202eb\nc   d"
    assert escape_output("10%\r20%\rdone\n\x1b[32mgreen\x1b[0m\r\n") == "done\ngreen\n"


def test_rows_are_clipped_by_columns():
    assert clip("値段が高い", 6) == "値段…"
    assert clip("short", 5) == "short"
    assert clip("👩\u200d💻 x", 9) == "👩💻 x"
    assert clip_start("/home/user/project", 9) == "…/project"
    assert [measure(clip("値a" * 9, n)) <= n for n in range(12)] == [True] * 12


def test_no_color_and_the_mono_theme_have_no_colours():
    painter = Painter(choose_theme("vivid", {"NO_COLOR": "1"}))
    lines = [*painter.paint(CodeLines(("x = 1",), "python"), 40), *painter.paint(Prose("**a** `b` [c](d)"), 40)]
    call = ToolCall(tool_call_id="1", title="t", status="failed", content=output("no"))
    lines += [*painter.paint(Call(call), 40), *painter.paint(Note("n", "warning"), 40)]
    assert not [line for line in lines if re.search(r"\x1b\[(?!0?m|1m)", line)]


def test_a_diff_shows_numbers_and_only_what_is_near_a_change():
    old = "".join(f"{n}\n" for n in range(1, 30))
    new = old.replace("5\n", "five\n", 1).replace("20\n", "")
    assert ["".join(map(str, line)) for line in compare(old, new)] == [
        *(" 33", " 44", "-55", "+5five", " 66", " 77", "…0", " 1818", " 1919", "-2020", " 2021", " 2122")
    ]
    assert [*compare("", "a\n")] == [("+", 1, "a")]
    assert [*compare("a", "a\n")] == [(" ", 1, "a")]
    assert len([*compare("a\n" * 9_000, "b\n" * 9_000)]) == 18_000  # at once, though many lines differ


def test_long_output_is_folded_and_can_be_whole():
    text = "\n".join(f"line {n}" for n in range(30))
    call = Call(ToolCall(tool_call_id="1", title="run", status="completed", content=output(f"```\n{text}\n```")), 2.5)
    painter = Painter(THEMES["dark"])
    assert plain(painter.paint(call, 60)) == [
        *("● run  2.5s", "  └ … 25 lines before · Ctrl-O", *(f"    line {n}" for n in range(25, 30)))
    ]
    assert len(painter.paint_alone(call, 60, whole=True)) == 31


def test_seconds_are_short():
    assert [format_seconds(n) for n in (0, 9.94, 48.9, 125)] == ["0.0s", "9.9s", "48s", "2m 05s"]


def test_the_marks_of_a_code_block_around_an_output_are_removed():
    assert strip_fence("```\nout\n```") == "out"
    assert strip_fence("````sh\n```\n````\n") == "```"
    assert strip_fence("```\na\n```\nmore") == "```\na\n```\nmore"


def test_updates_become_blocks_in_order():
    transcript = BlockRecord()
    blocks = [
        block
        for update in (
            AgentThoughtChunk(content=TextBlock(text="Let me ")),
            AgentThoughtChunk(content=TextBlock(text="see.")),
            message("One.\n\nTwo"),
            ToolCall(tool_call_id="1", title="ls", status="pending"),
            ToolCallUpdate(tool_call_id="1", status="in_progress"),
            ToolCallUpdate(tool_call_id="1", status="completed", content=output("a")),
            ToolCallUpdate(tool_call_id="1", status="completed", content=output("again")),
            message("Three"),
        )
        for block in transcript.add(update, 1.0)
    ]
    assert blocks[:3] == [Prose("Let me see.", thought=True), Prose("One."), Prose("Two")]
    assert isinstance(blocks[3], Call)
    assert len(blocks) == 4
    assert transcript.open == Prose("Three")
    assert transcript.end_turn(2.0) == [Prose("Three")]
    assert transcript.answer == "Three"


def test_a_tool_call_that_never_ends_is_shown_at_the_end_of_the_turn():
    transcript = BlockRecord()
    assert transcript.add(ToolCall(tool_call_id="1", title="sleep"), 1.0) == []
    assert [*transcript.running] == ["1"]
    (call,) = transcript.end_turn(4.0)
    assert plain(Painter(THEMES["dark"]).paint(call, 60)) == ["○ sleep  did not end · 3.0s"]


def test_changes_are_printed_once_with_the_answer_to_the_question():
    transcript = BlockRecord()
    fields = ToolCallFields(
        tool_call_id="1", title="Edit a", status="pending", content=[DiffContent(path="a", old_text="x", new_text="y")]
    )
    assert transcript.propose(fields, 1.0) == []
    transcript.note_shown("1")
    (call,) = transcript.add(ToolCallUpdate(tool_call_id="1", status="completed"), 1.5)
    assert plain(Painter(THEMES["dark"]).paint(call, 60)) == ["● Edit a  +1 −1"]
    assert len(transcript.diffs) == 1


def test_an_answered_question_is_broken_between_words_but_its_command_is_left_whole():
    command = "make " + "all the things " * 5
    diff = StyledLine("11 +     return amount * people / SERVES for name", "added", 5)
    block = AnsweredQuestion("Run a command", (StyledLine(command), diff), "not answered, as the turn was stopped")
    rows = Painter(THEMES["mono"]).paint(block, 39)
    rows = [re.sub(r"\x1b\[\d*m", "", row) for row in rows]
    assert rows == [
        "? Run a command · not answered, as the",
        "  turn was stopped",
        f"  {command}".rstrip(),
        "  11 +     return amount * people /",
        "           SERVES for name",
    ]


def test_a_plan_is_kept_until_the_turn_ends():
    transcript = BlockRecord()
    entry = PlanEntry(content="do it", priority="high", status="in_progress")
    assert transcript.add(PlanUpdate(entries=[entry]), 1.0) == []
    assert transcript.plan == Plan((entry,))
    assert transcript.end_turn(2.0) == [Plan((entry,))]
    assert transcript.end_turn(2.0) == []


def test_prompts_of_a_loaded_session_are_shown():
    transcript = BlockRecord()
    assert transcript.add(UserMessageChunk(content=TextBlock(text="Fix ")), 1.0) == []
    assert transcript.add(UserMessageChunk(content=TextBlock(text="it.")), 1.0) == []
    assert transcript.add(message("Done."), 1.0) == [UserPrompt("Fix it.")]


@pytest.mark.parametrize(
    ("name", "env", "theme"),
    [
        ("", {}, "dark"),
        ("", {"COLORFGBG": "0;15"}, "light"),
        ("", {"COLORFGBG": "0;default;7"}, "light"),
        ("", {"COLORFGBG": "15;0"}, "dark"),
        ("dark", {"COLORFGBG": "0;15"}, "dark"),
        ("light", {"NO_COLOR": "1"}, "mono"),
    ],
)
def test_the_theme_suits_the_background(name: str, env: dict[str, str], theme: str):
    assert choose_theme(name, env) == THEMES[theme]


def test_words_for_the_model_alone_are_not_painted():
    call = ToolCall(
        tool_call_id="1", title="touch a", kind="execute", status="completed", content=output("[no output]")
    )
    assert plain(Painter(THEMES["mono"]).paint_alone(Call(call), 60)) == ["● touch a"]
    refused = ToolCall(tool_call_id="1", title="rm a", status="failed", content=output("This was not run: no."))
    asked = Call(refused, denied=True, answered=True)
    assert plain(Painter(THEMES["mono"]).paint_alone(asked, 60)) == ["✗ rm a  denied"]
    by_rule = Call(refused, denied=True)
    assert plain(Painter(THEMES["mono"]).paint_alone(by_rule, 60))[1] == "  └ This was not run: no."
