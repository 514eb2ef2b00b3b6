"""Commands and sub-agents in the background: send what runs there, list it, stop it, and tell the model its end."""

from contextlib import suppress
from typing import Any

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import INVALID_PARAMS
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.app import Crow
from crow_core.messages.message import Message
from crow_core.models.model_call import ModelRequest
from crow_core.session.background_work import BACKGROUND, ContinuedWork, describe, find_lost, note_end, send, stop_all
from crow_core.session.session import Command, Session

LOOK = {"command": 'Call terminal with the session "{}"', "agent": 'Call agent with the name "{}"'}
"""How the model looks at work."""
BRING_BACK = "I brought this back from the background: {}. {}, and wait for its end."
ENDED = "This has ended in the background ({}): {}. {} for its output, if you need it."
LOST = "This ran in the background, and was stopped when the session was closed: {}."
SHOWN = 100
"""Items of a list that are shown."""


def background(crow: Crow) -> None:
    """Let the user send what runs to the background. Adds the command /background and the method `_crow/background`.

    The next request to the model tells it what has ended. The end of a session ends the work.
    """
    crow.methods[BACKGROUND_METHOD] = answer

    @crow.commands
    def command(session: Session) -> list[Command]:
        hint = "[NAME | stop NAME]"
        return [Command("background", "What runs in the background: list, bring back, stop", run, hint=hint)]

    @crow.session_start
    def remind(session: Session) -> None:
        if not session.parent and session.log.entries and (lost := find_lost(session)):
            session.state[BACKGROUND].lost = lost
            session.options.remarks.append(f"Stopped with the session: {', '.join(lost.values())}.")

    @crow.before_model
    def tell(request: ModelRequest, session: Session) -> ModelRequest | None:
        if BACKGROUND not in session.state or not (sentences := take_news(session)):
            return None
        message: Message = {"role": "user", "content": "\n".join(sentences), "crow": {"hidden": True}}
        session.log.append(message)
        return {**request, "messages": [request["messages"][0], *session.view.messages()]}

    @crow.session_end
    async def end(session: Session) -> None:
        if BACKGROUND in session.state and (stopped := await stop_all(session)):
            with suppress(ConnectionClosed):
                await session.notice(f"Stopped with the session: {', '.join(work.title for work in stopped)}.")


def take_news(session: Session) -> list[str]:
    """Return sentences for the model about work that has ended, once."""
    background = session.state[BACKGROUND]
    sentences = [LOST.format(title) for title in background.lost.values()]
    for call in background.lost:
        note_end(session, call, "stopped")
    background.lost = {}
    ended = [work for work in background.works if work.is_over]
    background.works = background.list_open()
    news = [work for work in ended if not work.running.is_told]
    return sentences + [ENDED.format(work.running.end, work.title, how_to_look(work)) for work in news]


def how_to_look(work: ContinuedWork) -> str:
    """Tell the model how it looks at work."""
    return LOOK[work.running.kind].format(work.running.name)


async def answer(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/background`. Raises RpcError."""
    background = session.state[BACKGROUND]
    sent: list[str] = []
    match params:
        case {"action": "send", **more}:
            sent = send(session, str(more.get("toolCallId") or ""))
        case {"action": "stop", **more}:
            await find_work(session, more.get("name")).running.kill()
        case {"action": "list"} | {"action": None}:
            pass
        case {"action": action}:
            actions = "list, send and stop"
            details = f"There is no action {str(action)[:40]!r}. The actions are {actions}."
            raise RpcError(INVALID_PARAMS, "Invalid params", details=details)
        case _:
            pass
    return {"sent": sent, "work": [describe(work, session.secrets) for work in background.works]}


def find_work(session: Session, name: Any) -> ContinuedWork:
    """Find work by its name. Raises RpcError."""
    background = session.state[BACKGROUND]
    if found := background.find(str(name)):
        return found
    raise RpcError(INVALID_PARAMS, "Invalid params", details=describe_unknown(session, str(name)))


def describe_unknown(session: Session, name: str) -> str:
    """Return the sentence for a name that no work has."""
    names = [work.running.name for work in session.state[BACKGROUND].works]
    known = f"There are: {', '.join(names)}." if names else "Nothing is there."
    return f"Nothing in the background has the name {name[:40]!r}. {known}"


async def run(session: Session, words: str) -> str | Message:
    """Run the command /background."""
    first, _, rest = words.partition(" ")
    if not words:
        return describe_list(session)
    name = rest.strip() if first == "stop" and rest.strip() else words
    if (work := session.state[BACKGROUND].find(name)) is None:
        return describe_unknown(session, name)
    if name != words:
        await work.running.kill()
        return f"Stopped: {work.title}."
    return {"role": "user", "content": BRING_BACK.format(work.title, how_to_look(work))}


def describe_list(session: Session) -> str:
    """Describe what is in the background as a list."""
    works = [describe(work, session.secrets) for work in session.state[BACKGROUND].works]
    lines = [
        f"- `{each['name']}` {each['title']} ({each['end'] or 'running'}){': ' if each['lastLine'] else ''}"
        f"{each['lastLine'][:SHOWN]}"
        for each in works
    ]
    return "\n".join(lines) if lines else "Nothing is in the background."
