"""The sessions of an agent."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, cast, overload

from crow_core.acp.agent_process import START_TIMEOUT
from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import (
    CloseSessionRequest,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    ForkSessionRequest,
    ForkSessionResponse,
    LoadSessionResponse,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    ResumeSessionResponse,
    SessionConfigOption,
    SessionModeState,
    SessionUpdate,
    SetSessionConfigOptionRequest,
    SetSessionConfigOptionResponse,
    SetSessionModeRequest,
    TextBlock,
    ToolCallFields,
)
from crow_core.acp.shared_methods import (
    BACKGROUND_METHOD,
    STEERING_METHOD,
    can_steer,
    has_background,
    is_taken,
    make_steering_params,
)
from msgspec import UNSET, json

from crow_agent.agent_client import ProgramClient
from crow_agent.budget import Budget
from crow_agent.content import PromptContent, to_blocks
from crow_agent.durable import PLACE
from crow_agent.errors import AgentClosed, AgentError, AgentLost, OutputError, TurnStopped
from crow_agent.prompt_stream import PromptStream
from crow_agent.result import Result, to_result
from crow_agent.time_limit import TimeLimit
from crow_agent.typed_results import CORRECTION, INSTRUCTION, OutputType
from crow_agent.work import BackgroundWork, to_work

T = TypeVar("T")
CANCEL_TIMEOUT = 30.0
"""Seconds that an agent may take to end a turn that was cancelled."""
CLOSE_TIMEOUT = 10.0
"""Seconds that an agent may take to close a session."""
SessionOpened: TypeAlias = NewSessionResponse | LoadSessionResponse | ResumeSessionResponse | ForkSessionResponse
"""The answer to a request that opens a session."""


class AgentSession:
    """One conversation with an agent. Its prompts run one after the other."""

    def __init__(self, client: ProgramClient, id: str, cwd: str, budget: Budget | None, *, counts: bool) -> None:
        self.id = id
        self.cwd = cwd
        self.budget = budget
        self.closed = False
        self.modes: SessionModeState | None = None
        """The modes that the agent offers, and the present one; None if it has none."""
        self.options: list[SessionConfigOption] = []
        """The options of the session that the agent offers, with their values."""
        self.allowed: list[ToolCallFields] = []
        """The tool calls of the running turn that were allowed, and that no write or command has followed yet."""
        self._client = client
        client.sessions[id] = self
        self._counts = counts
        """True if the agent itself counts what it spends."""
        self._turn = asyncio.Lock()
        """Held while a turn runs."""
        self._record = TurnRecord()
        """The updates of the running turn."""
        self._cost: float | None = None
        """The cost of all turns before."""
        self._counted = 0.0
        """The part of the cost that the budget has counted."""
        self._listener: Callable[[SessionUpdate], None] | None = None
        self._request: asyncio.Future[PromptResponse] | None = None
        """The request of the running turn."""
        self._fault: Exception | None = None
        """The error of one of the program's functions, which ends the turn."""

    @property
    def takes_keys(self) -> bool:
        """True if an interrupted turn can go on: it is a session of crow's own."""
        return self._client.takes_keys

    @property
    def is_lost(self) -> bool:
        """True if its agent was closed."""
        return self._client.closed or self._client.connection.is_closing

    @overload
    async def prompt(
        self,
        prompt: PromptContent,
        *,
        timeout: float | None = None,
        key: str = "",
        on_update: Callable[[SessionUpdate], None] | None = None,
    ) -> Result[str]: ...

    @overload
    async def prompt(
        self,
        prompt: PromptContent,
        *,
        output: type[T],
        retries: int = 2,
        timeout: float | None = None,
        key: str = "",
        on_update: Callable[[SessionUpdate], None] | None = None,
    ) -> Result[T]: ...

    @overload
    async def prompt(
        self,
        prompt: PromptContent,
        *,
        output: Any,
        retries: int = 2,
        timeout: float | None = None,
        key: str = "",
        on_update: Callable[[SessionUpdate], None] | None = None,
    ) -> Result[Any]: ...

    async def prompt(
        self,
        prompt: PromptContent,
        *,
        output: Any = None,
        retries: int = 2,
        timeout: float | None = None,
        key: str = "",
        on_update: Callable[[SessionUpdate], None] | None = None,
    ) -> Result[Any]:
        """Send a prompt and wait for the end of its turn: a text, a file, an image, or several of them.

        `output` is the type of the answer; one that does not fit is asked for again, `retries` times. `timeout` is in
        seconds. `on_update` is called with each update of ACP. Cancelling the waiting task cancels the turn.

        A turn with a `key` survives an interruption, also the end of the process. The same prompt with the same key
        continues it, in this session or when the session is opened again. Once it has ended, it returns the same
        result, and runs nothing. A completed tool call is never repeated; an interrupted one runs at most once unless
        its tool is declared `idempotent`.

        Inside a durable workflow, it is a step that makes its own key.

        Raises PromptFailed, PromptTimeout, OutputError, BudgetSpent, AgentLost or AgentClosed. Raises TypeError or
        ValueError for an `output` that is not a type with a JSON schema, or for an unusable JSON schema.
        """
        return await self.prompt_within(
            TimeLimit(timeout), prompt, output=output, retries=retries, key=key, on_update=on_update
        )

    async def prompt_within(
        self,
        limit: TimeLimit,
        prompt: PromptContent,
        *,
        output: Any,
        retries: int,
        key: str = "",
        on_update: Callable[[SessionUpdate], None] | None = None,
    ) -> Result[Any]:
        """Like `prompt`, in a time that may count already."""
        if (place := PLACE.get()) is not None:

            def ask(made: str) -> Awaitable[Result[Any]]:
                again = TimeLimit(limit.seconds)
                return self.prompt_within(
                    again, prompt, output=output, retries=retries, key=key or made, on_update=on_update
                )

            return await place.prompt(self, ask, output)
        wanted = None if output is None else OutputType[Any](output)
        if retries < 0:
            raise ValueError(f"retries is {retries}. Give the number of further attempts, 0 for none.")
        if key and not self._client.takes_keys:
            raise AgentError(f"{self._client.connected.name} takes no keys: it cannot go on with an interrupted turn.")
        async with self._turn:
            if self._record.cost is not None:
                self._cost = self._counted = self._record.cost
            self._listener, self._record, self._fault = on_update, TurnRecord(), None
            self.allowed.clear()
            try:
                async with limit.holding():
                    return await self._run(prompt, wanted, retries, key)
            except AgentError as error:
                raise self._attach(error) from error.__cause__
            finally:
                self._listener = None
                if self.budget is not None and not self._counts:
                    self.budget.release(self.id)

    @overload
    def stream(self, prompt: PromptContent, *, timeout: float | None = None) -> PromptStream[str]: ...

    @overload
    def stream(
        self, prompt: PromptContent, *, output: type[T], retries: int = 2, timeout: float | None = None
    ) -> PromptStream[T]: ...

    @overload
    def stream(
        self, prompt: PromptContent, *, output: Any, retries: int = 2, timeout: float | None = None
    ) -> PromptStream[Any]: ...

    def stream(
        self, prompt: PromptContent, *, output: Any = None, retries: int = 2, timeout: float | None = None
    ) -> PromptStream[Any]:
        """Send a prompt; iterate over the result to get the updates of its turn, or over `.text()` for its text."""

        def send(limit: TimeLimit, on_update: Callable[[SessionUpdate], None]) -> Awaitable[Result[Any]]:
            return self.prompt_within(limit, prompt, output=output, retries=retries, on_update=on_update)

        return PromptStream[Any](send, timeout)

    async def cancel(self) -> None:
        """Cancel the running turn: its result has the stop reason `cancelled`."""
        if self._request is not None and not self._client.connection.is_closing:
            await self._client.cancel(self.id)

    async def steer(self, prompt: PromptContent) -> bool:
        """Give words to the running prompt, for the model's next step. Return True when they have joined its turn.

        False if no prompt runs, or its turn ends without them: send them as a prompt. Raises AgentError for an agent
        that takes no words while a prompt runs; crow does.
        """
        self._check_open()
        if not can_steer(self._client.initialized.meta):
            raise AgentError(
                f"{self._client.connected.name} takes no words while a prompt runs. Send them as a prompt."
            )
        params = make_steering_params(self.id, self._to_blocks(prompt))
        return is_taken(await self._client.ask(STEERING_METHOD, params))

    async def background(self) -> list[BackgroundWork]:
        """List the commands and sub-agents in the background, and the last sub-agents that have ended.

        Each has `stop()`, a sub-agent `tell(words)`. Raises AgentError for an agent that has no such list; crow does.
        """
        return to_work(await self._ask_background("list"), self._ask_background)

    async def send_to_background(self) -> int:
        """Let the running prompt go on without the commands and sub-agents that it waits for; return their number.

        The model is told how they end. All end with the session. Raises AgentError like `background`.
        """
        return len((await self._ask_background("send"))["sent"])

    async def _ask_background(self, action: str, name: str = "", text: str = "") -> dict[str, Any]:
        self._check_open()
        if not has_background(get_notes(self._client.initialized.agent_capabilities.meta)):
            raise AgentError(f"{self._client.connected.name} has no background.")
        params = {"sessionId": self.id, "action": action, "name": name, "text": text}
        return await self._client.ask(BACKGROUND_METHOD, params)

    async def fork(self) -> "AgentSession":
        """Open a new session that continues this one from here."""
        self._check_open()
        if not self._client.initialized.agent_capabilities.session_capabilities.fork:
            raise AgentError(f"{self._client.connected.name} cannot fork a session.")
        params = ForkSessionRequest(session_id=self.id, cwd=self.cwd, mcp_servers=[])
        response = await self._client.ask("session/fork", params, timeout=START_TIMEOUT)
        session = AgentSession(self._client, response.session_id, self.cwd, self.budget, counts=self._counts)
        session.take_options(response)
        return session

    async def set_mode(self, mode: str) -> None:
        """Set the mode, one of `modes`. Raises AgentError."""
        self._check_open()
        offered = [one.id for one in self.modes.available_modes] if self.modes else []
        if self.modes is None or mode not in offered:
            raise AgentError(f"This session has no mode {mode!r}. It has: {', '.join(offered) or 'none'}.")
        await self._client.ask("session/set_mode", SetSessionModeRequest(session_id=self.id, mode_id=mode))
        self.modes.current_mode_id = mode

    async def set_option(self, option: str, value: str | bool) -> None:
        """Set one of the `options`. Raises AgentError."""
        self._check_open()
        offered = [str(getattr(one, "id", "")) for one in self.options]
        if option not in offered:
            raise AgentError(f"This session has no option {option!r}. It has: {', '.join(offered) or 'none'}.")
        params = SetSessionConfigOptionRequest(session_id=self.id, config_id=option, value=value)
        response: SetSessionConfigOptionResponse = await self._client.ask("session/set_config_option", params)
        self.options = response.config_options

    def take_options(self, response: SessionOpened) -> None:
        """Take in the modes and the options that the agent tells when it opens the session."""
        self.modes = response.modes or None
        self.options = response.config_options or []

    async def close(self) -> None:
        """Close the session; a stored one can be opened again by its id."""
        if self.closed:
            return
        self.closed = True
        self._client.sessions.pop(self.id, None)
        capabilities = self._client.initialized.agent_capabilities.session_capabilities
        if capabilities.close and not self._client.connection.is_closing:
            request = CloseSessionRequest(session_id=self.id)
            with suppress(AgentLost):  # it has ended, or does not answer: there is nothing left to close
                await asyncio.shield(self._client.ask("session/close", request, timeout=CLOSE_TIMEOUT))
        if self._client.workspace is not None:
            await self._client.workspace.terminals.release_all(self.id)

    async def __aenter__(self) -> "AgentSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        """Raise AgentClosed if the session is closed."""
        if self.closed:
            raise AgentClosed(f"Session {self.id} is closed. Open it again with agent.session({self.id!r}).")

    async def _run(self, prompt: PromptContent, wanted: OutputType[Any] | None, retries: int, key: str) -> Result[Any]:
        """Prompt until the answer fits. crow itself asks the model again; another agent is prompted again."""
        blocks = self._to_blocks(prompt)
        takes_schema = bool(get_notes(self._client.initialized.agent_capabilities.meta).get("outputSchema"))
        if wanted is not None and not takes_schema:
            blocks.append(TextBlock(text=INSTRUCTION.format(schema=json.encode(wanted.schema).decode())))
        faults: list[str] = []
        while True:
            meta: dict[str, Any] = {"key": key} if key else {}
            if wanted is not None and takes_schema:
                meta |= {"outputSchema": wanted.schema, "outputRetries": retries - len(faults)}
            response = await self._ask(blocks, meta)
            notes = get_notes(response.meta)
            result = to_result(self._record, self.id, cost_before=self._cost)
            result.stop_reason, result.usage = response.stop_reason, response.usage or None
            self._spend(result)
            match notes.get("stopped"):
                case {"by": str(stopped_by), "reason": str(reason)}:
                    result.stopped_by, result.error = stopped_by, TurnStopped(reason, stopped_by=stopped_by)
                    return result
                case _:
                    pass
            if wanted is None:
                return result
            if response.stop_reason != "end_turn":
                why = f"the turn ended early, with the stop reason {response.stop_reason!r}."
                result.error = OutputError(wanted.name, [], why)
                return result
            if takes_schema and "output" not in notes:
                raise OutputError(wanted.name, [*faults, *notes.get("outputFaults", ())])
            try:
                result.value = wanted.convert(notes["output"]) if takes_schema else wanted.parse(result.text)
                return result
            except ValueError as error:
                faults.append(str(error))
            if len(faults) > retries:
                raise OutputError(wanted.name, faults)
            blocks = [TextBlock(text=CORRECTION.format(fault=faults[-1]))]

    def _to_blocks(self, prompt: PromptContent) -> list[Any]:
        """Convert a prompt to content blocks that the agent takes. Raises AgentError."""
        try:
            return to_blocks(prompt, self._client.initialized.agent_capabilities.prompt_capabilities)
        except OSError as error:
            raise AgentError(f"{error.filename} cannot be read: {error.strerror}.") from error

    async def _ask(self, blocks: list[Any], meta: dict[str, Any]) -> PromptResponse:
        """Send a prompt, with notes for crow, and wait for the end of its turn, cancelled with the waiting task."""
        self._check_open()
        await self._reserve()
        params = PromptRequest(session_id=self.id, prompt=blocks, meta={"crow": meta} if meta else UNSET)
        self._request = asyncio.ensure_future(self._client.ask("session/prompt", params))
        self._request.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may be cancelled twice
        try:
            await asyncio.wait([self._request])
        except asyncio.CancelledError:
            await self.cancel()
            await asyncio.wait([self._request], timeout=CANCEL_TIMEOUT)
            raise
        finally:
            request, self._request = self._request, None
            if not request.done():
                request.cancel()
        if self._fault is not None:
            raise self._fault
        return request.result()

    async def _reserve(self) -> None:
        """Start the budget's time, and reserve a turn of another agent, whose model calls are not seen.

        Raises BudgetSpent.
        """
        if (budget := self.budget) is not None:
            budget.start()
            if self._counts or await budget.reserve(self.id):
                budget.check()

    def _spend(self, result: Result[Any]) -> None:
        """Count what a turn of another agent has used. Raises BudgetSpent; AgentError for an agent that does not tell
        what a limit is about."""
        budget = self.budget
        if budget is None:
            return
        if not self._counts:
            used: dict[str, float] = {}
            if result.usage:
                used["tokens"] = result.usage.total_tokens
            if self._record.cost is not None:
                used["money"] = self._record.cost - self._counted
                self._counted = self._record.cost
            elif self._counted:
                used["money"] = 0.0  # it tells its cost, and this turn has added nothing
            budget.settle(self.id, used)
            unknown = [what for what in ("tokens", "money") if what in budget.limits and what not in used]
            if unknown and result.stop_reason != "cancelled":
                raise AgentError(
                    f"{self._client.connected.name} does not tell the {' and '.join(unknown)} of a turn, so a limit "
                    "cannot hold. Leave it out of the agent's Budget; minutes can be limited."
                )
        if result.stop_reason == "max_turn_requests":
            budget.check()

    def _attach(self, error: AgentError) -> AgentError:
        """Give an error what the turn had come to."""
        error.result = to_result(self._record, self.id, cost_before=self._cost)
        return error

    def receive(self, update: SessionUpdate) -> None:
        """Take in an update of the agent."""
        self._record.add(update)
        match update:
            case CurrentModeUpdate(current_mode_id=mode) if self.modes:
                self.modes.current_mode_id = mode
            case ConfigOptionUpdate(config_options=options):
                self.options = options
            case _:
                pass
        if self._listener is not None:
            self._listener(update)

    def deny(self, tool_call_id: str) -> None:
        """Note that a tool call was denied."""
        self._record.denied.add(tool_call_id)

    async def fail(self, fault: Exception) -> None:
        """End the turn because one of the program's functions failed; `prompt` raises its error."""
        self._fault = fault
        await self.cancel()


def get_notes(meta: Any) -> dict[str, Any]:
    """Return crow's own notes in a `_meta`; empty if there are none."""
    match meta:
        case {"crow": {**notes}}:
            return cast("dict[str, Any]", notes)
        case _:
            return {}
