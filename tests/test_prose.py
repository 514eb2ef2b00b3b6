"""Pages and docstrings are easy to read: the rules of `scripts/check_prose.py` hold for the files in this list."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
HELD = [
    *("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md"),
    *(
        f"docs/{name}.md"
        for name in (
            "acp-extensions",
            "comparison",
            "emacs",
            "extension-examples",
            "files",
            "hooks",
            "jetbrains",
            "neovim",
            "publish-an-extension",
            "toad",
            "tools",
            "zed",
        )
    ),
    *(f"docs/{name}.md" for name in ("agents", "editors", "extensions", "life-of-a-prompt", "loop", "models")),
    *(f"docs/{name}.md" for name in ("releasing", "scripts", "serve", "sessions", "settings", "start", "systems")),
    *(
        f"docs/{name}.md"
        for name in ("evaluation", "histories", "inspect", "permissions", "reask", "sandbox", "terminal")
    ),
    *(
        f"docs/{name}.md"
        for name in ("mcp", "mcp-bridge", "mcp-faults", "mcp-logins", "mcp-processes", "upgrading", "web")
    ),
    *(f"crow-{name}/README.md" for name in ("acp-tools", "agent", "cli", "compact", "core", "eval", "extensions")),
    *(f"crow-{name}/README.md" for name in ("permissions", "persistence", "skills", "system", "terminal", "testing")),
    *("docs/local-models.md", "docs/mcp-server-hosts.md", "docs/mcp-server-tools.md", "crow-mcp-server/README.md"),
    "crow-agent/src/crow_agent/settings/structs.py",
    *(
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "crow-core" / "src" / "crow_core").rglob("*.py"))
        if file.name not in ("content.py", "errors.py", "printed.py", "schema.py", "schema_v2.py")
    ),
]
"""Of crow-core, all but the generated files and three. Extend it file by file; `uv run scripts/check_prose.py FILE`
shows what a file needs."""


@pytest.fixture
def prose(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("check_prose")


@pytest.mark.parametrize("name", HELD)
def test_sentences_of_a_file_follow_the_rules(name: str, prose: ModuleType):
    assert [*prose.check_file(ROOT / name)] == []


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
