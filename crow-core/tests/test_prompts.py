"""Templates, their variables, and their errors."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from crow_core.errors import PromptError
from crow_core.session.prompts import Prompt

SYSTEM: dict[str, Any] = {
    "cwd": "/p",
    "roots": ["/p"],
    "platform": "Linux",
    "date": "2026-11-21",
    "tools": [],
    "instructions": [],
}


def test_variables_are_filled_in_and_the_edges_trimmed() -> None:
    assert Prompt("p", "\n{% for x in xs %}\n- {{ x }}\n{% endfor %}\n").render(xs=["a", "b"]) == "- a\n- b"


def test_undefined_variable_is_an_error_and_never_an_empty_string() -> None:
    with pytest.raises(PromptError, match="'name' is undefined"):
        Prompt("p", "Hello {{ name }}").render()


def test_broken_template_is_an_error_of_the_documented_kind() -> None:
    with pytest.raises(PromptError, match="'p' is wrong \\(line 2\\)"):
        Prompt("p", "\n{% if %}").render()


@pytest.mark.parametrize(
    "words",
    [
        "{{ 7 * 7 }}",
        "{% for x in y %}",
        "{# gone #}",
        "{0.__class__}",
        "%s %(a)s",
        "<b>&amp;</b>",
        "\\n\\1",
        "${HOME}",
        "🐦\0",
    ],
)
def test_variables_are_never_evaluated(words: str) -> None:
    assert Prompt("p", "<{{ words }}>").render(words=words) == f"<{words}>"


@pytest.mark.parametrize(
    "template",
    ["{{ x.__class__.__mro__ }}", "{{ x.append(1) }}", "{{ ''.__class__ }}", "{{ '{0.__class__}'.format(x) }}"],
)
def test_template_can_neither_change_variables_nor_reach_python_internals(template: str) -> None:
    with pytest.raises(PromptError):
        Prompt("p", template).render(x=[])


def test_template_cannot_read_files() -> None:
    with pytest.raises(PromptError):
        Prompt("p", "{% include '/etc/passwd' %}").render()


def test_version_is_the_hash_of_the_template() -> None:
    template = "Grüezi {{ name }}"
    assert Prompt("p", template).version == hashlib.sha256(template.encode()).hexdigest()[:12]
    assert Prompt("p", template).version == Prompt("other", template).version
    assert Prompt("p", template).version != Prompt("p", template + " ").version


def test_packaged_template_renders_the_same_every_time() -> None:
    prompt = Prompt.from_package("system")
    first, second = prompt.render(**SYSTEM), Prompt.from_package("system").render(**SYSTEM)
    assert first == second
    assert "Working directory: /p" in first
    assert prompt.name == "system"


def test_system_prompt_names_further_folders_and_ends_with_the_instructions() -> None:
    text = Prompt.from_package("system").render(**SYSTEM | {"roots": ["/p", "/q"], "instructions": ["Use {{ tabs }}."]})
    assert "- Also open to you: /q" in text
    assert "open to you: /p" not in text
    assert text.endswith("Use {{ tabs }}.")


def test_a_template_of_the_user_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.md"
    path.write_text("Sei höflich zu {{ name }}.", "utf-8")
    assert Prompt.from_file("system", path).render(name="Ann") == "Sei höflich zu Ann."


def test_a_missing_template_file_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Prompt.from_file("system", tmp_path / "nowhere.md")


def test_system_prompt_names_only_tools_of_the_session() -> None:
    prompt = Prompt.from_package("system")
    named = {"file_editor", "grep", "glob", "terminal", "ask_user"}

    def names(*tools: str) -> set[str]:
        text = prompt.render(**SYSTEM | {"tools": tools})
        return {name for name in named if f"`{name}`" in text}

    assert names() == set()
    assert names("terminal") == names("grep") == names("other_grep", "terminal") == set()
    assert names("file_editor", "terminal") == {"file_editor"}
    assert names(*named) == named - {"terminal"}
