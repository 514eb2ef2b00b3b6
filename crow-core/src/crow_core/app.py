"""What is configured, what is registered, who is in."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec

from crow_core.acp.schema import StopReason
from crow_core.bridge import Bridge
from crow_core.errors import EndTurn, ModelError, SessionBusy
from crow_core.mcp.server import Server
from crow_core.messages import INTERRUPTED, Message, answer_tool_call, find_unanswered
from crow_core.models.chat import ChatModel, Model
from crow_core.options import Choice, Option
from crow_core.prompts import Prompt
from crow_core.react import react
from crow_core.session import Client, Hooks, Session, new_id
from crow_core.store import Record
from crow_core.text import to_line

P = ParamSpec("P")
Method = Callable[[Session, dict[str, Any]], Any]
"""Takes the params, plain or async; gives what JSON holds. Raises RpcError."""

SERVERS_WAIT = 5.0


class Crow(Hooks):
    """An agent: its models, its extensions, its sessions. Several can live in one process."""

    def __init__(
        self,
        model: Model | Mapping[str, Model],
        *,
        servers: Sequence[Server] = (),
        system: Prompt | None = None,
        max_requests: int = 200,
    ) -> None:
        super().__init__()
        self.models: dict[str, Model] = dict(model) if isinstance(model, Mapping) else {model.name: model}
        """By the name a user picks; the first is the default."""
        self.servers = list(servers)
        """MCP servers shared by all sessions."""
        self.servers_wait = SERVERS_WAIT
        """Seconds the first prompt waits for MCP servers that are still starting; later tools join at a later turn."""
        self.prompts = {"system": system or Prompt.from_package("system")}
        """The templates by name; a session begins with a copy."""
        self.max_requests = max_requests
        self.methods: dict[str, Method] = {}
        """What a client may ask about a session beyond ACP, by name: `_crow/usage`."""
        self.sessions: dict[str, Session] = {}
        """Those that are open, by id."""
        self.endings: dict[str, asyncio.Task[None]] = {}
        """Those that were closed and have not come to their end."""
        self.options(self.model_option)

    def use(self, extension: "Callable[Concatenate[Crow, P], None]", *args: P.args, **options: P.kwargs) -> "Crow":
        """Let an extension register its hooks; the order of use is the order of the hooks."""
        extension(self, *args, **options)
        return self

    def model_option(self, session: Session) -> Option:
        """The choice of a model, as a session option."""

        def current() -> str:
            return next((name for name, model in session.models.items() if model is session.model), "")

        def choose(name: str) -> None:
            session.model = session.models[name]

        choices = [Choice(name, name, "" if name == m.name else m.name) for name, m in session.models.items()]
        return Option("model", "Model", "model", choices, current, choose)

    def models_or(self, models: Mapping[str, Model] | None) -> Mapping[str, Model]:
        """These models, or the app's. Raises ModelError when there is none at all."""
        if not (models or self.models):
            raise ModelError("No model is configured.")
        return models or self.models

    async def open(
        self,
        client: Client,
        cwd: str,
        *,
        roots: Sequence[str] = (),
        servers: Sequence[Server] = (),
        models: Mapping[str, Model] | None = None,
        record: Record | None = None,
    ) -> Session:
        """Start a session, or go on with a stored one. Its MCP servers start in the background; the first prompt waits
        for them. `models` take the place of the app's. Raises ModelError when there is none at all."""
        self.seal()
        models = self.models_or(models)
        id, prompts = record.id if record else new_id(), dict(self.prompts)
        session = Session(
            self, client, id, cwd, models, prompts, roots=[cwd, *roots], brought=servers, max_requests=self.max_requests
        )
        session.toolbox.host = Bridge(session)
        self.sessions[session.id] = session
        try:
            if record:
                session.recall(record)
            session.options = await self.options.run(session)
            for id, value in (record.options if record else {}).items():
                await session.restore(id, value)
            found = await self.commands.run(session)
            session.commands = {command.name: command for commands in found for command in commands}
            brought = [server for servers in await self.mcp_servers.run(session) for server in servers]
            for server in (own := [*brought, *servers]):
                if not (server.shared or server.hosts):  # else it works for another session, too
                    server.folder = session.scratch
            session.toolbox.add([*self.servers, *own])
            await self.session_start.run(session)
            for call in find_unanswered(session.log):
                session.append(answer_tool_call(call, INTERRUPTED, failed=True))
        except BaseException:
            await self.close(session)
            raise
        return session

    async def load(
        self,
        client: Client,
        id: str,
        cwd: str,
        *,
        roots: Sequence[str] = (),
        servers: Sequence[Server] = (),
        models: Mapping[str, Model] | None = None,
    ) -> Session | None:
        """Go on with a stored session; None when there is no such session. Raises StoreError."""
        if id in self.sessions:
            raise SessionBusy(f"Session {id} is open in this process. Close it there first, or fork it.")
        await self.ended(id)
        models = self.models_or(models)
        record = await self.load_session.run(id)
        return record and await self.open(client, cwd, roots=roots, servers=servers, models=models, record=record)

    async def fork(
        self,
        client: Client,
        id: str,
        cwd: str,
        *,
        at: str = "",
        roots: Sequence[str] = (),
        servers: Sequence[Server] = (),
        models: Mapping[str, Model] | None = None,
    ) -> Session | None:
        """Open a new session that goes on from a stored one, from its end or from the entry `at`; None when there is no
        such session. Raises StoreError."""
        if id in self.sessions:
            await self.sessions[id].written()
        await self.ended(id)
        models = self.models_or(models)
        record = await self.fork_session.run(id, new_id(), at)
        return record and await self.open(client, cwd, roots=roots, servers=servers, models=models, record=record)

    async def delete(self, id: str) -> None:
        """Forget a stored session, which is closed if it is open here. Raises StoreError."""
        if id in self.sessions:
            await self.close(self.sessions[id])
        await self.ended(id)
        await self.delete_session.run(id)

    async def prompt(self, session: Session, message: Message) -> StopReason:
        """Run a turn; prompts to a busy session wait their turn, first in, first out.

        Raises CancelledError, once the turn has ended, when the waiting task is cancelled; `cancel` is no error.
        """
        turn = asyncio.ensure_future(self.turn(session, message))
        session.turns.append(turn)
        try:
            await asyncio.wait([turn])
        except asyncio.CancelledError:
            stop(session, turn)
            await outlast(turn)
            raise
        finally:
            if turn in session.turns:  # cancelled before it began
                session.turns.remove(turn)
        return "cancelled" if turn.cancelled() else turn.result()

    async def turn(self, session: Session, message: Message) -> StopReason:
        """One prompt from the user's message to its stop reason."""
        session.known.set()
        async with session.lock:
            outcome: StopReason | Exception = "cancelled"
            try:
                await self.gather_tools(session)
                session.toolbox.warm()
                stop_reason = await react(session, await self.before_prompt.run(message, session))
                await session.written()
                outcome = stop_reason
            except EndTurn as end:
                outcome = stop_reason = end.stop_reason
                await session.flush()
                if end.text:
                    await session.say(end.text)
            except Exception as error:
                outcome = error
                await session.flush()
                raise
            finally:
                session.turns = [turn for turn in session.turns if turn is not asyncio.current_task()]
                await self.turn_end.run_all(session, outcome)
                await session.written()
            return stop_reason

    async def gather_tools(self, session: Session) -> None:
        """Take in the tools of servers that have come up, and say which have not."""
        first, session.fresh = session.fresh, False
        for server, changes in await session.toolbox.gather(self.servers_wait if first else 0):
            if server.error:
                await session.notice(server.error, "warning")
            elif changes:
                await session.notice(f"The tools of {to_line(server.name)!r} have changed ({changes}).")
            elif not first and server.source:
                await session.notice(f"The tools of {to_line(server.name)!r} have joined.")
            if server.warning:
                await session.notice(server.warning, "warning")
        schemas = await self.tools.run(session.toolbox.schemas(), session)
        if schemas != (session.tools or []):
            if first and session.tools is not None:
                await session.notice("The tools are not those of last time; the model will read everything anew.")
            session.tools = schemas
            session.append({"crow": {"kind": "tools", "schemas": schemas}})

    async def cancel(self, session: Session) -> None:
        """Cancel the running turn and those that wait for it; nothing running is fine."""
        for turn in session.turns:
            stop(session, turn)

    async def close(self, session: Session) -> None:
        """End a session: its work is cancelled, its servers stop. Who closes it once more waits for the same end."""
        if self.sessions.pop(session.id, None) is not None:
            self.endings[session.id] = asyncio.ensure_future(self.end(session))
        await self.ended(session.id)

    async def end(self, session: Session) -> None:
        await self.cancel(session)
        try:
            async with session.lock:
                try:
                    await self.session_end.run_all(session)
                finally:
                    await session.close()
        finally:
            del self.endings[session.id]

    async def ended(self, id: str) -> None:
        """Wait for a session that was closed; what comes next finds it stored and nobody's."""
        if ending := self.endings.get(id):
            await asyncio.shield(ending)

    async def shut_down(self) -> None:
        """End every session and let go of everything shared."""
        await asyncio.gather(*(self.close(session) for session in list(self.sessions.values())), *self.endings.values())
        await self.app_end.run_all()
        await asyncio.gather(*(server.close() for server in self.servers))
        for model in self.models.values():
            if isinstance(model, ChatModel):
                await model.close()


def stop(session: Session, turn: "asyncio.Task[StopReason]") -> None:
    """Cancel a turn, once: a second time would break into its clean-up."""
    if turn in session.turns and not turn.cancelling():
        turn.cancel()


async def outlast(turn: "asyncio.Task[StopReason]") -> None:
    """Wait for the end of a cancelled turn, however often whoever waits is cancelled."""
    while not turn.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([turn])
    if not turn.cancelled():
        turn.exception()  # nobody is left to hear it
