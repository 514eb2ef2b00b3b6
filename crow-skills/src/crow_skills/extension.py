"""`crow.use(skills)`: the model knows which skills there are, and reads one when it is called for."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crow_core.acp.schema import ContentBlock, TextBlock
from crow_core.app import Crow
from crow_core.content import ToolResult, attached, blocks_of, clean
from crow_core.messages import Message, ToolUse, arguments_of, chosen, kind_of
from crow_core.prompts import Prompt
from crow_core.servers import Server
from crow_core.session import Command, Session

from crow_skills.files import project
from crow_skills.skill import FOLDERS, Found, Place, Skill, find

AT_ONCE = 10
"""Skills that one prompt takes in."""
ROOM = 30_000
"""Characters that the descriptions of all skills may take."""

DEFINITION: dict[str, Any] = {
    "name": "skills",
    "description": "Instructions for particular kinds of work. Without a name it lists them; look there before you "
    "begin a task. With a name it gives that skill.",
    "inputSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
    "_meta": {"crow/kind": "read"},
}


def nobody(folder: Path) -> bool:
    return False


def skills(
    crow: Crow,
    *,
    folders: Sequence[str | Path] = (),
    user: Sequence[Path] = (),
    trusted: Callable[[Path], bool] = nobody,
    tool: bool = False,
) -> None:
    """Tell the model of the skills in a project's folders that are `trusted`, in `folders`, and in `user`; the first of
    a name counts. With `tool` they are not named in the system prompt, but by a tool `skills`.

    Brings /skills and /skill:NAME.
    """
    crow.prompts |= {name: Prompt.packaged(name, "crow_skills") for name in ("skills", "skill")}
    server = Server("skills", None, definitions=[DEFINITION], built_in=True, shared=True)
    if tool:
        crow.servers.append(server)

    def look(session: Session) -> Found:
        cwd = Path(session.cwd)
        places = [
            Place(folder / name, "project", folder)
            for folder in reversed(project(cwd))
            if trusted(folder)
            for name in FOLDERS
        ]
        places += [Place(cwd / Path(folder).expanduser(), "given") for folder in folders]
        return find([*places, *(Place(folder, "user") for folder in user)])

    @crow.commands
    def commands(session: Session) -> list[Command]:
        found = session.state["skills"] = look(session)
        session.readable += [skill.folder for skill in found.skills.values()]
        return [
            Command("skills", "The skills there are", show),
            *(
                Command(f"skill:{name}", clean(skill.description)[:200], partial(call_for, name), hint="[what to do]")
                for name, skill in found.skills.items()
            ),
        ]

    @crow.instructions
    def name_them(session: Session) -> str | None:
        found = found_in(session).skills.values()
        return None if tool or not found else listing(session, found)

    @crow.before_prompt
    def disclose(message: Message, session: Session) -> Message:
        known = disclosed(session, "skill", "name")
        wanted = called_for(said(message), found_in(session).skills.values())
        new = [(skill, trigger) for skill, trigger in wanted if skill.name not in known][:AT_ONCE]
        blocks: list[ContentBlock] = [TextBlock(text=told(session, skill, trigger)) for skill, trigger in new]
        return attached(message, blocks)

    @crow.before_tool
    def answer(session: Session, call: ToolUse) -> ToolResult | None:
        if not session.toolbox.is_of(call, server):
            return None
        found, name = found_in(session).skills, (arguments_of(call) or {}).get("name") or ""
        if not name:
            return ToolResult.text(listing(session, found.values()) if found else "There are no skills.")
        if name not in found:
            return ToolResult.error(f"There is no skill {name!r}. There are: {', '.join(found) or 'none'}.")
        return ToolResult.text(told(session, found[name], ""))


def found_in(session: Session) -> Found:
    return session.state.get("skills") or Found()


def said(message: Message) -> str:
    """What the user typed, with the text of the command that it called."""
    typed = [block.text for block in blocks_of(message) if isinstance(block, TextBlock)]
    return "\n\n".join([*typed, message.get("crow", {}).get("command", "")])


def called_for(text: str, skills: Iterable[Skill]) -> Iterator[tuple[Skill, str]]:
    """The skills that a text calls for, and the words that do; those it calls by `/skill:` come first."""
    low = text.casefold()
    called = {skill.name: f"/skill:{skill.name}" for skill in skills if has(low, f"/skill:{skill.name}")}
    for skill in skills:
        if skill.name in called:
            yield skill, called[skill.name]
    for skill in skills:
        words = (word for word in (skill.name, *skill.triggers) if skill.name not in called and has(low, word))
        if word := next(words, ""):
            yield skill, word


def has(low: str, word: str) -> bool:
    """Whether a text in small letters has a word in it, as a whole."""
    return re.search(rf"(?<![\w-]){re.escape(word.casefold())}(?![\w-])", low) is not None


def listing(session: Session, found: Iterable[Skill]) -> str:
    """All names and descriptions, each cut where there are very many."""
    found = sorted(found, key=lambda skill: skill.name)
    room = ROOM // len(found)
    rows = [{"name": skill.name, "description": skill.description[:room], "source": skill.source} for skill in found]
    return session.render(session.prompts["skills"], "skills", skills=rows)


def told(session: Session, skill: Skill, trigger: str) -> str:
    prompt, folder = session.prompts["skill"], skill.folder
    return session.render(prompt, "skill", name=skill.name, trigger=trigger, folder=folder, body=skill.body)


def disclosed(session: Session, purpose: str, key: str) -> set[str]:
    """What has been rendered for a purpose, by one of the variables, as far as the model still reads it: not what was
    rewound or summed up."""
    renders = (entry.get("crow", {}) for entry in chosen(session.log) if kind_of(entry) == "render")
    return {str(render["variables"].get(key)) for render in renders if render.get("purpose") == purpose}


async def call_for(name: str, session: Session, words: str) -> Message:
    """The command's words are the prompt; `disclose` finds the skill's name in them."""
    return {"role": "user", "content": f"/skill:{name} {words}".strip()}


async def show(session: Session, words: str) -> str:
    found, known = found_in(session), disclosed(session, "skill", "name")
    lines: list[str] = []
    for skill in found.skills.values():
        read = ", read" if skill.name in known else ""
        lines.append(f"- **{clean(skill.name)}** ({clean(skill.origin)}{read}): {clean(skill.description)[:200]}")
        lines += [f"  - {problem}" for problem in skill.problems]
    lines += [f"- Left out: {why}" for why in found.left_out]
    return "\n".join(lines) or "There are no skills. Make one: crow skills new NAME"
