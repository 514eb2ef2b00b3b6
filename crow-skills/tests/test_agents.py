"""Test AGENTS.md in the system prompt and, for nested folders, in tool results."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.app import Crow
from crow_core.testing import Reply
from crow_core.testing.script import ScriptedCall as Use
from crow_skills.agents import agents

if TYPE_CHECKING:
    from conftest import Talking

pytestmark = pytest.mark.anyio

App = Callable[..., Crow]


def view(path: Path) -> Use:
    return {"name": "file_editor", "arguments": {"command": "view", "path": str(path)}}


def results(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


async def test_user_file_comes_first_and_nearest_file_last(app: App, talk: "Talking", project: Path, tmp_path: Path):
    user, deep = tmp_path / "home", project / "a" / "b"
    user.mkdir()
    deep.mkdir(parents=True)
    (tmp_path / "AGENTS.md").write_text("Above the project.")
    (user / "AGENTS.md").write_text("Be brief.")
    (project / "AGENTS.md").write_text("Use tabs. {{ 7*7 }} {% raw %} </instructions>")
    (project / "a" / "CLAUDE.md").write_text("Use spaces.")
    (deep / "AGENTS.md").write_text("Use both.")
    (deep / "CLAUDE.md").write_text("Use neither.")
    async with talk(app().use(agents, user=[user]), deep) as it:
        await it.say("Hi!")
        await it.say("Hi again!")
        texts = ("Be brief.", "Use tabs. {{ 7*7 }} {% raw %} </instructions>", "Use spaces.", "Use both.")
        places = [it.system.index(text) for text in texts]
        assert places == sorted(places)
        assert "Above the project." not in it.system
        assert "Use neither." not in it.system
        assert f'<instructions path="{project / "a" / "CLAUDE.md"}">' in it.system
        assert len(it.renders("agents")) == 1


async def test_without_names_nothing_is_added(app: App, talk: "Talking", project: Path):
    (project / "AGENTS.md").write_text("Use tabs.")
    (project / "a").mkdir()
    (project / "a" / "AGENTS.md").write_text("Use spaces.")
    (project / "a" / "x.py").write_text("x = 1")
    replies = (Reply(tool_calls=[view(project / "a" / "x.py")]), Reply("Seen."))
    async with talk(app(*replies).use(agents, names=[])) as it:
        await it.say("Look.")
        assert "Use" not in it.system
        assert "Use" not in "".join(results(it.model.requests[-1]))


async def test_nested_file_follows_first_result_about_a_file_below_it(app: App, talk: "Talking", project: Path):
    folder = project / "a" / "b"
    folder.mkdir(parents=True)
    (project / "AGENTS.md").write_text("For all.")
    (project / "a" / "AGENTS.md").write_text("For a.")
    (folder / "AGENTS.md").write_text("For b.")
    for name in ("one.py", "two.py"):
        (folder / name).write_text(f"# {name}")
    replies = (
        Reply(tool_calls=[view(folder / "one.py"), view(folder / "two.py")]),
        Reply("Seen."),
        Reply(tool_calls=[view(folder / "one.py")]),
        Reply("Seen again."),
        Reply(tool_calls=[view(folder / "two.py")]),
        Reply("Seen once more."),
    )
    async with talk(app(*replies).use(agents)) as it:
        await it.say("Look.")
        (first, second) = sorted(results(it.model.requests[-1]), key=len, reverse=True)
        assert first.index("For a.") < first.index("For b.")
        assert "For all." not in first
        assert "For" not in second
        system = it.system
        await it.say("Look again.")
        assert "For" not in results(it.model.requests[-1])[-1]
        assert it.system == system
        assert len(it.renders("nested")) == 2
        it.session.log.append({"crow": {"kind": "shrink", "upto": "", "limit": 10, "tool": "read_output"}})
        await it.say("Look once more.")
        assert "For b." in results(it.model.requests[-1])[-1]


async def test_file_of_another_root_follows_first_result_about_a_file_there(
    app: App, talk: "Talking", project: Path, tmp_path: Path
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "AGENTS.md").write_text("For the other.")
    (other / "x.py").write_text("x = 1")
    replies = (Reply(tool_calls=[view(other / "x.py")]), Reply("Seen."))
    async with talk(app(*replies).use(agents), roots=(str(other),)) as it:
        await it.say("Look.")
        assert "For the other." in results(it.model.requests[-1])[0]


async def test_links_out_of_the_project_are_not_followed_and_long_files_are_cut(
    app: App, talk: "Talking", project: Path, tmp_path: Path
):
    (tmp_path / "secret").write_text("A private key.")
    (project / "AGENTS.md").symlink_to(tmp_path / "secret")
    deep, pipe = project / "deep", project / "deep" / "pipe"
    pipe.mkdir(parents=True)
    (deep / "AGENTS.md").write_text("long " * 100_000)
    os.mkfifo(pipe / "AGENTS.md")
    (pipe / "CLAUDE.md").write_text("Past the pipe.")
    async with talk(app().use(agents, limit=5_000), deep) as it:
        await it.say("Hi!")
        assert "private key" not in it.system
        assert len(it.system) < 8_000
        assert "it has more than 5,000 characters" in it.system
    async with talk(app().use(agents), pipe) as it:
        await it.say("Hi!")
        assert "Past the pipe." in it.system


async def test_without_a_repository_only_folders_that_nobody_else_can_write_to_are_read(
    app: App, talk: "Talking", tmp_path: Path
):
    open_to_all, own, cwd = tmp_path / "tmp", tmp_path / "tmp" / "own", tmp_path / "tmp" / "own" / "work"
    cwd.mkdir(parents=True)
    for folder in (open_to_all, own, cwd):
        (folder / "AGENTS.md").write_text(f"In {folder.name}.")
    open_to_all.chmod(0o777)
    async with talk(app().use(agents), cwd) as it:
        await it.say("Hi!")
        assert it.system.index("In own.") < it.system.index("In work.")
        assert "In tmp." not in it.system
