"""One sub-agent: a session of its own that works for a tool call, goes on in the background, and can be asked again."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INVALID_PARAMS, TextBlock
from crow_core.acp.shared_methods import STEERING_METHOD, is_taken, make_steering_params
from crow_core.app import Crow, wait_for_end
from crow_core.errors import EndTurn, ModelError
from crow_core.mcp.result import ToolResult
from crow_core.messages.message import Message, marker_kind
from crow_core.messages.notes import Notes
from crow_core.models.model_call import Model
from crow_core.session.background_work import BACKGROUND, go_on, waiting
from crow_core.session.output import STOPPED, TURN_NOTES
from crow_core.session.session import Session
from crow_core.session.store import Record
from msgspec import to_builtins

from crow_extensions.nested import NestedClient

STOPPED_BY_USER = "The user stopped this agent. Its last words:\n\n{}"
NOT_STORED = "The agent {!r} cannot go on, as its conversation was not kept. Start another one."
GOES_ON = '[the agent goes on in the background; call agent with the name "{}" alone to wait for its report]'
NO_REPORT = "The agent {!r} has no report: its work ended with an earlier process. Give it a prompt to go on."


UNLIMITED = "No agent was started: there are no permissions here, so nothing would keep it from changing files."
REPORT = """

---
Another agent gave you this task, and nobody else reads along. Your last message is your report to it, and all that it \
gets: say what you found or did, with paths and lines, and what is left."""
"""Is appended to the task."""


ONLY = "\n\nUse only these of your tools: {}."
"""Is appended to the task where the sub-agent may not use all tools."""
READ_ONLY = "\n\nYou may read and run commands, but you change nothing: what your commands change is discarded."
"""Is appended to the task of a sub-agent that may change nothing."""


class AgentGone(Exception):
    """A sub-agent cannot go on; the text is a sentence for the model and for the user."""


class SubAgent:
    """Implements `KnownAgent` for a sub-agent of a session."""

    kind = "agent"
    exit: Mapping[str, int | str] = MappingProxyType({})

    def __init__(self, crow: Crow, parent: Session, name: str, title: str) -> None:
        self.crow, self.parent, self.name, self.title = crow, parent, name, title
        self.call = self.session_id = self.sandbox = ""
        self.model: Model | None = None
        """Its model; None for that of its parent."""
        self.only: list[str] = []
        """Patterns of the names of the tools that it may use; empty for all."""
        self.child: Session | None = None
        """Its session while it runs."""
        self.client = NestedClient(parent, "")
        self.over = asyncio.Event()
        self.over.set()
        self.end, self.is_told = "ended", True
        self.answer_wanted = asyncio.Event()
        """Set when the waiting tool call is to be answered: it has ended, or is to go on after the call."""
        self.task: asyncio.Task[ToolResult] | None = None
        """Its work; the result is for the tool call that asks for it."""
        self.record: Record | None = None
        """Its conversation, if the app has no store."""

    def answer(self) -> None:
        self.answer_wanted.set()

    def get_last_line(self, limit: int) -> str:
        return self.client.text.rstrip().rpartition("\n")[2][:limit]

    def read_output(self, start: int, limit: int) -> tuple[str, int]:
        text = self.client.text
        return text[start:][-limit:], len(text)

    async def start(self, words: str, call: str) -> None:
        """Start to work on a task, or go on with words, in a task of its own. Raises AgentGone, ModelError."""
        self.over.clear()
        self.answer_wanted.clear()
        self.end, self.is_told, self.client = "", False, NestedClient(self.parent, call)
        try:
            if self.session_id:
                child = await self.open(await self.load())
            else:
                child, self.call = await self.open(None), call
                words = await self.introduce(child, words)
        except BaseException:
            self.end = "failed"
            self.over.set()
            if not self.session_id:
                self.parent.state[BACKGROUND].agents.pop(self.name, None)
            raise
        self.task = asyncio.ensure_future(self.work(child, {"role": "user", "content": words}))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def load(self) -> Record:
        """Load its conversation. Raises AgentGone."""
        record = self.record
        if self.crow.store is not None:
            await self.crow.closed(self.session_id)
            record = await self.crow.store.load(self.session_id)
        if record is None:
            raise AgentGone(NOT_STORED.format(self.name))
        return record

    async def open(self, record: Record | None) -> Session:
        """Open its session, a new one or a stored one. Raises AgentGone."""
        parent = self.parent
        child = await self.crow.open(
            self.client,
            parent.cwd,
            roots=parent.folders.roots[1:],
            servers=parent.toolbox.client_servers,
            models=parent.models,
            record=record,
            parent=parent,
        )
        child.model, child.toolbox.allowed = self.model or parent.model, self.only
        if self.sandbox:
            if not (mode := child.options.find_mode()):
                await self.crow.close(child)
                raise AgentGone(UNLIMITED)
            await child.options.choose(mode, "plan")
        self.child, self.session_id = child, child.id
        return child

    async def introduce(self, child: Session, words: str) -> str:
        """Note in both logs that its session has begun. Return the message that begins it."""
        parent = self.parent
        child.folders.current = parent.folders.current
        notes: Notes = {"kind": "child", "session": child.id, "call": self.call, "name": self.name, "title": self.title}
        if self.only:
            notes["only"] = self.only
        if self.sandbox:
            notes["sandbox"] = self.sandbox
        parent.log.append({"crow": notes})
        child.log.append({"crow": {"kind": "parent", "session": parent.id, "call": self.call}})
        share_system_prompt(parent, child)
        await child.set_title(self.title)
        only = ONLY.format(", ".join(self.only)) if self.only else ""
        return words + only + (READ_ONLY if self.sandbox else "") + REPORT

    async def wait(self, call: str, *, starts: bool) -> ToolResult:
        """Wait for its report in a tool call, which may have started it. Raises EndTurn."""
        self.client.shown_in = call
        try:
            with waiting(self.parent, call, self):
                if not self.over.is_set():
                    await self.answer_wanted.wait()
        except BaseException:
            if starts:
                await self.kill()
            raise
        finally:
            if not self.over.is_set():
                await self.client.hide()
        if self.over.is_set():
            return self.take_report()
        self.answer_wanted.clear()
        return ToolResult.text(GOES_ON.format(self.name))

    async def work(self, child: Session, message: Message) -> ToolResult:
        """Run a turn of its session to the end, and close the session. Return the report."""
        TURN_NOTES.set(notes := dict[str, Any]())  # those of its turn are its own
        end = "failed"
        try:
            stop_reason = await self.crow.prompt(child, message)
            if stop_reason == "cancelled":
                raise EndTurn("cancelled")
            end = "finished"
            return make_report(child, self.client.text, stop_reason, notes)
        except ModelError as error:
            return ToolResult.error(f"The agent failed: {error}\n\n{self.client.text}".strip())
        except asyncio.CancelledError:
            end = "stopped"
            return ToolResult.error(STOPPED_BY_USER.format(self.client.text))
        finally:
            if self.crow.store is None:
                log, prompts, tools = child.log.entries, child.prompts, child.toolbox.sent
                self.record = Record(child.id, [*log], system=prompts.system, tools=tools)
            await self.crow.close(child)
            self.child, self.end = None, end
            self.over.set()
            self.answer_wanted.set()

    def take_report(self) -> ToolResult:
        """Return the report of its last work. Raises the exception that ended the work."""
        self.is_told = True
        return self.task.result() if self.task else ToolResult.error(NO_REPORT.format(self.name))

    async def kill(self) -> None:
        if self.task and not self.task.done():
            self.task.cancel()
            await wait_for_end(self.task)

    async def tell(self, words: str) -> str:
        """Give words to it, as `KnownAgent.tell`. Raises RpcError."""
        if await self.steer(words):
            return f"{self.name} has your words."
        if not self.over.is_set():
            raise RpcError(INVALID_PARAMS, "Invalid params", details=f"{self.name} ends without your words.")
        try:
            await self.start(words, self.call)
        except (AgentGone, ModelError) as error:
            raise RpcError(INVALID_PARAMS, "Invalid params", details=str(error)) from error
        await self.client.hide()
        go_on(self.parent, self.call, self)
        return f"{self.name} goes on with your words, in the background."

    async def steer(self, words: str) -> bool:
        """Let words join its running turn. Return False if it does not take them."""
        steer = self.crow.methods.get(STEERING_METHOD)
        if self.child is None or steer is None:
            return False
        params = to_builtins(make_steering_params(self.session_id, [TextBlock(text=words)]))
        try:
            return is_taken(await steer(self.child, params))
        except RpcError:
            return False


def make_report(child: Session, words: str, stop_reason: str, notes: dict[str, Any]) -> ToolResult:
    """Make the result of a sub-agent's turn: its last message, or why there is none."""
    last = next((entry for entry in reversed(child.log) if entry.get("role") == "assistant"), Message())
    if stop_reason == "end_turn" and STOPPED not in notes and last.get("content") and not last.get("tool_calls"):
        return ToolResult.text(str(last.get("content")))
    why = notes.get(STOPPED, {}).get("reason") or f"The agent did not come to its end ({stop_reason})."
    return ToolResult.error(f"{why} Its last words:\n\n{words}")


def share_system_prompt(parent: Session, child: Session) -> None:
    """Give a sub-agent the system prompt of its parent, and append the marker of its rendering to its log."""
    child.prompts.system = parent.prompts.system
    renders = [entry.get("crow", {}) for entry in parent.log if marker_kind(entry) == "render"]
    for notes in [notes.copy() for notes in renders if notes.get("purpose") == "system"][-1:]:
        notes.pop("id", None)
        child.log.append({"crow": notes})
