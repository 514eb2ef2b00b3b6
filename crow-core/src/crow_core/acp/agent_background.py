"""Work in the background of an agent of ACP version 2, as crow's own agent tells it to a client of version 1.

Version 2 lists the work in each `state_update`, and lets a client cancel each piece of it.
"""

from collections.abc import Sequence
from typing import Any

from crow_core.acp import schema, schema_v2
from crow_core.acp.connection import Connection
from crow_core.acp.to_v1 import SessionObjects

NO_WORDS = "This agent takes no words for what runs in the background."


class AgentBackground:
    """The work in the background of one session."""

    def __init__(self, session_id: str, objects: SessionObjects) -> None:
        self._session_id, self._objects = session_id, objects
        self.works: Sequence[schema_v2.BackgroundWork] = ()
        self._names: dict[str, str] = {}
        """The names of the work for the user, by the ids of its terminals and tool calls."""

    def take(self, state: schema_v2.StateUpdate) -> schema.SessionInfoUpdate | None:
        """Take what runs now. Return the update that tells a client of version 1; None if nothing has changed."""
        before, self.works = self.works, state.background or []
        if [*before] == [*self.works]:
            return None
        return schema.SessionInfoUpdate(meta={"crow": {"background": [self._find_title(work) for work in self.works]}})

    async def answer(self, connection: Connection, params: dict[str, Any]) -> dict[str, Any]:
        """Answer `_crow/background` for an agent that does not: list the work, or stop a piece. Raises RpcError."""
        said = {"tell": NO_WORDS}.get(str(params.get("action")), "")
        if params.get("action") == "stop":
            said = await self._stop(connection, str(params.get("name")))
        return {"sent": [], "work": [*map(self._describe, self.works)], **({"said": said} if said else {})}

    async def _stop(self, connection: Connection, name: str) -> str:
        work = next((one for one in self.works if self._find_name(one) == name), None)
        if work is None:
            return f"Nothing in the background has the name {name!r}. /background lists it."
        if work.type == "terminal":
            request = schema_v2.CancelTerminalRequest(session_id=self._session_id, terminal_id=str(work.terminal_id))
            await connection.request("terminal/cancel", request)
        else:
            call = schema_v2.CancelToolCallRequest(session_id=self._session_id, tool_call_id=str(work.tool_call_id))
            await connection.request("tool_call/cancel", call)
        return f"{self._find_title(work)} is being stopped."

    def _find_name(self, work: schema_v2.BackgroundWork) -> str:
        """Return the number of a piece of work, which stays the same."""
        return self._names.setdefault(str(work.terminal_id or work.tool_call_id), str(len(self._names) + 1))

    def _find_title(self, work: schema_v2.BackgroundWork) -> str:
        if work.type == "terminal" and (found := self._objects.terminals.get(str(work.terminal_id))):
            return found.command or self._objects.titles.get(found.tool_call_id, "") or "A command"
        return self._objects.titles.get(str(work.tool_call_id), "") or "A tool call"

    def _describe(self, work: schema_v2.BackgroundWork) -> dict[str, Any]:
        """Describe a piece of work as `_crow/background` does."""
        terminal = self._objects.terminals.get(str(work.terminal_id))
        output = terminal.output.decode(errors="replace") if terminal else ""
        return {
            "name": self._find_name(work),
            "kind": "command" if work.type == "terminal" else "agent",
            "title": self._find_title(work),
            "toolCallId": terminal.tool_call_id if terminal else str(work.tool_call_id),
            "state": "running",
            "end": "",
            "lastLine": output.rstrip().rpartition("\n")[2],
        }
