"""Read messages and log entries: the text of a user, and the prompts that were rendered for the model."""

from crow_core.acp.schema import TextBlock
from crow_core.content import to_blocks
from crow_core.messages.message import Message, marker_kind
from crow_core.session.session import Session


def get_user_text(message: Message) -> str:
    """Return the text that the user typed, followed by the text of the command that it called, if any."""
    typed = [block.text for block in to_blocks(message) if isinstance(block, TextBlock)]
    return "\n\n".join([*typed, message.get("crow", {}).get("command", "")])


def find_rendered(session: Session, purpose: str, key: str, *ends: str) -> set[str]:
    """Return the values of the variable `key` in the prompts rendered for `purpose` that the model still reads.

    Skip the renders that were rewound or compacted, and those before the last marker of a kind in `ends`.
    """
    found: set[str] = set()
    for entry in reversed(session.view.select()):
        notes, kind = entry.get("crow", {}), marker_kind(entry)
        if kind in ends:
            break
        if kind == "render" and notes.get("purpose") == purpose:
            found.add(str(notes.get("variables", {}).get(key)))
    return found
