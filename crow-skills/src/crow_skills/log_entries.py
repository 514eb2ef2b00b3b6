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
    entries = session.view.select()
    start = max((at for at, entry in enumerate(entries) if marker_kind(entry) in ends), default=0)
    renders = (entry.get("crow", {}) for entry in entries[start:] if marker_kind(entry) == "render")
    return {str(render.get("variables", {}).get(key)) for render in renders if render.get("purpose") == purpose}
