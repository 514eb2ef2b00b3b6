"""Name sessions after the first words of their first prompt; clients list sessions by these names."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import find_first_text
from crow_core.session.session import Session
from crow_core.text import to_line


def titles(crow: Crow) -> None:
    """Give a session without a title one of at most 60 characters when a turn has ended without an error."""

    @crow.before_end  # so that the title is written with the reply
    @crow.turn_end
    async def name(session: Session, outcome: StopReason | Exception) -> None:
        if session.log.title or isinstance(outcome, Exception):
            return
        first = next((find_first_text(m) for m in session.log if m.get("role") == "user"), "")
        words = to_line(" ".join(first.split()))
        if words:
            await session.set_title(words if len(words) <= 60 else f"{words[:59].rstrip()}…")
