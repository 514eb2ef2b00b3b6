"""Make slash commands from Markdown files: `crow.use(command_files)`."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from crow_core.app import Crow
from crow_core.messages.message import Message
from crow_core.session.prompts import Prompt
from crow_core.session.session import Command, Session
from crow_core.text import to_line
from crow_system.files import UnusableFile, is_inside

from crow_skills.text_files import find_project_folders, read_text, split_frontmatter, trust_nothing

COMMAND_FOLDERS = (".crow/commands", ".claude/commands")
"""Folders of a project that hold command files; the first has priority."""
MAX_COMMANDS = 200
"""Commands read from one folder."""
MAX_CHARACTERS = 100_000
"""Characters read from a command file."""
ARGUMENT = re.compile(r"\$(?:(ARGUMENTS)\b|([1-9])(?!\d))")


@dataclass(frozen=True)
class CommandTemplate:
    """A command file: its text is the prompt that the command sends."""

    name: str
    path: Path
    description: str
    hint: str
    """The arguments that it expects, for the user."""
    body: str

    def fill(self, arguments: str) -> str:
        """Return the prompt: `$ARGUMENTS` becomes all arguments, `$1` to `$9` single ones.

        Append the arguments if the text has no placeholder.
        """
        words = arguments.split()

        def replace(match: re.Match[str]) -> str:
            return arguments if match[1] else "".join(words[int(match[2]) - 1 : int(match[2])])

        text, count = ARGUMENT.subn(replace, self.body)
        return text if count or not arguments else f"{text}\n\n{arguments}"


def command_files(crow: Crow, *, user: Sequence[Path] = (), trusted: Callable[[Path], bool] = trust_nothing) -> None:
    """Make a command of each Markdown file in the command folders of a `trusted` project and in the `user` folders.

    Use it before the extensions that define commands: a command file never replaces one of those.
    """
    crow.prompts["command"] = Prompt.from_package("command", "crow_skills")

    @crow.commands
    async def commands(session: Session) -> list[Command]:
        return await asyncio.to_thread(find_commands, Path(session.cwd))

    def find_commands(cwd: Path) -> list[Command]:
        projects = [folder for folder in reversed(find_project_folders(cwd)) if trusted(folder)]
        folders = [(folder / name, folder) for folder in projects for name in COMMAND_FOLDERS]
        templates: dict[str, CommandTemplate] = {}
        for folder, root in [*folders, *((folder, None) for folder in user)]:
            for template in read_templates(folder, root):
                templates.setdefault(template.name, template)
        return [Command(t.name, t.description, partial(run_template, t), hint=t.hint) for t in templates.values()]


async def run_template(template: CommandTemplate, session: Session, words: str) -> str | Message:
    """Return the prompt of a command with its arguments, or a sentence for the user if the file is empty."""
    text = template.fill(words).strip()
    if not text:
        return f"{to_line(str(template.path))} is empty. Write the text of the command into it."
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


def read_templates(folder: Path, root: Path | None) -> Iterator[CommandTemplate]:
    """Yield the command files in a folder and below it; `git/push.md` is named `git:push`.

    Skip files whose name cannot be a command's, that cannot be read, or that lead out of `root`.
    """
    try:
        paths = sorted(folder.glob("**/*.md"))[:MAX_COMMANDS] if not root or is_inside(folder, root) else []
    except OSError:
        return
    for path in paths:
        name = ":".join(path.relative_to(folder).with_suffix("").parts)
        if not re.fullmatch(r"[\w.:-]{1,100}", name):
            continue
        try:
            fields, body = split_frontmatter(read_text(path, MAX_CHARACTERS, root))
        except UnusableFile:
            continue
        first_line = next((line.strip("# ") for line in body.splitlines() if line.strip("# ")), "")
        description = fields.get("description") if isinstance(fields.get("description"), str) else first_line
        hint = fields.get("argument-hint")
        if isinstance(hint, list):
            hint = " ".join(f"[{each}]" for each in cast(list[Any], hint))
        yield CommandTemplate(name, path, to_line(str(description))[:200], to_line(str(hint or ""))[:100], body.strip())
