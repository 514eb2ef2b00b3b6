"""`crow skills`, and the skills, AGENTS.md and command files that the command uses."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedServer
from skills_ref import validate as validate_by_specification

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


async def test_new_skill_is_valid_and_used_after_trust(machine: "Machine"):
    made = await machine.crow("skills", "new", "release-notes", "--description", "It's for: releases")
    folder = machine.project / ".crow" / "skills" / "release-notes"
    assert (made.code, made.out.strip()) == (0, str(folder / "SKILL.md"))
    assert f"crow trust {machine.project}" in made.err
    assert validate_by_specification(folder) == []
    assert (await machine.crow("skills", "validate", str(folder))).code == 0
    before = await machine.crow("skills", "list", "--json")
    assert json.loads(before.out) == []
    assert "are ignored until you trust it" in before.err
    assert (await machine.crow("trust", "--yes", str(machine.project))).code == 0
    (listed,) = json.loads((await machine.crow("skills", "list", "--json")).out)
    assert (listed["name"], listed["description"], listed["problems"]) == ("release-notes", "It's for: releases", [])
    again = await machine.crow("skills", "new", "release-notes")
    assert (again.code, "exists already" in again.err) == (2, True)


async def test_problems_of_a_skill_are_printed(machine: "Machine"):
    folder = write(machine.project, "Odd/SKILL.md", "---\nname: odd_\x1b[2Jname\n---\n").parent
    done = await machine.crow("skills", "validate", str(folder))
    assert done.code == 1
    assert "not valid" in done.out
    assert "\x1b[2J" not in done.out
    write(folder, "SKILL.md", "---\nname: Odd\n---\n")
    done = await machine.crow("skills", "validate", str(folder))
    assert "lowercase letters" in done.out
    assert "description is missing" in done.out
    assert (await machine.crow("skills", "new", "../x")).code == 2
    assert not (machine.project.parent / "x").exists()


async def test_the_files_of_the_user_and_of_a_trusted_project_reach_the_model(machine: "Machine"):
    home = Path(machine.env["CROW_HOME"])
    write(home, "AGENTS.md", "Be brief.")
    write(machine.project, "AGENTS.md", "Use tabs.")
    write(home, "skills/birds/SKILL.md", "---\nname: birds\ndescription: About birds.\n---\nLook up.")
    write(machine.home, ".claude/skills/fish/SKILL.md", "---\nname: fish\ndescription: About fish.\n---\nLook down.")
    write(machine.project, ".agents/skills/own/SKILL.md", "---\nname: own\ndescription: The project's.\n---\nMine.")
    write(machine.project, ".claude/commands/ask.md", "Which birds are in $1?")
    async with ScriptedServer([Reply("Yes."), Reply("Yes."), Reply("Yes.")]) as model:
        machine.ask(model.url)
        unknown = await machine.crow("run", "/ask @list.txt")
        assert ".agents/skills and .claude/commands in" in unknown.err
        assert "There is no command `/ask`." in unknown.err
        assert (unknown.code, unknown.out) == (1, "")
        assert not model.requests
        await machine.crow("run", "ask @list.txt")
        system, said = (message["content"] for message in model.requests[-1]["messages"])
        assert said == "ask @list.txt"
        for told in ("Be brief.", "Use tabs.", "birds: About birds.", "fish: About fish."):
            assert told in system
        assert "The project's." not in system
        assert (await machine.crow("trust", "--yes", str(machine.project))).code == 0
        write(machine.project, "list.txt", "A heron.")
        assert (await machine.crow("run", "/ask @list.txt")).code == 0
        system, said = (message["content"] for message in model.requests[-1]["messages"])
        assert "own: The project's." in system
        assert said.startswith("Which birds are in @list.txt?\n\n")
        assert "A heron." in said
        assert "Look up." in said
        write(machine.project, ".agents/skills/own/SKILL.md", "---\nname: own\ndescription: Another now.\n---\nMine.")
        await machine.crow("run", "Hi")
        assert "Another now." not in model.requests[-1]["messages"][0]["content"]


async def test_each_extension_can_be_left_out(machine: "Machine"):
    write(machine.project, "AGENTS.md", "Use tabs.")
    write(machine.home, "skills/birds/SKILL.md", "---\nname: birds\ndescription: About birds.\n---\nLook up.")
    shutil.copytree(machine.home / "skills", Path(machine.env["CROW_HOME"], "skills"))
    machine.configure(
        "[extensions]\nagents = false\nskills = { tool = true }\nmentions = false\ncommand_files = false\n"
    )
    async with ScriptedServer([Reply("Yes.")]) as model:
        machine.ask(model.url)
        done = await machine.crow("run", "Look at @AGENTS.md")
        assert done.code == 0, done.err
        system, said = (message["content"] for message in model.requests[-1]["messages"])
        assert said == "Look at @AGENTS.md"
        assert "About birds." not in system
        assert "Use tabs." not in system
        assert "skills" in [tool["function"]["name"] for tool in model.requests[-1]["tools"]]
