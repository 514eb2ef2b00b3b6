"""A streamed Markdown text becomes blocks that do not depend on where it was cut, and nothing of it is lost."""

import time

from crow_terminal.markdown import CodeLines, MarkdownSplitter, Prose
from hypothesis import given
from hypothesis import strategies as st

LINES = st.sampled_from(
    [
        *(
            "",
            "",
            "words",
            "a | b",
            "|---|:-:|",
            "| 1 | 2 |",
            "```py",
            "```",
            "~~~~",
            "    indented",
            "# head",
            "---",
            "===",
        ),
        *(
            "- one",
            "  - two",
            "10. ten",
            "1986. year",
            "   after",
            "> quote",
            ">",
            "- ```sh",
            "<b>html</b>",
            "[a]: /url",
        ),
    ]
)
TEXTS = st.lists(LINES, max_size=14).map("\n".join) | st.text("`~-*#>| \n1.a\t", max_size=80)


def split(text: str, size: int) -> list[Prose | CodeLines]:
    splitter = MarkdownSplitter()
    blocks: list[Prose | CodeLines] = []
    for at in range(0, len(text), size):
        blocks += splitter.feed(text[at : at + size])
        assert splitter.open is None or splitter.open
    return join_code([*blocks, *splitter.end()])


def join_code(blocks: list[Prose | CodeLines]) -> list[Prose | CodeLines]:
    """Join the pieces of a code block, which depend on the cuts."""
    joined: list[Prose | CodeLines] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if isinstance(block, CodeLines) and block.before and isinstance(last, CodeLines):
            joined[-1] = CodeLines((*last.lines, *block.lines), last.language, (), last.indent, last.joined)
        else:
            joined.append(block)
    return joined


def show(text: str) -> list[str]:
    """Each block as one string: code after its language, with `+` if no empty line precedes it."""
    return [
        ("+" if block.joined else "")
        + " " * block.indent
        + (
            f"{block.language}:{'/'.join(block.lines)}"
            if isinstance(block, CodeLines)
            else block.text.replace("\n", "/")
        )
        for block in split(text, len(text))
    ]


@given(TEXTS, st.integers(1, 9))
def test_blocks_do_not_depend_on_the_cuts(text: str, size: int):
    assert split(text, size) == split(text, max(len(text), 1))


@given(TEXTS)
def test_no_word_is_lost(text: str):
    shown = "\n".join(
        "\n".join(block.lines) if isinstance(block, CodeLines) else block.text for block in split(text, 99)
    )
    fences = text.count("`") + text.count("~")
    kept = [letter for letter in shown if letter.isalnum() or letter in "#>|"]
    wanted = [letter for letter in text if letter.isalnum() or letter in "#>|"]
    assert kept == wanted if not fences else set(kept) <= set(wanted)


def test_paragraphs_headings_and_rules():
    assert show("# One\ntext\nmore\n\nnext\n---\n\n***\nend") == ["# One", "text/more", "next/---", "***", "end"]


def test_each_list_item_is_a_block_with_its_indentation():
    assert show("- a\n  more\n- b\n  - c\n\n  after\n\nout") == ["- a/more", "+- b", "+  - c", "  after", "out"]


def test_a_number_inside_a_paragraph_begins_no_list():
    assert show("It was in\n1986. A year.\n1. one\n2. two") == ["It was in/1986. A year.", "+1. one", "+2. two"]


def test_code_in_a_list_item_is_indented_with_it():
    assert show("1. do\n   ```sh\n   ls\n     -l\n   ```\n   then\n2. next") == [
        *("1. do", "+   sh:ls/  -l", "   then", "+2. next")
    ]
    assert show("- ```sh\n  ls\n  ```\nend") == ["-", "+  sh:ls", "end"]


def test_a_fence_is_closed_by_its_own_marks_only():
    assert show("````md\n```\n~~~\n````\nend") == ["md:```/~~~", "end"]
    assert show("```py\nx = 1") == ["py:x = 1"]


def test_code_is_returned_line_by_line_with_what_came_before():
    splitter = MarkdownSplitter()
    assert splitter.feed("```py\na\nb") == [CodeLines(("a",), "py")]
    assert splitter.open == CodeLines(("b",), "py", ("a",), joined=True)
    assert splitter.feed("\n") == [CodeLines(("b",), "py", ("a",), joined=True)]


def test_a_table_is_one_block_and_keeps_its_head_when_it_is_long():
    assert show("see\n|a|b|\n|-|-|\n|1|2|\n\nend") == ["see", "+|a|b|/|-|-|/|1|2|", "end"]
    long = split("|a|\n|-|\n" + "|1|\n" * 500, 50)
    assert [block.text.count("\n") for block in long if isinstance(block, Prose)] == [201, 201, 101]
    assert all(isinstance(block, Prose) and block.text.startswith("|a|\n|-|\n|1|") for block in long)
    assert len(split("|a|\n|-|\n" + "|1|\n" * 200, 50)) == 1


def test_a_long_text_without_an_end_is_returned_in_pieces():
    for text in ("word " * 100_000, "x" * 500_000, "line\n" * 100_000, "> q\n" * 50_000):
        splitter = MarkdownSplitter()
        started = time.process_time()
        blocks = [block for at in range(0, len(text), 7) for block in splitter.feed(text[at : at + 7])]
        assert len(blocks) > 20
        assert len(splitter.open.text if isinstance(splitter.open, Prose) else "") <= 16_000
        assert time.process_time() - started < 10  # a quadratic splitter would take minutes


def test_a_line_without_an_end_is_open():
    splitter = MarkdownSplitter()
    assert splitter.feed("one\ntw") == []
    assert splitter.open == Prose("one\ntw")
    assert splitter.feed("o\n\nth") == [Prose("one\ntwo")]
    assert splitter.open == Prose("th")
