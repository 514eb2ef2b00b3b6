"""`crow.use(command_files)`: a Markdown file is a slash command."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from crow_core.app import Crow
from crow_core.messages import Message
from crow_core.prompts import Prompt
from crow_core.session import Command, Session
from crow_core.text import to_line

from crow_skills.extension import nobody
from crow_skills.files import Unreadable, parted, project, read

FOLDERS = (".crow/commands", ".claude/commands")
"""Where a project keeps them; the first goes before the other."""
MOST = 200
"""Commands of one folder."""
LIMIT = 100_000
"""Characters of a file."""
ARGUMENT = re.compile(r"\$(?:(ARGUMENTS)\b|([1-9])(?!\d))")


@dataclass(frozen=True)
class Template:
    """A file that becomes a prompt."""

    name: str
    path: Path
    description: str
    hint: str
    body: str

    def filled(self, words: str) -> str:
        """The prompt: `$ARGUMENTS` is all the words, `$1` to `$9` are single ones. Words that it has no place for come
        behind it."""
        each = words.split()

        def argument(match: re.Match[str]) -> str:
            return words if match[1] else "".join(each[int(match[2]) - 1 : int(match[2])])

        text, places = ARGUMENT.subn(argument, self.body)
        return text if places or not words else f"{text}\n\n{words}"


def command_files(crow: Crow, *, user: Sequence[Path] = (), trusted: Callable[[Path], bool] = nobody) -> None:
    """Make commands of the Markdown files in a project's folders that are `trusted`, and in those of the `user`.

    To be used before what brings commands of its own: a file never takes the place of those.
    """
    crow.prompts["command"] = Prompt.packaged("command", "crow_skills")

    @crow.commands
    async def commands(session: Session) -> list[Command]:
        return await asyncio.to_thread(find, Path(session.cwd))

    def find(cwd: Path) -> list[Command]:
        own = [folder for folder in reversed(project(cwd)) if trusted(folder)]
        places = [(folder / name, folder) for folder in own for name in FOLDERS]
        templates: dict[str, Template] = {}
        for folder, inside in [*places, *((folder, None) for folder in user)]:
            for template in templates_in(folder, inside):
                templates.setdefault(template.name, template)
        return [Command(t.name, t.description, partial(run, t), hint=t.hint) for t in templates.values()]


async def run(template: Template, session: Session, words: str) -> str | Message:
    text = template.filled(words).strip()
    if not text:
        return f"{to_line(str(template.path))} is empty. Write in it what the command is to say."
    text = session.prompts.render(
        session.prompts.templates["command"],
        "command",
        name=template.name,
        path=str(template.path),
        words=words,
        text=text,
    )
    typed = {"type": "text", "text": f"/{template.name} {words}".strip()}
    return {"role": "user", "content": text, "crow": {"blocks": [typed], "command": text}}


def templates_in(folder: Path, inside: Path | None) -> Iterator[Template]:
    """The files in a folder and below it, `git/push.md` as `git:push`; one that cannot be read is none."""
    try:
        paths = sorted(folder.glob("**/*.md"))[:MOST]
    except OSError:
        return
    for path in paths:
        name = ":".join(path.relative_to(folder).with_suffix("").parts)
        if not re.fullmatch(r"[\w.:-]{1,100}", name):
            continue
        try:
            fields, body = parted(read(path, LIMIT, inside))
        except Unreadable:
            continue
        first = next((line.strip("# ") for line in body.splitlines() if line.strip("# ")), "")
        about = fields.get("description") if isinstance(fields.get("description"), str) else first
        hint = fields.get("argument-hint")
        shown = " ".join(f"[{each}]" for each in cast(list[Any], hint)) if isinstance(hint, list) else hint or ""
        yield Template(name, path, to_line(str(about))[:200], to_line(str(shown))[:100], body.strip())
