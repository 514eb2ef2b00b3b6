"""The app: its configuration, its extensions and its open sessions."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import StopReason
from crow_core.errors import EndTurn, ModelError, SessionBusy
from crow_core.keyed_turns import finish_tasks, go_on, show_ended
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model
from crow_core.react import react
from crow_core.session.bridge import Bridge
from crow_core.session.folders import Folders
from crow_core.session.log import new_id
from crow_core.session.options import Choice, Option
from crow_core.session.output import STOPPED, TURN_NOTES
from crow_core.session.prompts import Prompt
from crow_core.session.session import Hooks, Session
from crow_core.session.store import Record, SessionChange, Store, Summary, restore
from crow_core.session.user import Client, GoesOn
from crow_core.text import to_line

P = ParamSpec("P")
Method = Callable[[Session, dict[str, Any]], Any]
"""A function, plain or async, that takes the params and returns a JSON value. Raises RpcError."""

SERVERS_WAIT = 5.0
"""Seconds from the start of an MCP server for which prompts wait for its tools, unless the app says otherwise."""
CANCEL_LIMIT = 0.4
"""Seconds that a cancelled turn waits for a store that does not answer, as on a frozen disk. The store goes on, and the
next turn waits for it, or fails with its error."""
UNPROMPTED_LIMIT = 1_000
"""Closed sessions without a message that an app remembers."""
CHANGES_LIMIT = 300
"""Characters of a notice about changed tools."""


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
        self.models: dict[str, Model] = dict(model) if isinstance(model, Mapping) else {model.name: model}
        """By the name that the user chooses; the first is the default."""
        self.servers = list(servers)
        """MCP servers that all sessions share; other apps in this process may use them, too."""
        self.servers_wait = SERVERS_WAIT
        """Seconds for which prompts wait for the tools of an MCP server, from the start of its process or connection.
        The tools of a server that takes longer join at the start of a later turn. A server that the client names is
        waited for until it is ready or has failed."""
        self.prompts = {"system": system or Prompt.from_package("system")}
        """The templates by name; each session starts with a copy."""
        self.max_requests = max_requests
        """The most model calls that one turn may make."""
        self.store: Store | None = None
        """Keeps the sessions; without one, they end with the process. Set it before the first session opens."""
        self.methods: dict[str, Method] = {}
        """Methods beyond ACP that a client may call for a session, by name, such as `_crow/usage`."""
        self.takes_output_schema = False
        """True if an extension lets a turn end with a result that fits a JSON schema, which comes with the prompt."""
        self.takes_permission_answers = False
        """True if an extension reads what a client adds to its answer to a permission request: a reason, a command."""
        self.sessions: dict[str, Session] = {}
        """The open sessions, by id."""
        self.closing: dict[str, asyncio.Task[None]] = {}
        """The sessions that are being closed, by id."""
        self.unprompted: deque[str] = deque(maxlen=UNPROMPTED_LIMIT)
        """The ids of closed sessions that had no message yet, so that they were not stored."""
        self.options(self.model_option)
        self.turn_end(fail_announced)

    def use(self, extension: "Callable[Concatenate[Crow, P], None]", *args: P.args, **options: P.kwargs) -> "Crow":
        """Let an extension register its functions; hooks call them in the order of use."""
        extension(self, *args, **options)
        return self

    def model_option(self, session: Session) -> Option:
        """Make the session option that chooses the model."""

        def current() -> str:
            return next((name for name, model in session.models.items() if model is session.model), "")

        def choose(name: str) -> None:
            session.model = session.models[name]

        choices = [Choice(name, name, "" if name == m.name else m.name) for name, m in session.models.items()]
        return Option("model", "Model", "model", choices, current, choose)

    def models_or_own(self, models: Mapping[str, Model] | None) -> Mapping[str, Model]:
        """Return these models, or the app's. Raises ModelError if there are none."""
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
        id: str = "",
        parent: Session | None = None,
    ) -> Session:
        """Open a session, new or from the `record` of a stored one.

        Its MCP servers start in the background; the first prompt waits for them. `models` replace the app's. `id` is
        that of a new session; by default one is made. `parent` is the session that a sub-agent works for. Raises
        ModelError if there are no models.
        """
        self.seal()
        session = Session(
            self,
            client,
            record.id if record else id or new_id(),
            Folders(cwd, [cwd, *roots]),
            self.models_or_own(models),
            self.prompts,
            max_requests=self.max_requests,
            parent=parent,
        )
        if self.store is not None:
            session.log.on_draft = partial(self.store.write_draft, session)
            session.log.on_flush = partial(self.store.flush, session)
        session.toolbox.host = Bridge(session)
        session.toolbox.client_servers = servers
        self.sessions[session.id] = session
        try:
            if record:
                restore(session, record)
            await session.options.collect()
            for option_id, value in (record.options if record else {}).items():
                await session.options.restore(option_id, value)
            commands = [command for more in await self.commands.run(session) for command in more]
            session.commands = {command.name: command for command in commands}
            own = [*(server for more in await self.mcp_servers.run(session) for server in more), *servers]
            session.toolbox.add([*self.servers, *own])
            await self.session_start.run(session)
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
        """Open a stored session, or one that this app has closed before its first prompt; None if there is neither.

        Raises StoreError.
        """
        self._check_closed(id)
        await self.closed(id)
        models = self.models_or_own(models)
        record = await self.store.load(id) if self.store else None
        self._check_closed(id)  # again: another client may have opened it meanwhile
        if record is None and id not in self.unprompted:
            return None
        return await self.open(client, cwd, roots=roots, servers=servers, models=models, record=record, id=id)

    async def fork(
        self,
        client: Client,
        id: str,
        cwd: str,
        *,
        at: str = "",
        new: str = "",
        roots: Sequence[str] = (),
        servers: Sequence[Server] = (),
        models: Mapping[str, Model] | None = None,
    ) -> Session | None:
        """Open a new session that continues a stored one, from its end or from the entry with the id `at`.

        `new` is the id of the new one; by default one is made. None if there is no such session. Raises StoreError.
        """
        if id in self.sessions:
            await self.sessions[id].log.written()
        await self.closed(id)
        models = self.models_or_own(models)
        if self.store is None or (record := await self.store.fork(id, new or new_id(), at)) is None:
            return None
        return await self.open(client, cwd, roots=roots, servers=servers, models=models, record=record)

    async def delete(self, id: str) -> None:
        """Delete a stored session, after closing it if it is open here. Raises StoreError."""
        if id in self.sessions:
            await self.close(self.sessions[id])
        await self.closed(id)
        with suppress(ValueError):
            self.unprompted.remove(id)
        if self.store is not None:
            await self.store.delete(id)

    async def archive(self, id: str) -> bool:
        """Take a stored session out of the lists, after closing it if it is open here.

        Return False if there is no such session. Raises StoreError.
        """
        if id in self.sessions:
            await self.close(self.sessions[id])
        await self.closed(id)
        return await self.change(id, SessionChange(archived=True))

    async def find(self, id: str) -> Summary | None:
        """Return a stored session as a list shows it; None if there is none. Raises StoreError."""
        return None if self.store is None else await self.store.find(id)

    async def change(self, id: str, change: SessionChange) -> bool:
        """Change a stored session that is closed here. Return False if there is no such session. Raises StoreError."""
        return self.store is not None and await self.store.change(id, change) is not None

    async def set_title(self, id: str, title: str) -> bool:
        """Give a session a title and store it. Return False if there is no such session. Raises StoreError."""
        if session := self.sessions.get(id):
            await session.set_title(title)
            await session.log.written()
            return True
        await self.closed(id)
        return await self.change(id, SessionChange(title=title))

    async def prompt(self, session: Session, message: Message, goes_on: GoesOn | None = None) -> StopReason:
        """Run a turn. The prompts to one session run one after the other, first in, first out.

        Returns "cancelled" after `cancel`. If the waiting task itself is cancelled, raises CancelledError once the turn
        has ended. If `goes_on` returns True for the turn's task, it raises that at once, and the turn goes on.

        A message may have a key of the caller's, its note `key`. Its turn can be interrupted, also by the end of the
        process. The same prompt with the same key continues the turn. Once it has ended, the prompt returns its
        result. Raises PromptError if the key belongs to another prompt of the session.
        """
        turn = asyncio.ensure_future(self.run_turn(session, message))
        session.turns.tasks.append(turn)
        try:
            await asyncio.wait([turn])
        except asyncio.CancelledError:
            if goes_on is None or not goes_on(turn):
                cancel_turn(session, turn)
                await wait_for_end(turn)
            raise
        finally:
            if turn.done() and turn in session.turns.tasks:  # cancelled before it started
                session.turns.tasks.remove(turn)
            session.turns.cancelled.discard(turn)
        return "cancelled" if turn.cancelled() else turn.result()

    async def run_turn(self, session: Session, message: Message) -> StopReason:
        """Run one turn, from the user's message to its stop reason; or go on with the one that it has begun before."""
        turns, journal = session.turns, session.journal
        turns.id_known.set()
        async with turns.lock:
            outcome: StopReason | Exception = "cancelled"
            reporting: asyncio.Task[None] | None = None
            if (turn := journal.find(message)) and turn.end:
                return await show_ended(session, turn, turn.end)
            try:
                turns.message, turns.requests = message, 0
                journal.begin(message, turn)
                await self.update_tools(session)
                reporting = asyncio.ensure_future(self.report_failures(session))
                session.toolbox.preload()
                if not turn:
                    await finish_tasks(session)
                    session.log.append(journal.sign(await self.before_prompt.run(message, session)))
                stop_reason = await (go_on(session, turn) if turn else react(session))
                journal.end(stop_reason)
                await session.log.written()
                outcome = stop_reason
            except EndTurn as end:
                outcome = stop_reason = end.stop_reason
                note_stop(end)
                journal.end(stop_reason, "" if end.stopped_by else end.text or None)
                await session.log.finish()
                if end.text:
                    await session.say(end.text, is_answer=not end.stopped_by)
            except Exception as error:
                outcome = error
                await session.log.finish()
                raise
            finally:
                if reporting:
                    reporting.cancel()
                turns.tasks = [turn for turn in turns.tasks if turn is not asyncio.current_task()]
                await self.turn_end.run(session, outcome)
                with suppress(TimeoutError):  # the next turn waits for it
                    async with asyncio.timeout(CANCEL_LIMIT if outcome == "cancelled" else None):
                        await session.log.written()
                journal.close()
            return stop_reason

    async def update_tools(self, session: Session) -> None:
        """Take in the tools of MCP servers that have connected, and tell the user about servers that have not."""
        toolbox, first = session.toolbox, session.turns.is_first
        if late := await toolbox.wait(self.servers_wait):
            names = ", ".join(repr(to_line(server.name)) for server in late)
            await session.notice(f"Waiting for the MCP {'servers' if len(late) > 1 else 'server'} {names} to start.")
            await asyncio.wait(late.values())
        session.turns.is_first = False
        for changes in await toolbox.update():
            server, words = changes.server, str(changes)[:CHANGES_LIMIT]
            if server.error:
                await session.notice(server.error, "warning")
            elif words:
                await session.notice(f"The tools of {to_line(server.name)!r} have changed ({words}).")
            elif not first and server.source:
                await session.notice(f"The tools of {to_line(server.name)!r} are available now.")
            if server.warning:
                await session.notice(server.warning, "warning")
        schemas = await self.tools.run(toolbox.schemas(), session)
        if schemas != (toolbox.sent or []):
            if first and toolbox.sent is not None:
                await session.notice(
                    "The tools have changed since this session was last open; the server has to process the whole "
                    "conversation again."
                )
            toolbox.sent = schemas
            session.log.append({"crow": {"kind": "tools", "schemas": schemas}})

    async def report_failures(self, session: Session) -> None:
        """Tell the user about each MCP server that fails to start while a turn runs."""
        with suppress(ConnectionClosed):
            async for server in session.toolbox.failures():
                await session.notice(server.error, "warning")

    async def cancel(self, session: Session) -> None:
        """Cancel the running turn and those that wait; does nothing if none runs."""
        for turn in session.turns.tasks:
            cancel_turn(session, turn)

    async def close(self, session: Session) -> None:
        """Close a session: cancel its turns, store it, stop its servers. A second call waits for the first."""
        if self.sessions.get(session.id) is session:  # it may have been opened again
            del self.sessions[session.id]
            if session.parent is None and not any("role" in entry for entry in session.log):
                self.unprompted.append(session.id)
            self.closing[session.id] = asyncio.ensure_future(self.finish(session))
        await self.closed(session.id)

    async def finish(self, session: Session) -> None:
        """Cancel the turns of a session, run `session_end`, and close it. It is no longer in `sessions`."""
        session.journal.is_closing = True
        await self.cancel(session)
        try:
            async with session.turns.lock:
                try:
                    await self.session_end.run(session)
                finally:
                    await session.close()
        finally:
            del self.closing[session.id]

    def _check_closed(self, id: str) -> None:
        """Raise SessionBusy if a session is open here."""
        if id in self.sessions:
            raise SessionBusy(f"Session {id} is open in this process. Close it there first, or fork it.")

    async def closed(self, id: str) -> None:
        """Wait until a closing session is stored and its lease released."""
        if closing := self.closing.get(id):
            await asyncio.shield(closing)

    async def shut_down(self) -> None:
        """Close every session, then everything that sessions share."""
        await asyncio.gather(*(self.close(session) for session in list(self.sessions.values())), *self.closing.values())
        await self.app_end.run()
        # Sessions of another app may use the same servers.
        await asyncio.gather(*(server.close() for server in self.servers if not server.calls.hosts))
        for model in self.models.values():
            if isinstance(model, ChatModel):
                await model.close()


async def fail_announced(session: Session, outcome: StopReason | Exception) -> None:
    """Tell the client at the end of a turn that announced calls without a run will not run."""
    await session.stream.fail_announced()


def note_stop(end: EndTurn) -> None:
    """Note for the answer to the running prompt why its turn was ended without an answer, if it was."""
    if end.stopped_by and (notes := TURN_NOTES.get()) is not None:
        notes[STOPPED] = {"by": end.stopped_by, "reason": end.text}


def cancel_turn(session: Session, turn: "asyncio.Task[StopReason]") -> None:
    """Cancel a turn, but only once: a second time would interrupt its clean-up."""
    if turn in session.turns.tasks and turn not in session.turns.cancelled:
        session.turns.cancelled.add(turn)
        session.journal.suspend(turn)
        turn.cancel()


async def wait_for_end(turn: "asyncio.Task[Any]") -> None:
    """Wait for the end of a cancelled turn, even if the waiting task is cancelled again."""
    while not turn.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([turn])
    _ = turn.cancelled() or turn.exception()  # marks it as retrieved: no one waits for it any more
