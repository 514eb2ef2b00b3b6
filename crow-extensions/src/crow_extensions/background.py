"""Commands and sub-agents in the background: send what runs there, list it, stop it, and tell the model its end."""

from contextlib import suppress
from typing import Any

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import INVALID_PARAMS
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.app import Crow
from crow_core.masking import mask
from crow_core.messages.message import Message
from crow_core.models.model_call import ModelRequest
from crow_core.session.background_work import (
    BACKGROUND,
    LINE_LENGTH,
    RunningWork,
    find_lost,
    list_all,
    note_end,
    send,
    stop_all,
    to_title,
)
from crow_core.session.session import Command, Session
from crow_core.text import to_line

LOOK = {"command": 'Call terminal with the session "{}"', "agent": 'Call agent with the name "{}"'}
"""The ways in which the model looks at work."""
BRING_BACK = "I brought this back from the background: {}. {}, and wait for its end."
ENDED = "This has ended in the background ({}): {}. {} for its output, if you need it."
LOST = "This ran in the background, and was stopped when the session was closed: {}."
REOPEN = "Its session is {}. /background {} WORDS goes on with it."
SHOWN = 100
"""Characters of a last line in the list."""


def background(crow: Crow) -> None:
    """Let the user send what runs to the background. Adds the command /background and the method `_crow/background`.

    The next request to the model tells it what has ended. The end of a session ends the work.
    """
    crow.methods[BACKGROUND_METHOD] = answer

    @crow.commands
    def command(session: Session) -> list[Command]:
        hint = "[NAME | NAME words | stop NAME]"
        return [
            Command(
                "background", "What runs in the background, and sub-agents: list, bring back, tell, stop", run, hint
            )
        ]

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
    return sentences + [ENDED.format(work.running.end, work.title, how_to_look(work.running)) for work in news]


def how_to_look(running: RunningWork) -> str:
    """Tell the model how it looks at work."""
    return LOOK[running.kind].format(running.name)


async def answer(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/background`. Raises RpcError."""
    name = str(params.get("name") or "")
    done: dict[str, Any] = {}
    match params.get("action") or "list":
        case "list":
            pass
        case "send":
            done["sent"] = send(session, str(params.get("toolCallId") or ""))
        case "stop":
            done["said"] = await stop(session, find(session, name))
        case "tell":
            done["said"] = await tell(session, name, str(params.get("text") or ""))
        case action:
            raise invalid(f"There is no action {str(action)[:40]!r}. The actions are list, send, stop and tell.")
    return {**done, "work": list_all(session)}


def invalid(details: str) -> RpcError:
    """Make the error for wrong params."""
    return RpcError(INVALID_PARAMS, "Invalid params", details=details)


def find(session: Session, name: str) -> RunningWork:
    """Find work, or a sub-agent, by its name. Raises RpcError."""
    if found := session.state[BACKGROUND].find(name):
        return found
    names = [str(each["name"]) for each in list_all(session)]
    known = f"There are: {', '.join(names)}." if names else "Nothing is there."
    fault = f"Nothing in the background has the name {name[:40]!r}." if name else "Say which one."
    raise invalid(f"{fault} {known}")


def find_only(session: Session) -> str:
    """Return the name of the work in the background if there is only one; else ""."""
    names = [work.running.name for work in session.state[BACKGROUND].list_open()]
    return names[0] if len(names) == 1 else ""


async def stop(session: Session, running: RunningWork) -> str:
    """Stop work. Return a sentence for the user."""
    if running.over.is_set():
        return f"It has ended already: {to_title(session, running)}."
    for work in session.state[BACKGROUND].works:
        work.is_stopped |= work.running is running
    await running.kill()
    return f"Stopped: {to_title(session, running)}."


async def tell(session: Session, name: str, words: str) -> str:
    """Give words to a sub-agent. Return a sentence for the user. Raises RpcError."""
    found = find(session, name)
    if (agent := session.state[BACKGROUND].agents.get(name)) is None or found is not agent:
        raise invalid(f"{name!r} is a command, which takes no words. /background stop {name} ends it.")
    if not words.strip():
        raise invalid(f"There are no words for {name!r}.")
    return await agent.tell(words)


async def run(session: Session, text: str) -> str | Message:
    """Run the command /background."""
    first, _, rest = text.partition(" ")
    try:
        match first, rest.strip():
            case "", _:
                return describe_list(session)
            case "stop", name:
                return await stop(session, find(session, name or find_only(session)))
            case name, "":
                return show(session, find(session, name))
            case name, words:
                return await tell(session, name, words)
    except RpcError as error:
        return error.details or ""


def show(session: Session, running: RunningWork) -> str | Message:
    """Bring work back: return the message by which the model waits for it. An agent that has reported is shown."""
    title, agent = to_title(session, running), session.state[BACKGROUND].agents.get(running.name)
    if agent is None or agent is not running or not running.is_told:
        return {"role": "user", "content": BRING_BACK.format(title, how_to_look(running))}
    line = to_line(mask(agent.get_last_line(LINE_LENGTH), session.secrets))
    lines = [f"{running.name}: {title} ({running.end})", line, REOPEN.format(agent.session_id, running.name)]
    return "\n\n".join(filter(None, lines))


def describe_list(session: Session) -> str:
    """Describe as a list the work in the background, and the sub-agents."""
    lines = [
        f"- `{each['name']}` {each['title']} ({each['end'] or 'running'})"
        f"{': ' if each['lastLine'] else ''}{each['lastLine'][:SHOWN]}"
        for each in list_all(session)
    ]
    return "\n".join(lines) if lines else "Nothing is in the background."
