"""A session as Markdown."""

import re

from crow_core.text import fence

from crow_persistence.export.transcript import Part, Story, Use, caption


def markdown(story: Story) -> str:
    """A document that every reader of Markdown shows as it is meant, whatever was said in it."""
    facts = "\n".join(f"- {name}: {code(value)}" for name, value in story.facts())
    told = [piece for part in story.parts() for piece in pieces(part)]
    text = "\n\n".join([f"# {line(story.summary.title or 'Session')}", facts, *told]) + "\n"
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair becomes a question mark


def pieces(part: Part) -> list[str]:
    if part.who == "note":
        return [f"*{line(part.title)}*", *([fence(part.text)] if part.text else [])]
    said = [f"## {'User' if part.who == 'user' else 'Assistant'}"]
    if part.thought:
        said.append(quoted(f"Thought:\n\n{part.thought}"))
    if part.text.strip():
        said.append(enclosed(part.text))
    said += [f"[{line(caption(url))}]" for url in part.media]
    if part.cut:
        said.append(f"*Broke off: {line(part.cut)}*")
    return said + [piece for use in part.uses for piece in tool(use)]


def tool(use: Use) -> list[str]:
    said = [f"### {line(use.name)}: {code(use.title)}{' (failed)' if use.failed else ''}", fence(use.arguments)]
    if use.decision:
        said.append(f"*{line(use.decision)}*")
    if use.answer:
        said.append(fence(use.answer))
    said += [f"[{line(caption(url))}]" for url in use.media]
    return said + [fence(diff).replace("\n", "diff\n", 1) for diff in use.diffs]


def enclosed(text: str) -> str:
    """What was said, as it is; quoted where it could run on into what follows: a fence or HTML that is not closed."""
    fences = re.findall(r"(?m)^[ >]*(?:```+|~~~+)", text)
    return quoted(text) if len(fences) % 2 or re.search(r"(?m)^[ >]*<[!?/A-Za-z]", text) else text


def quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def line(text: str) -> str:
    """Text of one line in which nothing is Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """One line of code that its own content cannot close."""
    text = " ".join(text.split())
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
