"""The agent's side of a connection inside this process: its client chooses ids of sessions, and gives prompts keys."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from crow_core.acp.schema import NewSessionRequest, PromptRequest
from crow_core.agent.acp_agent import AcpAgent
from crow_core.agent.app_source import Announced
from crow_core.agent.request_params import check_id
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.messages.message import Message, get_id
from crow_core.session.session import Session
from crow_core.session.user import Client


class InProcessAgent(AcpAgent):
    """An ACP agent for a client that is a part of this process.

    `_meta.crow` of a request may have `sessionId` and `origin` for a new session, and a `key` for a prompt.
    """

    max_sessions = None

    def list_own_abilities(self, announced: Announced) -> dict[str, Any]:
        return {**super().list_own_abilities(announced), "keys": True}

    def read_prompt(self, params: PromptRequest, crow: Crow) -> Message:
        message = super().read_prompt(params, crow)
        if key := get_notes(params).get("key"):
            message.setdefault("crow", {})["key"] = key
        return message

    async def open_new_session(self, params: NewSessionRequest, crow: Crow, cwd: str) -> Session:
        notes = get_notes(params)
        if not (id := notes.get("sessionId")):
            return await super().open_new_session(params, crow, cwd)
        if before := self.sessions.pop(id, None):  # its client was cancelled before it had the answer
            await crow.close(before)
        opener = partial(load_or_open, crow, origin=notes.get("origin"))
        return await self.open_session(opener, self, check_id(id), cwd, params=params, id=id)


def get_notes(params: NewSessionRequest | PromptRequest) -> dict[str, Any]:
    """Return `_meta.crow` of a request; empty if it has none."""
    match params.meta:
        case {"crow": {**notes}}:
            return notes
        case _:
            return {}


async def load_or_open(
    crow: Crow, client: Client, id: str, cwd: str, *, origin: Mapping[str, Any] | None = None, **more: Any
) -> Session:
    """Open the stored session with this id, or a new one, so that an interrupted turn with a key can go on.

    A new one is stored at once, so that no other process can take the id. With `origin`, it continues another session:
    `session` is its id. A turn whose key begins with one of `prefixes` is dropped unless it is in `keys`. `more` are
    the other arguments of `Crow.open`. Raises StoreError.
    """
    if session := await crow.load(client, id, cwd, **more):
        return drop_later_turns(session, origin) if origin else session
    if origin and (session := await crow.fork(client, origin["session"], cwd, new=id, **more)):
        return drop_later_turns(session, origin)
    session = await crow.open(client, cwd, id=id, **more)
    try:
        session.log.append({"crow": {"kind": "opened"}})
        await session.log.written()
    except StoreError:
        await crow.close(session)
        if session := await crow.load(client, id, cwd, **more):  # another process was faster
            return session
        raise
    except BaseException:
        await crow.close(session)
        raise
    return session


def drop_later_turns(session: Session, origin: Mapping[str, Any]) -> Session:
    """Drop the first turn of a session's origin that is not kept, and all that follows it. Return the session."""
    prefixes: Sequence[str] = origin["prefixes"]
    entries = session.view.entries()
    for at, entry in enumerate(entries):
        key = str(entry.get("crow", {}).get("key", ""))
        if key.startswith(tuple(prefixes)) and key not in origin["keys"]:
            session.rewind(get_id(entries[at - 1]) if at else "")
            break
    return session
