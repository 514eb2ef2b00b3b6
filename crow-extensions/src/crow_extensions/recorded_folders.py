"""Record the commit and the changes in a session's folder before a tool changes something in it.

git runs at the same time as the first request to the model, so that no prompt waits for it. The first tool call that
may change something waits until it has ended, for ACTING_LIMIT seconds at most.
"""

import asyncio
import logging

from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.messages.worktree import WorkTree, to_marker
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session
from crow_core.session_state import StateKey

from crow_extensions.folder_state import is_in_repository, read_state

logger = logging.getLogger("crow")

START_DELAY = 0.3
"""Seconds from a request that is about to be sent to the start of git: the request leaves, and the database opens,
first."""
ACTING_LIMIT = 2.0
"""Seconds for which a tool call that may change something, or the end of a session, waits."""
KILL_LIMIT = 1.0
"""Seconds for the end of a git that was killed; on a disk that does not answer, it cannot end."""
READING_LIMIT = 10.0
"""Seconds that it may take while no tool changes anything."""
READING_KINDS = ("read", "search", "think", "fetch")
"""The kinds of tool calls that change nothing in the folder."""
WANTED = StateKey("recorded_folder_wanted", bool)


class Recording:
    """The state of a session's folder while it is read; it is appended to the log when it is known."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.task = asyncio.ensure_future(asyncio.wait_for(read_state(session.cwd), READING_LIMIT))
        self.is_appended = False
        self.task.add_done_callback(self.append)

    async def finish(self) -> None:
        """Wait for the state, and give it up after ACTING_LIMIT seconds."""
        if self.is_appended:
            return
        await asyncio.wait([self.task], timeout=ACTING_LIMIT)
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task], timeout=KILL_LIMIT)
        self.append(self.task)

    def append(self, task: "asyncio.Task[WorkTree | None]") -> None:
        """Append the state to the log, or the reason why it is not known."""
        if self.is_appended:
            return
        self.is_appended = True
        slow = WorkTree(self.session.cwd, fault="git took too long")
        if not task.done() or task.cancelled() or isinstance(error := task.exception(), TimeoutError):
            tree = slow
        elif error:
            logger.error("the work tree of %s cannot be read", self.session.cwd, exc_info=error)
            tree = WorkTree(self.session.cwd, fault=f"{type(error).__name__}")
        else:
            tree = task.result()
        if tree is not None:
            self.session.log.append(to_marker(tree))


RECORDING = StateKey[Recording | None]("recorded_folder", lambda: None)


def recorded_folders(crow: Crow) -> None:
    """Record the commit and the changes in a folder in a git work tree when a conversation begins in it.

    Only where a store loads sessions again. Nothing is written into the folder or its repository.
    """

    @crow.before_prompt
    def want(message: Message, session: Session) -> None:
        begins = not any("role" in entry for entry in session.view.entries())
        if begins and crow.store is not None and not session.parent:
            session.state[WANTED] = True

    def begin(session: Session) -> Recording | None:
        """Return the recording of a session, which begins if it is wanted."""
        if session.state.pop(WANTED) and is_in_repository(session.cwd):  # else a task would be too much
            session.state[RECORDING] = Recording(session)
        return session.state[RECORDING]

    @crow.model_call
    def begin_beside_request(session: Session, model_call: ModelCall) -> None:
        if WANTED in session.state:
            asyncio.get_running_loop().call_later(START_DELAY, begin, session)

    @crow.before_tool
    async def wait_before_acting(session: Session, tool_call: ToolCall) -> ToolResult | None:
        while session.parent:
            session = session.parent
        if tool_call.kind not in READING_KINDS and (recording := begin(session)):
            await recording.finish()

    @crow.session_end
    async def end(session: Session) -> None:
        if not any("role" in entry for entry in session.log):
            session.state.pop(WANTED)
        if recording := begin(session):
            await recording.finish()
