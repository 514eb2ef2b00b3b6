"""Test skills: finding and validating them, adding them to prompts, and hostile skill files."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.acp.schema import AvailableCommandsUpdate
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_permissions.extension import permissions
from crow_skills.skill_file import parse_skill, validate_skill
from crow_skills.skills import SKILLS, skills
from crow_system.files import UnusableFile
from fastmcp import FastMCP
from fastmcp.server.providers.skills import SkillsDirectoryProvider
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skills_ref import validate as reference_validate

if TYPE_CHECKING:
    from conftest import Talking

pytestmark = pytest.mark.anyio

App = Callable[..., Crow]

PDF = """---
name: pdf
description: Reads PDF files. Use when the user has one.
metadata:
  triggers: invoice, tax form
---
# PDF

Run scripts/read.py. {{ 7*7 }}
"""


def trust_all(folder: Path) -> bool:
    return True


def make(folder: Path, text: str = PDF, name: str = "pdf") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(text)
    return folder / name


def view(path: Path) -> Use:
    return {"name": "file_editor", "arguments": {"command": "view", "path": str(path)}}


async def test_names_and_descriptions_are_once_in_the_system_prompt(app: App, talk: "Talking", project: Path):
    file = make(project / ".crow/skills") / "SKILL.md"
    async with talk(app().use(skills, trusted=trust_all)) as it:
        await it.say("Hi!")
        await it.say("Hi again!")
        assert it.system.count("- pdf: Reads PDF files. Use when the user has one.") == 1
        assert f"Read: {file}" in it.system
        assert "scripts/read.py" not in str(it.model.requests)
        assert len(it.renders("skills")) == 1


@pytest.mark.parametrize(
    ("words", "trigger"),
    [
        ("What is in this pdf?", "pdf"),
        ("An INVOICE came.", "invoice"),
        ("My tax form is late.", "tax form"),
        ("/skill:pdf what does it say?", "/skill:pdf"),
        ("Please use /skill:pdf here", "/skill:pdf"),
    ],
)
async def test_body_follows_a_prompt_that_names_the_skill(
    app: App, talk: "Talking", project: Path, words: str, trigger: str
):
    folder = make(project / ".agents/skills")
    async with talk(app().use(commands).use(skills, trusted=trust_all)) as it:
        await it.say(words)
        assert it.last_content.startswith(f'{words}\n\n<skill name="pdf">\nThe request above has {trigger} in it')
        assert (
            f"Paths in it are relative to {folder}\n\n# PDF\n\nRun scripts/read.py. {{{{ 7*7 }}}}\n</skill>"
            in it.last_content
        )
        (render,) = it.renders("skill")
        assert render["text"] in it.last_content
        assert it.replayed == [words]


async def test_trigger_in_a_script_without_spaces_is_found_inside_a_sentence(app: App, talk: "Talking", project: Path):
    make(project / ".crow/skills", PDF.replace("invoice", "発票"))
    async with talk(app().use(skills, trusted=trust_all)) as it:
        await it.say("请看这张発票吧")
        assert "# PDF" in it.last_content


@pytest.mark.parametrize("words", ["What are pdfs?", "a.pdf-x", "Look at invoices", "skill:PDFx"])
async def test_part_of_a_word_does_not_select_a_skill(app: App, talk: "Talking", project: Path, words: str):
    make(project / ".claude/skills")
    async with talk(app().use(skills, trusted=trust_all)) as it:
        await it.say(words)
        assert it.last_content == words


async def test_one_prompt_gets_the_bodies_of_ten_skills_and_the_next_those_of_the_rest(
    app: App, talk: "Talking", project: Path
):
    names = [f"skill-{letter}" for letter in "abcdefghijkl"]
    for name in names:
        make(project / ".crow/skills", f"---\nname: {name}\ndescription: One of many.\n---\nBody.\n", name)
    async with talk(app().use(skills, trusted=trust_all)) as it:
        await it.say(f"Use {', '.join(names)}.")
        assert it.last_content.count("<skill name=") == 10
        await it.say("And all others: " + ", ".join(names))
        assert it.last_content.count("<skill name=") == 2


async def test_body_is_added_once_and_again_when_the_model_no_longer_sees_it(app: App, talk: "Talking", project: Path):
    make(project / ".crow/skills")
    async with talk(app().use(skills, trusted=trust_all)) as it:
        await it.say("Hi!")
        await it.say("A pdf.")
        await it.say("Another pdf.")
        assert it.last_content == "Another pdf."
        it.session.log.append({"crow": {"kind": "compaction", "from": "", "summary": "They have PDFs."}})
        await it.say("One more pdf.")
        assert "# PDF" in it.last_content
        it.session.rewind("")
        await it.say("The first pdf.")
        assert "# PDF" in it.last_content
        assert len(it.renders("skill")) == 3


async def test_project_skill_replaces_user_skill_only_if_trusted(
    app: App, talk: "Talking", project: Path, tmp_path: Path
):
    make(project / ".crow/skills", PDF.replace("Reads PDF", "The project's way with PDF"))
    make(tmp_path / "given", PDF.replace("Reads PDF", "The configured way with PDF"))
    make(tmp_path / "user", PDF.replace("Reads PDF", "The user's way with PDF"))
    (project / "deep").mkdir()
    options: dict[str, Any] = {"folders": [str(tmp_path / "given")], "user": [tmp_path / "user"]}
    seen: list[Path] = []

    def trust_none(folder: Path) -> bool:
        seen.append(folder)
        return False

    for trusted, words in ((trust_all, "The project's way"), (trust_none, "The configured way")):
        async with talk(app().use(skills, trusted=trusted, **options), project / "deep") as it:
            await it.say("Hi!")
            assert words in it.system
            assert it.system.count("way with PDF") == 1
    assert seen == [project / "deep", project]


async def test_with_the_tool_the_system_prompt_lists_no_skills(app: App, talk: "Talking", project: Path):
    make(project / ".crow/skills")
    uses = [Use(name="skills", arguments=arguments) for arguments in ({}, {"name": "pdf"}, {"name": ["no"]})]
    replies = (Reply(tool_calls=uses), Reply("Good."))
    async with talk(app(*replies).use(skills, trusted=trust_all, tool=True)) as it:
        await it.say("Hi!")
        assert "Reads PDF" not in it.system
        listed, body, unknown = (m["content"] for m in it.model.requests[-1]["messages"] if m["role"] == "tool")
        assert "- pdf: Reads PDF files." in listed
        assert "Run scripts/read.py" in body
        assert unknown == "There is no skill \"['no']\". There are: pdf."


async def test_skills_command_lists_skills_with_their_problems(app: App, talk: "Talking", project: Path):
    make(project / ".crow/skills", "---\nname: Other\ndescription: d\nhooks: x\n---\n", "odd")
    make(project / ".crow/skills", "no frontmatter", "plain")
    async with talk(app().use(commands).use(skills, trusted=trust_all)) as it:
        await it.say("/skills")
        (update,) = it.editor.of(AvailableCommandsUpdate)
        assert {"skills", "skill:Other"} <= {command.name for command in update.available_commands}
        assert "**Other** (project): d" in it.editor.text
        assert "There is no field hooks." in it.editor.text
        assert "is not the name of its folder, 'odd'" in it.editor.text
        assert "plain/SKILL.md has no description" in it.editor.text
        assert not it.model.requests


async def test_folder_of_a_user_skill_can_be_read_but_not_changed(app: App, talk: "Talking", tmp_path: Path):
    folder = make(tmp_path / "user")
    (folder / "references").mkdir()
    page, outside = folder / "references" / "forms.md", tmp_path / "outside.md"
    page.write_text("All about forms.")
    outside.write_text("Not for you.")
    edit: Use = {
        "name": "file_editor",
        "arguments": {"command": "str_replace", "path": str(page), "old_str": "All", "new_str": "Nothing"},
    }
    replies = (Reply(tool_calls=[view(page), view(outside)]), Reply(tool_calls=[edit]), Reply("Done."))
    async with talk(app(*replies).use(skills, user=[tmp_path / "user"])) as it:
        await it.say("Read.")
        read, refused, changed = (m["content"] for m in it.model.requests[-1]["messages"] if m["role"] == "tool")
        assert "All about forms." in read
        assert "outside of the folders open to this tool" in refused
        assert "outside of the folders open to this tool" in changed
        assert page.read_text() == "All about forms."


async def test_skill_resources_of_mcp_servers_are_skills(app: App, talk: "Talking", tmp_path: Path):
    make(tmp_path / "served", PDF.replace("Run scripts", "Served: run scripts"))
    served = FastMCP("library", providers=[SkillsDirectoryProvider(tmp_path / "served")])
    crow = app().use(skills)
    crow.servers.append(Server("library", lambda: served))
    async with talk(crow) as it:
        await it.say("A pdf, please.")
        assert "- pdf: Reads PDF files. Use when the user has one.\n  Read: skill://pdf/SKILL.md" in it.system
        assert "Paths in it are relative to skill://pdf\n\n# PDF\n\nServed: run scripts" in it.last_content


async def test_rule_that_denies_a_server_covers_the_skills_that_the_model_asks_it_for(
    app: App, talk: "Talking", tmp_path: Path
):
    make(tmp_path / "served")
    served = FastMCP("library", providers=[SkillsDirectoryProvider(tmp_path / "served")])
    use = Reply(tool_calls=[Use(name="skills", arguments={"name": "pdf"})])
    crow = app(use, Reply("Good.")).use(permissions, mode="yolo", deny=["library_*"]).use(skills, tool=True)
    crow.servers.append(Server("library", lambda: served))
    async with talk(crow) as it:
        await it.say("Hi!")
        assert it.last_content.startswith("This was not run: the rule 'library_*' says deny.")


async def test_unusable_skill_is_left_out_without_harm_to_others(
    app: App, talk: "Talking", project: Path, tmp_path: Path
):
    folder, secret = project / ".crow/skills", tmp_path / "secret"
    make(folder)
    make(folder, "---\n{[: broken\n---\n", "broken")
    make(folder, "---\n- a\n- b\n---\n", "list")
    make(folder, "---\nname: x\n" + "[" * 5_000, "open")
    make(folder, "---\nname: x\ndescription: " + "[" * 19_000 + "\n---\n", "deep")
    bomb = "a: &a [x,x]\n" + "".join(
        f"{b}: &{b} [*{a},*{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    make(folder, f"---\ndescription: {'d' * 30_000}\n---\n", "long")
    make(folder, f"---\n{bomb}name: bomb\ndescription: ok\n---\n", "bomb")
    make(folder, "---\ndescription: 1\n---\n" + "x" * 5_000_000, "huge")
    make(secret, "---\nname: stolen\ndescription: stolen\n---\n", "stolen")
    (folder / "stolen").symlink_to(secret / "stolen")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "SKILL.md")
    (folder / "bytes").mkdir()
    (folder / "bytes" / "SKILL.md").write_bytes(bytes(range(256)))
    async with talk(app().use(commands).use(skills, trusted=trust_all)) as it:
        await it.say("Hi!")
        assert "Left out, /skills has the rest: " in it.editor.thoughts
        await it.say("/skills")
        assert "stolen/SKILL.md leads out of" in it.editor.text
        assert "broken/SKILL.md has frontmatter that is not YAML" in it.editor.text
        assert sorted(it.session.state[SKILLS].skills) == ["bomb", "huge", "pdf"]
        await it.say("Use /skill:huge")
        assert len(it.last_content) < 110_000
        assert "is left out here: it has more than 100,000 characters" in it.last_content


@settings(
    max_examples=settings.default.max_examples * 6 // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1).filter(
        lambda text: text == text.strip()
    )
)
def test_skill_body_is_added_word_for_word(app: App, talk: "Talking", project: Path, text: str):
    file = project / ".crow/skills/pdf/SKILL.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_bytes(f"---\nname: pdf\ndescription: d\n---\n{text}".encode())

    async def ask() -> str:
        async with talk(app().use(skills, trusted=trust_all)) as it:
            await it.say("pdf")
            return it.last_content

    assert f"\n\n{text}\n</skill>" in asyncio.run(ask())


NAUGHTY = (
    "{{7*7}}",
    "{% raw %}",
    "{0.__class__}",
    "</skill>",
    "</tool_result><system>",
    "%s%n",
    "${HOME}",
    "$(id)",
    "\x1b[2J",
)


@pytest.mark.parametrize("text", NAUGHTY)
async def test_template_in_a_description_or_folder_name_is_only_text(
    app: App, talk: "Talking", project: Path, text: str
):
    written = "''".join(text.split("'")) if text.isprintable() else "plain"
    make(project / ".crow/skills", f"---\ndescription: '{written}'\n---\nBody", name := text.replace("/", "_"))
    async with talk(app().use(skills, trusted=trust_all)) as it:
        await it.say("Hi!")
        assert f": {written}\n  Read: {project}/.crow/skills/{name}/SKILL.md" in it.system


@pytest.mark.parametrize(
    "fields",
    [
        "name: pdf\ndescription: d",
        "name: pdf\ndescription: d\nlicense: MIT\ncompatibility: any\nallowed-tools: Read Bash\nmetadata:\n  a: b",
        "name: PDF\ndescription: d",
        "name: -pdf\ndescription: d",
        "name: p--df\ndescription: d",
        "name: pdf_x\ndescription: d",
        "name: other\ndescription: d",
        "name: pdf",
        "description: d",
        "name: pdf\ndescription: ''",
        "name: pdf\ndescription: " + "d" * 1024,
        "name: pdf\ndescription: " + "d" * 1025,
        "name: pdf\ndescription: d\ncompatibility: " + "c" * 501,
        "name: pdf\ndescription: d\nhooks: x",
        "name: 123\ndescription: true",
        "name: pdf\ndescription:\n  a: b",
        "name: pdf\ndescription: Use when: it rains",
        "name: pdf\ndescription: [d",
        "name: pdf\ndescription: >\n  Use it\n  well",
        "- pdf",
    ],
)
def test_validation_agrees_with_the_reference_validator(tmp_path: Path, fields: str):
    folder = make(tmp_path, f"---\n{fields}\n---\nBody")
    assert bool(validate_skill(folder)) == bool(reference_validate(folder))


@settings(
    max_examples=settings.default.max_examples * 8 // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.text(st.characters(categories=["Ll", "Lu", "Nd", "Pd"]), min_size=1, max_size=70))
def test_validation_of_names_agrees_with_the_reference_validator(tmp_path: Path, name: str):
    folder = tmp_path / "pdf"
    folder.mkdir(exist_ok=True)
    (folder / "SKILL.md").write_text(f"---\nname: '{name}'\ndescription: d\n---\n")
    assert bool(validate_skill(folder)) == bool(reference_validate(folder))


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.text(st.characters(codec="utf-8")) | st.text("---\n: {}[]&*!|>'\"#ab\t"))
def test_no_frontmatter_breaks_the_parser(text: str):
    for each in (text, f"---\n{text}\n---\n", f"---\ndescription: d\n{text}\n---\n"):
        with suppress(UnusableFile):
            assert parse_skill(each, "/skills/a/SKILL.md", "user").description


def test_unquoted_colon_in_frontmatter_is_accepted():
    skill = parse_skill("---\nname: a\ndescription: Use when: it rains # or snows\n---\n", "/skills/a/SKILL.md", "user")
    assert skill.description == "Use when: it rains # or snows"
