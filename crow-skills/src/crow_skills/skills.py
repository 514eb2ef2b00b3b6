"""Put skills into the context: their names into the system prompt, their bodies into prompts: `crow.use(skills)`."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crow_core.acp.schema import ContentBlock, TextBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks, to_text
from crow_core.masking import mask
from crow_core.mcp.resources import list_several, read_blocks, to_read_call
from crow_core.mcp.result import ToolResult
from crow_core.mcp.served_skills import list_served_skills
from crow_core.mcp.server import Handler, Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.prompts import Prompt
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.files import UnusableFile

from crow_skills.log_entries import find_rendered, get_user_text
from crow_skills.skill_file import (
    MAX_CHARACTERS,
    SKILL_FOLDERS,
    Skill,
    SkillFolder,
    SkillIndex,
    find_skills,
    has_frontmatter,
)
from crow_skills.text_files import find_project_folders, split_frontmatter, trust_nothing

MAX_SKILLS_PER_PROMPT = 10
"""Skills whose bodies are added to one prompt."""
MAX_DESCRIPTIONS = 30_000
"""Characters of the descriptions of all skills together, each cut to an equal share."""

SKILL_URI = re.compile(r"skill://(?:[^/]+/)*([^/]+)/SKILL\.md")

DEFINITION: dict[str, Any] = {
    "name": "skills",
    "description": "Instructions for particular kinds of work. Without a name it lists them; look there before you "
    "begin a task. With a name it gives that skill.",
    "inputSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
    "_meta": {"crow/kind": "read"},
}
SKILLS = StateKey("skills", SkillIndex)
LEFT_OUT = StateKey("skills_left_out", list[str])
"""Omitted skills that the user does not know of yet."""
ASKED = StateKey("asked_for_skills", set[Server])


def skills(
    crow: Crow,
    *,
    folders: Sequence[str] = (),
    user: Sequence[Path] = (),
    trusted: Callable[[Path], bool] = trust_nothing,
    plugins: Callable[[Path], Sequence[SkillFolder]] | None = None,
    tool: bool = False,
) -> None:
    """Give the model the skills of `trusted` projects, of `folders`, of the `user` folders and of `plugins`.

    Of several with one name, use the first. The system prompt lists names and descriptions; with `tool`, a tool
    `skills` lists them instead. A prompt that has a skill's name or trigger in it gets the skill's body. The skills of
    MCP servers are added at the first prompt. Define the commands /skills and /skill:NAME.
    """
    crow.prompts |= {name: Prompt.from_package(name, "crow_skills") for name in ("skills", "skill")}
    if tool:
        handlers: dict[str, Handler] = {"skills": answer_tool_call}
        crow.servers.append(Server("skills", definitions=[DEFINITION], handlers=handlers, built_in=True, shared=True))

    @crow.commands
    async def commands(session: Session) -> list[Command]:
        where = [*list_skill_folders(Path(session.cwd), folders, user, trusted)]
        where += plugins(Path(session.cwd)) if plugins else []
        index = session.state[SKILLS] = await asyncio.to_thread(find_skills, where)
        session.state[LEFT_OUT] = index.left_out
        # The model opens the files of a skill by itself.
        session.folders.readable += [skill.folder for skill in index.skills.values()]
        return [
            Command("skills", "The skills there are", list_skills),
            *(
                Command(
                    f"skill:{name}",
                    to_line(skill.description)[:200],
                    partial(run_skill, name),
                    hint="[what to do]",
                )
                for name, skill in index.skills.items()
            ),
        ]

    @crow.instructions
    def add_to_system_prompt(session: Session) -> str | None:
        index = session.state[SKILLS].skills.values()
        return None if tool or not index else render_list(session, index)

    @crow.before_prompt
    async def add_to_prompt(message: Message, session: Session) -> Message:
        await add_served_skills(session, session.state[SKILLS])
        if left_out := session.state.pop(LEFT_OUT):
            await session.notice(f"Left out, /skills has the rest: {to_line(left_out[0])}", "warning")
        known = find_rendered(session, "skill", "name")
        selected = select_skills(get_user_text(message), session.state[SKILLS].skills.values())
        new = [(skill, trigger) for skill, trigger in selected if skill.name not in known][:MAX_SKILLS_PER_PROMPT]
        blocks: list[ContentBlock] = []
        for skill, trigger in new:
            try:
                blocks.append(TextBlock(text=await render_skill(session, skill, trigger)))
            except ConnectionError as error:
                await session.notice(f"The skill {to_line(skill.name)} was not read: {error}.", "warning")
        return attach_blocks(message, blocks)


async def answer_tool_call(session: Session, tool_call: ToolCall) -> ToolResult:
    """Answer a call of the tool `skills`: with a skill, or with the list of them."""
    skills, name = session.state[SKILLS].skills, str(tool_call.arguments.get("name") or "")
    if not name:
        return ToolResult.text(render_list(session, skills.values()) if skills else "There are no skills.")
    if name not in skills:
        return ToolResult.error(f"There is no skill {name!r}. There are: {', '.join(skills) or 'none'}.")
    skill = skills[name]
    if skill.server:
        read_call = to_read_call(session.toolbox, tool_call, skill.server, skill.source)
        if refusal := await session.permit(read_call):
            return refusal
    try:
        return ToolResult.text(await render_skill(session, skill, ""))
    except ConnectionError as error:
        return ToolResult.error(f"The skill {name!r} was not read: {error}. Go on without it.")


def list_skill_folders(
    cwd: Path, folders: Sequence[str], user: Sequence[Path], trusted: Callable[[Path], bool]
) -> Iterator[SkillFolder]:
    """Yield the folders that may hold skills, those with priority first."""
    for folder in reversed(find_project_folders(cwd)):
        if trusted(folder):
            yield from (SkillFolder(folder / name, "project", folder) for name in SKILL_FOLDERS)
    yield from (SkillFolder(cwd / Path(folder).expanduser(), "given") for folder in folders)
    yield from (SkillFolder(folder, "user") for folder in user)


async def add_served_skills(session: Session, index: SkillIndex) -> None:
    """Add the skills of the MCP servers that have connected since the last call."""
    asked = session.state[ASKED]
    new = [server for server in session.toolbox.external_servers() if server.connected and server not in asked]
    asked.update(new)
    listed = dict(zip(new, await asyncio.gather(*map(list_served_skills, new)), strict=True))
    for server, skills in listed.items():
        for skill in skills or ():
            about = str(skill.frontmatter["description"]).strip()[:1024]
            add_served_skill(index, server, skill.uri, skill.path, about, skill.frontmatter)
    for resource in await list_several(server for server, skills in listed.items() if skills is None):
        if not resource.template and (match := SKILL_URI.fullmatch(resource.uri)):
            about = resource.about.strip()[:1024] or resource.name
            add_served_skill(index, resource.server, resource.uri, match[1], about)


def add_served_skill(
    index: SkillIndex, server: Server, uri: str, path: str, about: str, fields: Mapping[str, Any] | None = None
) -> None:
    """Add a skill of a server under its name, or if that is taken, under one that no other skill has."""
    names = (path.rpartition("/")[2], f"{server.name}:{path.rpartition('/')[2]}", f"{server.name}:{path}")
    free = (name for each in names if (name := to_line(each)[:200]) not in index.skills)
    if (name := next(free, "")) and not any(is_of(skill, server, uri) for skill in index.skills.values()):
        index.skills[name] = Skill(name, about, "", uri, server.name, server=server, fields=fields)


def is_of(skill: Skill, server: Server, uri: str) -> bool:
    """Return whether a skill is the one that a server has at a URI."""
    return skill.server is server and skill.source == uri


def select_skills(text: str, skills: Iterable[Skill]) -> Iterator[tuple[Skill, str]]:
    """Yield each skill that a text names, with the words that name it; those named by `/skill:` first."""
    lower = text.casefold()
    called = {skill.name: f"/skill:{skill.name}" for skill in skills if has_word(lower, f"/skill:{skill.name}")}
    for skill in skills:
        if skill.name in called:
            yield skill, called[skill.name]
    for skill in skills:
        words = (word for word in (skill.name, *skill.triggers) if skill.name not in called and has_word(lower, word))
        if word := next(words, ""):
            yield skill, word


def has_word(lower: str, word: str) -> bool:
    """Return whether a casefolded text contains a word, as a whole word at each end of it that is ASCII.

    Other scripts may not separate words, so a match inside a sentence counts there.
    """
    before = r"(?<![\w-])" if word[:1].isascii() else ""
    after = r"(?![\w-])" if word[-1:].isascii() else ""
    return re.search(before + re.escape(word.casefold()) + after, lower) is not None


def render_list(session: Session, skills: Iterable[Skill]) -> str:
    """Render the names and descriptions of skills; cut the descriptions if there are very many."""
    skills = sorted(skills, key=lambda skill: skill.name)
    room = MAX_DESCRIPTIONS // len(skills)
    rows = [{"name": skill.name, "description": skill.description[:room], "source": skill.source} for skill in skills]
    return session.prompts.render(session.prompts.templates["skills"], "skills", skills=rows)


async def render_skill(session: Session, skill: Skill, trigger: str) -> str:
    """Render a skill's body with the word that selected it. Raises ConnectionError if its MCP server fails."""
    prompt, body = session.prompts.templates["skill"], skill.body
    if skill.server:
        body = "\n\n".join(map(to_text, await read_blocks(skill.server, skill.source)))[:MAX_CHARACTERS]
        try:
            if skill.fields is not None and not has_frontmatter(body, skill.fields):
                raise ConnectionError("its frontmatter is not the one that the server lists")
            body = split_frontmatter(body)[1].strip()
        except UnusableFile as error:
            if skill.fields is not None:
                raise ConnectionError(f"its SKILL.md {error}") from error
        body = mask(body, {*skill.server.secrets, *session.secrets})
    return session.prompts.render(prompt, "skill", name=skill.name, trigger=trigger, folder=skill.folder, body=body)


async def run_skill(name: str, session: Session, words: str) -> Message:
    """Run /skill:NAME: return its text as the prompt, to which `add_to_prompt` adds the skill's body."""
    return {"role": "user", "content": f"/skill:{name} {words}".strip()}


async def list_skills(session: Session, words: str) -> str:
    """Run /skills: return the list of skills with their problems, and the files that were left out."""
    index, known = session.state[SKILLS], find_rendered(session, "skill", "name")
    lines: list[str] = []
    for skill in index.skills.values():
        read = ", read" if skill.name in known else ""
        lines.append(f"- **{to_line(skill.name)}** ({to_line(skill.origin)}{read}): {to_line(skill.description)[:200]}")
        lines += [f"  - {problem}" for problem in skill.problems]
    lines += [f"- Left out: {to_line(why)}" for why in [*index.left_out, *index.hidden]]
    return "\n".join(lines) or "There are no skills. Make one: crow skills new NAME"
