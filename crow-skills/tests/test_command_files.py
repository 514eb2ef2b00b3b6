"""Test slash commands from Markdown files."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.acp.schema import AvailableCommandsUpdate
from crow_core.app import Crow
from crow_extensions.commands import commands
from crow_skills.command_files import command_files
from crow_skills.mentions import mentions
from crow_skills.skills import skills

if TYPE_CHECKING:
    from conftest import Talking

pytestmark = pytest.mark.anyio

App = Callable[..., Crow]

REVIEW = """---
description: Reviews a file
argument-hint: "[file] [what for]"
---
Review $1 for $2. All: $ARGUMENTS. Costs $100, {{ 7*7 }}, !`id`.
"""


def trust_all(folder: Path) -> bool:
    return True


def with_files(crow: Crow, **options: Any) -> Crow:
    return crow.use(command_files, trusted=trust_all, **options).use(commands)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


async def test_file_defines_a_command_with_arguments(app: App, talk: "Talking", project: Path):
    write(project / ".crow/commands", "review", REVIEW)
    async with talk(with_files(app())) as it:
        await it.say("/review a.py $2 bugs")
        assert it.last_content == "Review a.py for $2. All: a.py $2 bugs. Costs $100, {{ 7*7 }}, !`id`."
        assert it.replayed == ["/review a.py $2 bugs"]
        (render,) = it.renders("command")
        assert (render["variables"]["name"], render["text"]) == ("review", it.last_content)
        (update,) = it.editor.of(AvailableCommandsUpdate)
        (command,) = (command for command in update.available_commands if command.name == "review")
        assert command.description == "Reviews a file"
        assert command.input
        assert command.input.hint == "[file] [what for]"


async def test_arguments_without_a_placeholder_are_appended(app: App, talk: "Talking", project: Path):
    write(project / ".claude/commands", "git/push", "# Push it\nPush the branch.")
    async with talk(with_files(app())) as it:
        await it.say("/git:push now, please")
        assert it.last_content == "# Push it\nPush the branch.\n\nnow, please"


async def test_project_files_replace_user_files_but_never_built_in_commands(
    app: App, talk: "Talking", project: Path, tmp_path: Path
):
    for name in ("help", "model", "hello"):
        write(project / ".crow/commands", name, "The project's.")
        write(tmp_path / "user", name, "The user's.")
    write(tmp_path / "user", "bye", "Good bye.")
    async with talk(with_files(app(), user=[tmp_path / "user"])) as it:
        await it.say("/hello")
        assert it.last_content == "The project's."
        await it.say("/bye")
        assert it.last_content == "Good bye."
        await it.say("/help")
        await it.say("/model")
        assert "`/hello`" in it.editor.text
        assert len(it.model.requests) == 2


async def test_files_of_an_untrusted_folder_are_not_commands(app: App, talk: "Talking", project: Path):
    write(project / ".crow/commands", "review", REVIEW)
    async with talk(app().use(command_files).use(commands)) as it:
        await it.say("/review a.py bugs")
        assert not it.model.requests
        assert "There is no command `/review`." in it.editor.text


async def test_mentions_and_skills_in_a_command_file_are_added(app: App, talk: "Talking", project: Path):
    write(project / ".crow/commands", "read", "Read @notes.txt with the pdf skill, then $1.")
    write(project / ".crow/skills/pdf", "SKILL", "---\ndescription: Reads PDF.\n---\nHow to read PDF.")
    (project / "notes.txt").write_text("The notes.")
    (project / "more.txt").write_text("More notes.")
    async with talk(with_files(app()).use(mentions).use(skills, trusted=trust_all)) as it:
        await it.say("/read @more.txt")
        assert it.last_content.startswith("Read @notes.txt with the pdf skill, then @more.txt.")
        assert "The notes." in it.last_content
        assert it.last_content.count("More notes.") == 1
        assert "How to read PDF." in it.last_content
        assert it.replayed == ["/read @more.txt"]


async def test_unusable_files_are_not_commands(app: App, talk: "Talking", project: Path, tmp_path: Path):
    folder = project / ".crow/commands"
    write(folder, "with space", "No.")
    write(folder, "broken", "---\n[\n---\nNo.")
    write(folder, "empty", "---\ndescription: Nothing\n---\n")
    (folder / "bytes.md").write_bytes(bytes(range(256)))
    (folder / "loop").symlink_to(folder)
    (folder / "stolen.md").symlink_to(write(tmp_path, "secret", "A private key."))
    async with talk(with_files(app())) as it:
        await it.say("/empty")
        assert "empty.md is empty. Write the text of the command into it." in it.editor.text
        names = set(it.session.commands)
        assert not {"with space", "broken", "stolen"} & names
