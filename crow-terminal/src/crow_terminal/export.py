"""Write what was shown to a Markdown file."""

from collections.abc import Sequence
from pathlib import Path

from crow_core.acp.schema import DiffContent

from crow_terminal.blocks import (
    AnsweredQuestion,
    Block,
    Call,
    CommandOutput,
    Note,
    Plan,
    UserPrompt,
    find_diffs,
    find_output,
)
from crow_terminal.markdown import CodeLines, Prose
from crow_terminal.paint import compare


def write_export(folder: str, name: str, blocks: Sequence[Block], title: str) -> Path:
    """Write blocks to a new file and return its path. Raises OSError, also if the file exists."""
    path = Path(folder, name).expanduser()
    with path.open("x", encoding="utf-8", errors="replace") as file:
        file.write(to_markdown(blocks, title))
    return path


def to_markdown(blocks: Sequence[Block], title: str) -> str:
    parts = [f"# {title}\n"] if title else []
    for block in blocks:
        match block:
            case UserPrompt(text=text):
                parts.append("\n---\n\n" + "\n".join(f"> {line}" for line in text.split("\n")) + "\n")
            case Prose(text=text):
                margin = " " * block.indent
                text = "\n".join(margin + line for line in text.split("\n"))
                parts.append(("" if block.joined else "\n") + (f"_{text.strip()}_" if block.thought else text) + "\n")
            case CodeLines(lines=lines):
                parts.append(fence("\n".join(lines), block.language))
            case Call(call=call):
                parts.append(f"\n**{call.title}**\n")
                parts += [fence(format_diff(diff), "diff") for diff in find_diffs(call)]
                if output := find_output(call):
                    parts.append(fence(output, ""))
            case Plan(entries=entries):
                parts += [f"- [{'x' if one.status == 'completed' else ' '}] {one.content}\n" for one in entries]
            case Note(text=text):
                parts.append(f"\n_{text}_\n")
            case CommandOutput(command=command, output=output):
                parts.append(fence(f"$ {command}\n{output.rstrip()}", ""))
            case AnsweredQuestion(written=written):
                parts.append(f"\n_{block.title}: {block.answer}{f': {written}' if written else ''}_\n")
    return "".join(parts).lstrip("\n")


def format_diff(diff: DiffContent) -> str:
    """Return a change as lines that begin with their marks."""
    return "\n".join([diff.path, *(f"{mark}{text}" for mark, _, text in compare(diff.old_text or "", diff.new_text))])


def fence(text: str, language: str) -> str:
    """Return a text as a code block that it cannot close."""
    marks = "```"
    while marks in text:
        marks += "`"
    return f"\n{marks}{language}\n{text}\n{marks}\n"
