"""The commands of the user as the agent is told of them, before a prompt. Pure."""

import re

TOLD = re.compile(
    r"I ran this command(?:, which ended with exit code (?P<code>-?\d+))?:\n\n"
    r"(?P<marks>`{3,})\n\$ (?P<command>[^\n]*)\n(?P<output>.*?)\n(?P=marks)\s*",
    re.S,
)
MAX_OUTPUT = 20_000
"""Characters of a command's output that the agent is told: the last ones."""


def describe_output(command: str, output: str, code: int | None) -> str:
    """Tell the agent of a command that the user ran."""
    text = output[-MAX_OUTPUT:].rstrip()
    end = f", which ended with exit code {code}" if code else ""
    marks = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
    return f"I ran this command{end}:\n\n{marks}\n$ {command}\n{text}\n{marks}\n\n"


def split_outputs(text: str) -> tuple[list[tuple[str, str, int | None]], str]:
    """Split a prompt into the commands, outputs and exit codes that the agent was told of before it, and the rest."""
    told: list[tuple[str, str, int | None]] = []
    while found := TOLD.match(text):
        told.append((found["command"], found["output"], int(found["code"] or 0)))
        text = text[found.end() :]
    return told, text
