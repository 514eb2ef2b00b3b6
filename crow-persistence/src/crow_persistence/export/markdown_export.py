"""Export a session as Markdown."""

import re

from crow_core.text import fence

from crow_persistence.export.transcript import Transcript, TranscriptPart, TranscriptToolCall, describe_media


def to_markdown(transcript: Transcript) -> str:
    """Return a Markdown document in which no content of the session breaks the layout."""
    facts = "\n".join(f"- {name}: {format_code(value)}" for name, value in transcript.facts())
    pieces = [piece for part in transcript.parts() for piece in format_part(part)]
    text = "\n\n".join([f"# {escape_line(transcript.summary.title or 'Session')}", facts, *pieces]) + "\n"
    return text.encode("utf-8", "replace").decode()  # an unpaired surrogate becomes a question mark


def format_part(part: TranscriptPart) -> list[str]:
    """Return the blocks of a part."""
    if part.who == "note":
        return [f"*{escape_line(part.title)}*", *([fence(part.text)] if part.text else [])]
    blocks = [f"## {'User' if part.who == 'user' else 'Assistant'}"]
    if part.thought:
        blocks.append(quote(f"Thought:\n\n{part.thought}"))
    if part.text.strip():
        blocks.append(quote_unclosed(part.text))
    blocks += [f"[{escape_line(describe_media(url))}]" for url in part.media]
    if part.cut:
        blocks.append(f"*Cut off: {escape_line(part.cut)}*")
    return blocks + [piece for tool_call in part.tool_calls for piece in format_tool_call(tool_call)]


def format_tool_call(tool_call: TranscriptToolCall) -> list[str]:
    """Return the blocks of a tool call."""
    blocks = [
        f"### {escape_line(tool_call.name)}: {format_code(tool_call.title)}{' (failed)' if tool_call.failed else ''}",
        fence(tool_call.arguments),
    ]
    if tool_call.decision:
        blocks.append(f"*{escape_line(tool_call.decision)}*")
    if tool_call.answer:
        blocks.append(fence(tool_call.answer))
    blocks += [f"[{escape_line(describe_media(url))}]" for url in tool_call.media]
    return blocks + [fence(diff).replace("\n", "diff\n", 1) for diff in tool_call.diffs]


def quote_unclosed(text: str) -> str:
    """Return a text, quoted if it has HTML or an unclosed fence that could swallow what follows."""
    fences = re.findall(r"(?m)^[ >]*(?:```+|~~~+)", text)
    return quote(text) if len(fences) % 2 or re.search(r"(?m)^[ >]*<[!?/A-Za-z]", text) else text


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def escape_line(text: str) -> str:
    """Return a text in one line, with Markdown escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(text.split()))


def format_code(text: str) -> str:
    """Return a text as one line of code that its content cannot end."""
    text = " ".join(text.split())
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
