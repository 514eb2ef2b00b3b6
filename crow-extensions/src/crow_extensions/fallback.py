"""Go on with another model when one has no quota left, is overloaded, or cannot be reached."""

from collections.abc import Mapping, Sequence
from time import monotonic

from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages.message import Message
from crow_core.messages.notes import Notes
from crow_core.session.session import Session
from crow_core.session_state import StateKey

WAIT = 300.0
"""Seconds for which a model that failed is left alone, unless its endpoint asks for more."""

CHOSEN = StateKey[str]("fallback chosen", str)
"""The name of the model in whose place another one answers; empty if none does."""
FAILED = StateKey[set[str]]("fallback failed", set)
"""The names of the models that failed in this turn."""


class FallbackNotes(Notes, total=False):
    """Another model answers from here on, because one failed, or because it is asked again."""

    instead: str
    """The name of the model before; `model` is that of the model that answers."""
    why: str
    """The sentence for the user."""


def fallback(crow: Crow, *, chains: Mapping[str, Sequence[str]], wait: float = WAIT) -> None:
    """Send a request to the next of `chains[NAME]` when the model NAME fails, and return to NAME after `wait` seconds.

    A refusal of the request does not count: another model would be asked what this one did not accept. Each change is
    said, and a marker in the log keeps it. The session's option still names the model that answers.
    """
    down: dict[str, float] = {}
    """The time, of the monotonic clock, at which each model that failed is asked again."""

    def get_name(session: Session) -> str:
        option = session.options.find("model")
        return option.get() if option else ""

    def is_down(name: str) -> bool:
        return down.get(name, 0.0) > monotonic()

    async def change(session: Session, name: str, why: str) -> None:
        """Let another model answer, and tell the user why."""
        before, session.model = get_name(session), session.models[name]
        notes: FallbackNotes = {"kind": "fallback", "model": name, "instead": before, "why": why}
        session.log.append({"crow": notes})
        await session.notice(why, "warning")
        await session.options.collect()
        await session.announce_options()

    def find_next(session: Session, chosen: str) -> str:
        names = [
            name for name in chains.get(chosen, ()) if name in session.models and name not in session.state[FAILED]
        ]
        return next((name for name in names if not is_down(name)), names[0] if names else "")

    @crow.before_prompt
    async def choose(message: Message, session: Session) -> None:
        if message.get("crow", {}).get("steer"):
            return
        session.state[FAILED] = set()
        chosen, name = session.state[CHOSEN], get_name(session)
        if chosen and name not in chains.get(chosen, ()):  # the user has chosen another model since
            chosen = session.state[CHOSEN] = ""
        if chosen and not is_down(chosen):
            session.state[CHOSEN] = ""
            await change(session, chosen, f"{chosen} is asked again.")
        elif not chosen and is_down(name) and (other := find_next(session, name)):
            session.state[CHOSEN] = name
            await change(session, other, f"{name} has just failed in another session. {other} answers now.")

    @crow.message
    def obey(session: Session, entry: Message) -> None:
        notes = entry.get("crow", {})
        if notes.get("kind") == "option" and notes.get("option") == "model":
            down.pop(notes.get("value", ""), None)  # the user wants it asked

    @crow.model_error
    async def go_on(session: Session, error: ModelError) -> bool | None:
        name = get_name(session)
        chosen = session.state[CHOSEN] or name
        if not (error.may_pass or error.unavailable) or chosen not in chains:
            return None
        session.state[FAILED].add(name)
        down[name] = monotonic() + max(wait, error.retry_after or 0.0)
        if other := find_next(session, chosen):
            session.state[CHOSEN] = chosen
            await change(session, other, f"{error} {other} answers now.")
            return True
        session.state[CHOSEN] = ""
        if name != chosen:
            await change(session, chosen, f"{chosen} and its fallbacks failed.")
        return None
