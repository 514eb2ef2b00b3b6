"""The steps of a running workflow: sessions, prompts, functions, approvals."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
from crow_core.acp.schema import ToolCall, Usage
from msgspec import UNSET

from crow_agent.durable import PLACE, DurableAgent, DurableSession, S, outside_workflows
from crow_agent.errors import AgentClosed, AgentError, OutputError, PromptFailed, TurnStopped
from crow_agent.result import Result
from crow_agent.workflows.approvals import Approval
from crow_agent.workflows.clock import receive, sleep
from crow_agent.workflows.engine import retry, set_event
from crow_agent.workflows.errors import WorkflowError
from crow_agent.workflows.numbering import Numbering, WorkflowRun, run_step
from crow_agent.workflows.stored_runs import find_fork
from crow_agent.workflows.values import error_from_plain, error_to_plain, from_plain, to_plain, to_seconds

logger = logging.getLogger("crow_agent")
PATIENCE = 24 * 3600.0
"""The seconds for which a prompt is sent again while an error that may pass comes back."""
FOREVER = 10 * 365 * 86400.0
SESSION_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
WAITING = "waits for approval "
"""The beginning of the keys of the events that tell what a workflow waits for; the step's label follows."""


class Place:
    """A task of a running workflow. The calls in each task are numbered for themselves."""

    def __init__(self, run: WorkflowRun, numbering: Numbering) -> None:
        self.run = run
        self._numbering = numbering

    @classmethod
    def make(cls, run: WorkflowRun, context: Any, path: tuple[int, ...] = (), base: int = 0) -> "Place":
        """Make the place of a workflow's own task, or of a branch."""
        return cls(run, Numbering(run, context, path, base))

    def find(self) -> "Place":
        """Return the place of the running task; in a task that the workflow has started, it becomes a branch."""
        if self._numbering.task is asyncio.current_task():
            return self
        place = self._numbering.make_branch(Place.make)
        place._numbering.enter_task()
        PLACE.set(place)
        return place

    def branch(self) -> AbstractContextManager[None]:
        """Take a number for a part of the program that runs at the same time as others; its calls are those in the
        block."""
        place = self.find()._numbering.make_branch(Place.make)

        @contextmanager
        def enter() -> Generator[None]:
            token = PLACE.set(place)
            try:
                with place._numbering.numbering():
                    yield
            finally:
                PLACE.reset(token)

        return enter()

    async def run_step(self, name: str, function: Callable[[str], Awaitable[Any]]) -> Any:
        """Run a function as a step, with the step's label; return its result as JSON values."""
        return await run_step(*self.find()._numbering.reserve(), name, function)

    async def open_session(self, agent: DurableAgent[S], cwd: str) -> S:
        """Open the session of this step: a new one, or the one that was opened here before the program ended."""
        step, label = self.find()._numbering.reserve()  # before any `await`: the numbers follow the order of the calls
        id = to_session_id(self.run.id, label)
        session = None
        with outside_workflows():
            try:
                client = await agent.open()
                if client.takes_keys:
                    origin = await self._find_origin(label)
                    open_own = partial(agent.make_session, id, cwd, origin)
                    waits = Waits(self.run.id)
                    session = await retry(open_own, waits.may_pass, timeout=PATIENCE)
                    waits.end()
            except AgentClosed as error:
                raise self.run.suspend(str(error)) from error
        session = session or await self._open_other_session(agent, cwd, step, label)
        self.run.sessions.append(session)
        return session

    async def _find_origin(self, label: str) -> dict[str, Any] | None:
        """Find the session that one of a forked run continues; None for a run that is not a fork, and after the
        fork."""
        if self.run.fork is None:
            self.run.fork = await find_fork(self.run.id)
        fork = self.run.fork
        if not fork.origins or int(label.partition(".")[0]) >= fork.step:
            return None
        return {
            "session": to_session_id(fork.origins[0], label),
            "prefixes": [f"{origin}/" for origin in fork.origins],
            "keys": [f"{origin}/{kept}" for origin in fork.origins for kept in fork.labels],
        }

    async def _open_other_session(self, agent: DurableAgent[S], cwd: str, step: Any, label: str) -> S:
        """Open a session of an agent that gives ids of its own. A stored one is opened again where the agent can."""
        opened: list[S] = []

        async def open(label: str) -> str:
            opened.append(await agent.session(cwd=cwd))
            return opened[0].id

        id = await run_step(step, label, "session", open)
        if opened:
            return opened[0]
        with outside_workflows():
            try:
                return await agent.session(id, cwd=cwd)
            except AgentError as error:
                logger.warning("Workflow %s goes on in a new session: %s", self.run.id, error)
                return await agent.session(cwd=cwd)

    async def prompt(
        self, session: DurableSession, ask: Callable[[str], Awaitable[Result[Any]]], output: Any
    ) -> Result[Any]:
        """Run a prompt as a step, with the key `workflow id / step`; wait while an error comes that may pass."""

        async def send(label: str) -> Any:
            key = f"{self.run.id}/{label}" if session.takes_keys else ""
            waits = Waits(self.run.id)
            try:
                result = await retry(lambda: ask(key), waits.may_pass, timeout=PATIENCE)
            except AgentError as error:
                if get_data(error).get("lost") or session.is_lost:
                    raise self.run.suspend(str(error)) from error
                raise
            waits.end()
            if result.stop_reason == "cancelled" and session.is_lost:
                raise self.run.suspend("its agent was closed.")
            return result_to_plain(result)

        return result_from_plain(await self.run_step("prompt", send), output)

    async def call(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        hint: Any,
        *,
        retries: int,
        delay: float,
        may_retry: Callable[[Exception], bool],
    ) -> Any:
        """Run a function of the program as a step."""

        async def run(label: str) -> Any:
            return to_plain(await retry(function, may_retry, attempts=retries + 1, first=delay))

        return from_plain(await self.run_step(name, run), hint)

    async def sleep(self, duration: str | float | timedelta) -> None:
        """Sleep durably."""
        self.find()
        await sleep(to_seconds(duration))

    async def approve(self, value: Any, timeout: str | float | timedelta | None) -> Approval:
        """Wait durably for a person's answer; a no if none comes in time."""
        seconds = FOREVER if timeout is None else to_seconds(timeout)
        place = self.find()
        _, label = place._numbering.reserve()
        key = WAITING + label
        shown = to_plain(value.output if isinstance(value, Result) else value)  # pyright: ignore[reportUnknownMemberType]
        await set_event(key, {"value": shown, "seconds": seconds})
        answer = await receive(key, seconds)
        await set_event(key, None)
        return Approval(bool(answer["approved"]), str(answer["note"])) if answer else Approval(False)

    async def close(self) -> None:
        """Close the sessions that the workflow has opened, all of them even if it is cancelled meanwhile."""
        with outside_workflows():
            closing = asyncio.gather(*map(close_session, self.run.sessions))
            is_cancelled = False
            while not closing.done():
                try:
                    await asyncio.shield(closing)
                except asyncio.CancelledError:
                    is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError


async def close_session(session: DurableSession) -> None:
    """Close a session; warn if that fails."""
    try:
        await session.close()
    except AgentError as error:
        logger.warning("Session %s could not be closed: %s", session.id, error)


def get_place(what: str) -> Place:
    """Return the place of the running code. Raises WorkflowError outside of a workflow."""
    place = PLACE.get()
    if not isinstance(place, Place):
        raise WorkflowError(f"{what} works inside a workflow only, and not in one of its steps.")
    return place


def to_session_id(workflow: str, label: str) -> str:
    """Convert a workflow's id and a step's label to the id of a session."""
    id = f"{workflow}-{label}"
    return id if SESSION_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()


def get_data(error: AgentError) -> dict[str, Any]:
    """Return the data of an error answer; empty if it has none."""
    data = getattr(error, "data", None)
    return data if isinstance(data, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def may_pass(error: Exception) -> bool:
    """Test whether a request may work later: the model is down, the database does not answer, or another process has
    the session open."""
    return isinstance(error, PromptFailed) and bool(get_data(error).get("retry"))


class Waits:
    """Tells a person that a workflow waits, once, and when it goes on."""

    def __init__(self, workflow: str) -> None:
        self._workflow = workflow
        self._is_waiting = False

    def may_pass(self, error: Exception) -> bool:
        """Test whether a request may work later; warn where it is the first time."""
        if not may_pass(error):
            return False
        if not self._is_waiting:
            logger.warning("Workflow %s waits, and asks again for up to a day: %s", self._workflow, error)
        self._is_waiting = True
        return True

    def end(self) -> None:
        """Tell that the request has its answer, if it has waited."""
        if self._is_waiting:
            logger.warning("Workflow %s goes on.", self._workflow)


def result_to_plain(result: Result[Any]) -> dict[str, Any]:
    """Convert a result to JSON values, without the contents of its tool calls: these are in the session."""
    return to_plain(
        {
            "session": result.session_id,
            "text": result.text,
            "stop": result.stop_reason,
            "stopped_by": result.stopped_by,
            "usage": result.usage,
            "cost": result.cost,
            "calls": [shorten_call(call) for call in result.tool_calls],
            "denied": [call.tool_call_id for call in result.denied],
            "error": None if result.error is None else error_to_plain(result.error),
            **({} if result.value is UNSET else {"value": result.value}),
        }
    )


def shorten_call(call: ToolCall) -> ToolCall:
    """Return a tool call without its content and its raw output."""
    return msgspec.structs.replace(call, content=UNSET, raw_output=UNSET)


def result_from_plain(stored: dict[str, Any], output: Any) -> Result[Any]:
    """Convert a stored result back, with the value in the type that was asked for."""
    calls = msgspec.convert(stored["calls"], list[ToolCall])
    result = Result[Any](
        stored["session"],
        stored["text"],
        stored["stop"],
        None if stored["usage"] is None else msgspec.convert(stored["usage"], Usage),
        stored["cost"],
        calls,
        [call for call in calls if call.tool_call_id in stored["denied"]],
    )
    result.stopped_by = stored.get("stopped_by", "")
    if stored["error"] is not None:
        error = error_from_plain(stored["error"])
        result.error = error if isinstance(error, (OutputError, TurnStopped)) else WorkflowError(str(error))
    if "value" in stored:
        result.value = from_plain(stored["value"], output)
    return result
