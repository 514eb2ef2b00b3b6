"""Prompt the model every ten minutes, or at six o'clock, while a session is open: /every and /at."""

from typing import TYPE_CHECKING, Annotated

from crow_core.app import Crow
from crow_core.messages.message import Message
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from msgspec import Meta

if TYPE_CHECKING:
    from crow_extensions.timed_turns import TimedTurns

AboveZero = Annotated[float, Meta(gt=0)]

TURNS = StateKey["TimedTurns"]("timed turns")
"""The timers of a session, and the turns that they begin."""


def timers(
    crow: Crow, *, requests: AboveZero = 200, money: AboveZero | None = None, minutes: AboveZero | None = None
) -> None:
    """Prompt the model at times, while the session is open. Adds the commands /every and /at.

    A timer fires when no turn runs, never twice at once. It ends with the session, or when its turns have used so many
    `requests`, so much `money` or so many `minutes`.
    """
    limits = {"requests": requests, "money": money, "minutes": minutes}

    @crow.commands
    def commands(session: Session) -> list[Command]:
        return [
            Command("every", "Prompt again and again, while this session is open", every, hint="10m WORDS | off"),
            Command("at", "Prompt at a time of the day, while this session is open", at, hint="18:00 WORDS | off"),
        ]

    async def every(session: Session, text: str) -> str | Message:
        return find_turns(session).answer(text, "every")

    async def at(session: Session, text: str) -> str | Message:
        return find_turns(session).answer(text, "at")

    def find_turns(session: Session) -> "TimedTurns":
        from crow_extensions.timed_turns import TimedTurns  # imported here because few sessions have timers

        if TURNS not in session.state:
            session.state[TURNS] = TimedTurns(crow, session, limits)
        return session.state[TURNS]

    @crow.session_start
    def remind(session: Session) -> None:
        if not session.parent and session.view.find_kind("timers") and (ended := find_turns(session).read_ended()):
            sentence = f"Ended with the session: {', '.join(ended)}. Type it again, or /every off."
            session.options.remarks.append(sentence)

    @crow.session_end
    def stop(session: Session) -> None:
        if TURNS in session.state:
            session.state[TURNS].stop()
