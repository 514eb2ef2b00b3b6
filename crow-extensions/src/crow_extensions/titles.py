"""Name sessions after the first words of their first prompt; clients list sessions by these names."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import make_title
from crow_core.session.session import Session


def titles(crow: Crow) -> None:
    """Give a session without a title one of at most 60 characters when a turn has ended without an error."""

    @crow.before_end  # so that the title is written with the reply
    @crow.turn_end
    async def name(session: Session, outcome: StopReason | Exception) -> None:
        if session.log.title or isinstance(outcome, Exception):
            return
        if title := make_title(session.log):
            await session.set_title(title)
