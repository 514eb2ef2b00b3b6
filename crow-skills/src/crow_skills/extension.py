"""`crow.use(skills)`: the model knows which skills there are, and reads one when it is called for."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from crow_core.acp.schema import ContentBlock, TextBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks, to_blocks, to_text
from crow_core.extensions.resources import contents, every
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages import Message, marker_kind, select_entries
from crow_core.prompts import Prompt
from crow_core.session import Command, Session
from crow_core.text import to_line

from crow_skills.files import Unreadable, parted, project
from crow_skills.skill import BODY, FOLDERS, Found, Place, Skill, find

AT_ONCE = 10
"""Skills that one prompt takes in."""
ROOM = 30_000
"""Characters that the descriptions of all skills may take."""

SERVED = re.compile(r"skill://(?:[^/]+/)*([^/]+)/SKILL\.md")

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
    folders: Sequence[str] = (),
    user: Sequence[Path] = (),
    trusted: Callable[[Path], bool] = nobody,
    tool: bool = False,
) -> None:
    """Tell the model of the skills in a project's folders that are `trusted`, in `folders`, and in `user`; the first of
    a name counts. With `tool` they are not named in the system prompt, but by a tool `skills`.

    Skills that MCP servers have join them at the first prompt. Brings /skills and /skill:NAME.
    """
    crow.prompts |= {name: Prompt.packaged(name, "crow_skills") for name in ("skills", "skill")}
    server = Server("skills", None, definitions=[DEFINITION], built_in=True, shared=True)
    if tool:
        crow.servers.append(server)

    @crow.commands
    async def commands(session: Session) -> list[Command]:
        where = places(Path(session.cwd), folders, user, trusted)
        found = session.state["skills"] = await asyncio.to_thread(find, where)
        session.state["left out"] = found.left_out
        session.folders.readable += [skill.folder for skill in found.skills.values()]  # the model opens what it names
        return [
            Command("skills", "The skills there are", show),
            *(
                Command(
                    f"skill:{name}",
                    to_line(skill.description)[:200],
                    partial(call_for, name),
                    hint="[what to do]",
                )
                for name, skill in found.skills.items()
            ),
        ]

    @crow.instructions
    def name_them(session: Session) -> str | None:
        found = found_in(session).skills.values()
        return None if tool or not found else listing(session, found)

    @crow.before_prompt
    async def disclose(message: Message, session: Session) -> Message:
        await add_served(session, found_in(session))
        if left_out := session.state.pop("left out", ()):
            await session.notice(f"Left out, /skills has the rest: {to_line(left_out[0])}", "warning")
        known = disclosed(session, "skill", "name")
        wanted = called_for(said(message), found_in(session).skills.values())
        new = [(skill, trigger) for skill, trigger in wanted if skill.name not in known][:AT_ONCE]
        blocks: list[ContentBlock] = []
        for skill, trigger in new:
            try:
                blocks.append(TextBlock(text=await told(session, skill, trigger)))
            except ConnectionError as error:
                await session.notice(f"The skill {to_line(skill.name)} was not read: {error}.", "warning")
        return attach_blocks(message, blocks)

    @crow.before_tool
    async def answer(session: Session, tool_call: ToolCall) -> ToolResult | None:
        if not tool_call.is_for(server):
            return None
        found, name = found_in(session).skills, str(tool_call.arguments.get("name") or "")
        if not name:
            return ToolResult.text(listing(session, found.values()) if found else "There are no skills.")
        if name not in found:
            return ToolResult.error(f"There is no skill {name!r}. There are: {', '.join(found) or 'none'}.")
        try:
            return ToolResult.text(await told(session, found[name], ""))
        except ConnectionError as error:
            return ToolResult.error(f"The skill {name!r} was not read: {error}. Go on without it.")


def places(cwd: Path, folders: Sequence[str], user: Sequence[Path], trusted: Callable[[Path], bool]) -> Iterator[Place]:
    """Where skills may lie, the most important first."""
    for folder in reversed(project(cwd)):
        if trusted(folder):
            yield from (Place(folder / name, "project", folder) for name in FOLDERS)
    yield from (Place(cwd / Path(folder).expanduser(), "given") for folder in folders)
    yield from (Place(folder, "user") for folder in user)


async def add_served(session: Session, found: Found) -> None:
    """The skills among the resources of the MCP servers that have come up: those named `skill://NAME/SKILL.md`."""
    asked: set[Server] = session.state.setdefault("asked for skills", set())
    new = {server for server in session.toolbox.external_servers() if server.connected} - asked
    asked |= new
    for resource in await every(server for server in session.toolbox.external_servers() if server in new):
        if not resource.template and (match := SERVED.fullmatch(resource.uri)):
            name, about = to_line(match[1])[:64], resource.about.strip()[:1024] or resource.name
            skill = Skill(name, about, "", resource.uri, resource.server.name, server=resource.server)
            found.skills.setdefault(name, skill)


def found_in(session: Session) -> Found:
    return session.state.get("skills") or Found()


def said(message: Message) -> str:
    """What the user typed, with the text of the command that it called."""
    typed = [block.text for block in to_blocks(message) if isinstance(block, TextBlock)]
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
    """Whether a text in small letters has a word in it: as a whole, but in scripts that do not part their words."""
    begin, end = ("(?<![\\w-])" * word[:1].isascii(), "(?![\\w-])" * word[-1:].isascii())
    return re.search(begin + re.escape(word.casefold()) + end, low) is not None


def listing(session: Session, found: Iterable[Skill]) -> str:
    """All names and descriptions, each cut where there are very many."""
    found = sorted(found, key=lambda skill: skill.name)
    room = ROOM // len(found)
    rows = [{"name": skill.name, "description": skill.description[:room], "source": skill.source} for skill in found]
    return session.prompts.render(session.prompts.templates["skills"], "skills", skills=rows)


async def told(session: Session, skill: Skill, trigger: str) -> str:
    """A skill in words. Raises ConnectionError where its server does not give it."""
    prompt, body = session.prompts.templates["skill"], skill.body
    if skill.server:
        body = "\n\n".join(map(to_text, await contents(skill.server, skill.source)))[:BODY]
        with suppress(Unreadable):
            body = parted(body)[1].strip()
        body = mask(body, {*skill.server.secrets, *session.secrets})
    return session.prompts.render(prompt, "skill", name=skill.name, trigger=trigger, folder=skill.folder, body=body)


def disclosed(session: Session, purpose: str, key: str, *ends: str) -> set[str]:
    """What has been rendered for a purpose, by one of the variables, as far as the model still reads it: not what was
    rewound or summed up, nor what stands before a marker of one of the kinds `ends`."""
    entries = select_entries(session.log)
    start = max((at for at, entry in enumerate(entries) if marker_kind(entry) in ends), default=0)
    renders = (entry.get("crow", {}) for entry in entries[start:] if marker_kind(entry) == "render")
    return {str(render["variables"].get(key)) for render in renders if render.get("purpose") == purpose}


async def call_for(name: str, session: Session, words: str) -> Message:
    """The command's words are the prompt; `disclose` finds the skill's name in them."""
    return {"role": "user", "content": f"/skill:{name} {words}".strip()}


async def show(session: Session, words: str) -> str:
    found, known = found_in(session), disclosed(session, "skill", "name")
    lines: list[str] = []
    for skill in found.skills.values():
        read = ", read" if skill.name in known else ""
        lines.append(f"- **{to_line(skill.name)}** ({to_line(skill.origin)}{read}): {to_line(skill.description)[:200]}")
        lines += [f"  - {problem}" for problem in skill.problems]
    lines += [f"- Left out: {to_line(why)}" for why in [*found.left_out, *found.hidden]]
    return "\n".join(lines) or "There are no skills. Make one: crow skills new NAME"
