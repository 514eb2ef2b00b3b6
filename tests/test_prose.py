"""Pages and docstrings are easy to read: the rules of `scripts/check_prose.py` hold for all of them."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NOT_PROSE = ("crow-eval/src/crow_eval/suites/", "crow-cli/src/crow_cli/demo/project/")
"""Folders with projects for a model to work on."""
HELD = [
    str(file.relative_to(ROOT).as_posix())
    for pattern in ("*.md", "docs/**/*.md", "crow-*/README.md", "crow-*/src/**/*.py")
    for file in sorted(ROOT.glob(pattern))
    if not file.relative_to(ROOT).as_posix().startswith(NOT_PROSE)
]


@pytest.fixture
def prose(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("check_prose")


@pytest.mark.parametrize("folder", sorted({name.partition("/")[0] for name in HELD}))
def test_sentences_follow_the_rules(folder: str, prose: ModuleType):
    """Run `uv run scripts/check_prose.py FILE` to see the faults of a file while you write."""
    names = [name for name in HELD if name.partition("/")[0] == folder]
    assert {name: faults for name in names if (faults := [*prose.check_file(ROOT / name)])} == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("word " * 31, "31 words"),
        ("What the user saw is in the log.", "opens with What"),
        ("The file that a tool that runs wrote, which is new.", "3 of that/which"),
        ("A command of which nothing is known.", "of which"),
        ("A tool is no command.", "is no"),
        ("It prints what was read.", "what is done"),
        ("It mends the table.", "mend"),
        ("A file beside it.", "beside"),
        ("A change of the file.", "a change of"),
    ],
)
def test_a_sentence_that_breaks_a_rule_is_noticed(text: str, fault: str, prose: ModuleType):
    assert fault in prose.find_faults(text)


def test_questions_code_and_tables_break_no_rule(prose: ModuleType):
    text = "# Whether\n\nWhat is it? There is no file. `what is done`\n\n| which | a |\n|---|---|\n"
    page = f"{text}\n```sh\nWhat now\n```\n"
    assert [one for one in prose.split_sentences(page) if prose.find_faults(one)] == []


def test_docstrings_of_fields_and_hooks_are_read(prose: ModuleType, tmp_path: Path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""What a module is."""\nx: int = 1\n"""How many."""\nhook: Hook = Hook("""\n    Whether so.\n    """)\n'
    )
    assert [faults for _, faults in prose.check_file(file)] == [
        ["opens with What"],
        ["opens with How"],
        ["opens with Whether"],
    ]
