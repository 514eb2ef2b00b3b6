"""Slash commands: a prompt that begins with `/NAME` runs a command instead of asking the model."""

import os
import re
from difflib import get_close_matches

import msgspec
from crow_core.acp.schema import TextBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks, to_blocks
from crow_core.errors import EndTurn
from crow_core.messages.message import Message
from crow_core.session.options import Option
from crow_core.session.session import Command, Session

COMMAND_NAME = re.compile(r"[A-Za-z][\w-]*")


def commands(crow: Crow) -> None:
    """Run slash commands. Adds /help, /prompt, /worktree, and one for each option of a session, such as /model."""

    @crow.commands
    def builtin(session: Session) -> list[Command]:
        commands = [
            Command("help", "What you can type here", show_help),
            Command("prompt", "What every request of this session begins with", show_prompt),
            Command("worktree", "How to work in a git worktree", explain_worktree, hint="[name]"),
        ]
        return [*commands, *(make_option_command(option) for option in session.options)]

    @crow.before_prompt
    async def dispatch(message: Message, session: Session) -> Message | None:
        if session.parent:
            return None  # the prompt of a sub-agent is written by a model
        match to_blocks(message):
            case [TextBlock(text=text), *others] if text.startswith("/"):
                name, *words = text[1:].split(maxsplit=1) or [""]
            case _:
                return None
        command = session.commands.get(name)
        if command is None:
            if is_path(name):
                return None  # the model reads it
            raise EndTurn("end_turn", describe_unknown(name, session), stopped_by="unknown_command")
        answer = await command.run(session, "".join(words).strip())
        if isinstance(answer, str):
            raise EndTurn("end_turn", answer)
        return attach_blocks(answer, others)


def is_path(name: str) -> bool:
    """True if what follows a slash is a path rather than the name of a command."""
    return not COMMAND_NAME.fullmatch(name) or os.path.lexists(f"/{name}")


def describe_unknown(name: str, session: Session) -> str:
    """Return the answer to a command that does not exist; the model is not asked."""
    near = [f"`/{known}`" for known in get_close_matches(name.lower(), session.commands, cutoff=0.6)]
    meant = f"Did you mean {' or '.join(near)}?" if near else "`/help` lists the commands."
    return f"There is no command `/{name}`. {meant} To send this text to the model, put a space before the slash."


async def show_help(session: Session, words: str) -> str:
    lines = [f"- `/{c.name}{' ' + c.hint if c.hint else ''}`: {c.description}" for c in session.commands.values()]
    return "\n".join(lines)


async def show_prompt(session: Session, words: str) -> str:
    tools = session.toolbox.sent or session.toolbox.schemas()
    size = len(msgspec.json.encode(tools))
    of_tools = f"Tools: {len(tools)}, {size:,} characters, about {size // 4:,} tokens."
    sent = [entry.get("crow", {}) for entry in session.view.find_kind("render")]
    render = next((one for one in reversed(sent) if one.get("purpose") == "system"), None)
    if render is None:
        prompt = session.prompts.templates["system"]
        return f"System prompt: {prompt.name}, version {prompt.version}; nothing has been sent yet.\n\n{of_tools}"
    name, version, text = (render.get(key, "") for key in ("prompt", "version", "text"))
    about = f"{len(text):,} characters, about {len(text) // 4:,} tokens"
    return f"System prompt: {name}, version {version}, {about}.\n\n{of_tools}\n\n{to_code_block(text)}"


async def explain_worktree(session: Session, words: str) -> str:
    name = words or "NAME"
    return (
        f"A session stays in its folder, which is {session.cwd} here: in a terminal, `crow -w {name}` opens one in a "
        "worktree of its own, whose folder you can open in your editor, too."
    )


def to_code_block(text: str) -> str:
    """Convert a text to an indented Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def make_option_command(option: Option) -> Command:
    """Make the command that shows or changes an option."""

    async def run(session: Session, words: str) -> str:
        now = session.options.find(option.id)
        if now is None:
            return f"{session.model.name} has no {option.name.lower()} to choose."
        values = [choice.value for choice in now.choices]
        if not words:
            marks = [f"- {'**' + v + '**' if v == now.get() else v}" for v in values]
            return f"{option.name}:\n" + "\n".join(marks)
        if words not in values:
            return f"There is no {option.name.lower()} {words!r}. Choose one of: {', '.join(values)}."
        await session.options.choose(now, words)
        await session.announce_options()
        return f"{option.name} is now {words}."

    return Command(option.id, f"Show or choose the {option.name.lower()}", run, hint=f"[{option.id}]")
