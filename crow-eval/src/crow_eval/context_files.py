"""AGENTS.md and SKILL.md as the texts of a search: a candidate is given to the sessions in place of the file."""

from pathlib import Path

from crow_agent.settings.faults import to_read_error
from crow_core.app import Crow
from crow_core.session.session import Command, Session
from crow_skills.skill_file import parse_skill
from crow_skills.skills import SKILLS
from crow_system.files import UnusableFile

INSTRUCTIONS = ("AGENTS.md", "CLAUDE.md")
SKILL = "skill:"
"""The beginning of the name under which the versions of a SKILL.md are stored; the name of the skill follows."""


def is_file_name(name: str) -> bool:
    """Return True if the versions of this name are those of a file, not of a template."""
    return name in INSTRUCTIONS or name.startswith(SKILL)


def read_context_file(given: str) -> tuple[str, str] | None:
    """Return the name for the versions of a file, and its text; None unless it is an AGENTS.md or SKILL.md.

    Raises ConfigError if it cannot be read.
    """
    path = Path(given).expanduser().absolute()
    if path.name not in (*INSTRUCTIONS, "SKILL.md") or not path.is_file():
        return None
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise to_read_error(path, error) from error
    return (f"{SKILL}{path.parent.name}" if path.name == "SKILL.md" else path.name), text


def find_file_fault(name: str, text: str) -> str:
    """Return why a text cannot take the place of a file; "" if it can."""
    if not name.startswith(SKILL):
        return ""
    try:
        skill = parse_skill(text, f"/{name.removeprefix(SKILL)}/SKILL.md", "given")
    except UnusableFile as error:
        return f"The skill {error}."
    wanted = name.removeprefix(SKILL)
    return "" if skill.name == wanted else f"The skill's name has become {skill.name}, not {wanted}."


def give_file(crow: Crow, *, name: str, text: str) -> None:
    """Give the sessions of an app a text as their AGENTS.md, or as a skill, which is written to their temporary
    folder."""

    @crow.instructions
    def add(session: Session) -> str | None:
        if name not in INSTRUCTIONS:
            return None
        files = [{"path": str(Path(session.cwd) / name), "text": text}]
        return session.prompts.render(session.prompts.templates["agents"], "agents", files=files)

    @crow.commands
    async def add_skill(session: Session) -> list[Command]:
        if name.startswith(SKILL):
            file = session.folders.scratch() / "skills" / name.removeprefix(SKILL) / "SKILL.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
            skill = parse_skill(text, str(file), "given")
            session.state[SKILLS].skills[skill.name] = skill
        return []
