"""Review: a command runs at once on a copy of the folders, and the user is asked afterwards about what it changed.

`crow_sandbox` runs it and applies the changes; here it is decided which are applied.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from crow_core.acp.schema import SessionInfoUpdate
from crow_core.hooks import Collect
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import find_prompts, list_edits
from crow_core.messages.notes import EditNotes
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.shortening import shorten_line

from crow_permissions.judgement import Mode, SessionPermissions
from crow_permissions.private_files import describe_missed, find_private_files
from crow_permissions.rules import COMMAND_TOOL
from crow_permissions.shown_changes import (
    show_name,
)
from crow_permissions.subjects import has_posix_shell

if TYPE_CHECKING:
    from crow_sandbox.lasting import LastingRun, Look
    from crow_sandbox.policy import Level, Policy
    from crow_sandbox.proxy import Decision
    from crow_sandbox.sandbox import Sandbox, SandboxRun

P = ParamSpec("P")
R = TypeVar("R")
NAME_CHARACTERS = 200
"""Characters of a path that a fault names."""
ASKS_BEFORE = "Commands are asked about before they run"
LIMITS_YOLO = 'In yolo, commands run in the sandbox "workspace", by [sandbox] yolo.'

Launch = Callable[
    [Sequence[str], Mapping[str, str], str, Sequence[str], Sequence[str]], tuple[list[str], dict[str, str]]
]


@dataclass(frozen=True)
class ReviewSettings:
    """The way in which commands run in the sandbox."""

    folder: Path
    """Holds the runs; in crow's data."""
    is_wanted: bool = False
    """True if the user has asked for it, and so is told where it is not possible."""
    expose: Sequence[str] = ()
    hosts: Sequence[str] = ()
    private: Sequence[str] = ()
    """Patterns of private files, in addition to those of private_data.toml."""
    reviews: bool = True
    """False if a command about which crow would ask never runs before the question."""
    limits_yolo: bool = False
    """True if commands that the mode yolo allows write only to the folders, and see no credentials."""


@dataclass
class ReviewedCommand:
    """A command in the sandbox, until what it changed is applied or discarded."""

    run: "SandboxRun"
    tool_call: ToolCall
    start: str
    """The folder in which it started."""
    in_plan: bool
    """True if it began in the mode plan."""
    has_started: bool = False
    is_running: bool = False
    """True if its tool call has been answered, and it runs on."""

    is_in_terminal: bool = False
    """True if it is a session of the terminal, which is looked at after each call for it until it ends."""
    lasting: "LastingRun | None" = None
    """The run of a session on its copy, at the level `review`; None for no session."""
    look: "Look | None" = None
    """The new changes in a session while the user decides about them; None at other times."""
    line: ToolCall | None = None
    """The call that gave the last command line of a session; an answer about changes is for this line."""
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a session is looked at."""
    decisions: int = 0
    """The number of decisions about hosts at the last look at a session."""

    @property
    def changed(self) -> "SandboxRun | Look":
        """The changes to apply or discard."""
        return self.look or self.run

    def launch(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        folders: Sequence[str],
        readable: Sequence[str],
    ) -> tuple[list[str], dict[str, str]]:
        """Return how the command starts in the sandbox. Raises SandboxError."""
        self.has_started = True
        given, in_terminal = {**env, "GIT_OPTIONAL_LOCKS": "0"}, self.is_in_terminal
        wrapped, changed = self.run.wrap(arguments, given, cwd, folders, readable, in_terminal=in_terminal)
        script = env.get("BASH_ENV", "")  # the tool's own, which saves the shell's state; others stay outside
        if any(script.startswith(os.path.join(folder, "")) for folder in folders):
            changed["BASH_ENV"] = script
        return wrapped, changed

    def describe_missed(self, result: ToolResult) -> str:
        """Say which hidden files the command wanted, as far as its text and its result tell; "" for none."""
        arguments = self.tool_call.arguments
        command = str(arguments.get("command") or arguments.get("input") or "")
        return describe_missed(command, result, self.run.policy.private, self.start)

    def list_refused(self) -> "Sequence[Decision]":
        """List the hosts that the command was refused."""
        return self.run.network.refused(self.decisions) if self.run.network else ()

    def remove(self) -> None:
        """Discard what is not applied, and remove the view of a session."""
        if self.lasting:
            self.lasting.close()
        self.run.remove()

    def change_hosts(self, hosts: Sequence[str], denied: Sequence[str]) -> None:
        """Let a session reach these hosts from now on."""
        self.run.policy = replace(self.run.policy, hosts=tuple(hosts), denied=tuple(denied))
        if self.run.network:
            self.run.network.change(hosts, denied)

    def add_refused(self, result: ToolResult, because: str) -> ToolResult:
        """Add the line about the hosts that the command was refused to a result."""
        from crow_sandbox.network import describe_refused

        said = describe_refused(self.list_refused(), because)
        return add_note(result, said) if said else result


@dataclass
class SessionReview:
    """The sandbox of a session and its commands."""

    sandbox: "Sandbox | None" = None
    """None before the first command."""
    level: "Level" = "off"
    """The level that was proven for commands."""
    told: "Level | None" = None
    """The level that the client was told."""
    fault: str = ""
    """Why there is no sandbox, as a sentence."""
    commands: dict[str, ReviewedCommand] = field(default_factory=dict[str, ReviewedCommand])
    """The open commands, by the ids of the tool calls that began them."""
    proving: asyncio.Lock = field(default_factory=asyncio.Lock)
    applied: list[list[EditNotes]] = field(default_factory=list[list[EditNotes]])
    """The changes that this turn's commands made and that were applied, each as its result has it."""
    open_names: Sequence[str] = ()
    """The names of the open sessions of the terminal, as the last result tells."""
    used: dict[str, str] = field(default_factory=dict[str, str])
    """For each running tool call for an open session in the sandbox, the id of the call that opened it."""
    ending: set[str] = field(default_factory=set[str])
    """Of these calls, the ids of those openers whose session ends with the call if that is cancelled."""


REVIEW = StateKey("review", SessionReview)
REACHABLE = StateKey("reachable", dict[str, Sequence[str]])
"""The patterns of the hosts that commands in the sandbox may reach, by the ids of their calls: nothing leaves for other
hosts."""


def find_launch(session: Session, call: str) -> Launch | None:
    """Find how the command of a tool call starts; None if it runs outside of the sandbox."""
    command = session.state[REVIEW].commands.get(call)
    return command.launch if command else None


def is_own_command(tool_call: ToolCall) -> bool:
    """Test whether a tool call is of crow's own terminal."""
    server = tool_call.tool and tool_call.tool.server
    return tool_call.name == COMMAND_TOOL and bool(server and server.built_in)


def can_review(session: Session, tool_call: ToolCall, level: "Level" = "review") -> bool:
    """Test whether a tool call is a command that can run in the sandbox, or is for a session of the terminal that does.

    A session that runs outside takes no command of the sandbox.
    """
    arguments, state = tool_call.arguments, session.state[REVIEW]
    if not is_own_command(tool_call) or not has_posix_shell(tool_call):
        return False
    if opened := find_opened(session, tool_call):
        return opened.run.policy.level == level
    has_input = any(arguments.get(name) not in (None, "") for name in ("input", "keys"))
    is_new = arguments.get("session") not in state.open_names
    return isinstance(arguments.get("command"), str) and not has_input and is_new


def find_opened(session: Session, tool_call: ToolCall) -> "ReviewedCommand | None":
    """Find the open session in the sandbox that a tool call is for."""
    name = tool_call.arguments.get("session")
    commands = session.state[REVIEW].commands.values() if name else ()
    return next((each for each in commands if each.is_in_terminal and get_name(each) == name), None)


def use_opened(state: "SessionReview", opened: "ReviewedCommand", tool_call: ToolCall) -> None:
    """Note that a tool call is for an open session, which the tool ends if a command in it is cancelled."""
    state.used[tool_call.id] = opened.tool_call.id
    if tool_call.arguments.get("command"):
        state.ending.add(opened.tool_call.id)


def get_name(command: "ReviewedCommand") -> str:
    """Return the name of the session that a command opened; "" for none."""
    return str(command.tool_call.arguments.get("session") or "")


def find_opener(session: Session, call: str) -> str | None:
    """Find the id of the call that opened the session in the sandbox for which a call was judged; None for none."""
    state = session.state[REVIEW]
    command = state.commands.get(call)
    return state.used.get(call) or (call if command and command.is_in_terminal else None)


class Review:
    """Runs commands in the sandbox, and asks about what they changed. One for an app."""

    def __init__(self, settings: ReviewSettings, must_ask: Collect[[Session, ToolCall], str]) -> None:
        self.settings = settings
        self.must_ask = must_ask
        self._has_finished = False

    async def finish_earlier(self, session: Session) -> None:
        """Complete what an earlier process had begun to apply, and tell the user."""
        if self._has_finished:
            return
        self._has_finished = True
        try:
            if not os.listdir(self.settings.folder):
                return
        except OSError:
            return
        from crow_sandbox.applying import finish_applying  # imported here: mostly there is nothing to finish

        for sentence in await asyncio.to_thread(finish_applying, self.settings.folder):
            await session.notice(to_line(sentence), "warning")

    async def find_sandbox(self, session: Session) -> "Sandbox":
        """Find the sandbox of a session, and the level that holds; the user is told once where it is not `review`."""
        state = session.state[REVIEW]
        async with state.proving:
            if state.sandbox is None:
                from crow_sandbox.sandbox import Sandbox  # imported here: a session may run no command

                sandbox = Sandbox(self.settings.folder)
                standing = await sandbox.prove("review")
                state.sandbox, state.level = sandbox, standing.level
                if standing.level != "review" and self.settings.is_wanted:
                    await session.notice(to_line(f"{ASKS_BEFORE}: {standing.says}"), "warning")
        return state.sandbox

    async def tell_level(self, session: Session, mode: Mode) -> None:
        """Tell the client the level of the next command, once it is known, and when it changes."""
        state = session.state[REVIEW]
        level = state.level if state.level == "review" and self.settings.reviews else "off"
        if mode == "yolo":
            level = "workspace" if self.settings.limits_yolo else "off"
        if state.sandbox and state.told != level and not session.parent:
            state.told = level
            await session.update(SessionInfoUpdate(meta={"crow": {"sandbox": level}}))

    async def may_begin(self, session: Session, mode: Mode, tool_call: ToolCall) -> bool:
        """Return whether the command of a tool call can run in the sandbox."""
        is_possible = self.settings.reviews and can_review(session, tool_call)
        if is_possible:
            await self.find_sandbox(session)
            is_possible = session.state[REVIEW].level == "review"
            await self.tell_level(session, mode)
        if is_possible:
            session.state[REACHABLE][tool_call.id] = ()
        return is_possible

    async def begin(
        self,
        session: Session,
        permissions: SessionPermissions,
        tool_call: ToolCall,
        hosts: Sequence[str],
        denied: Sequence[str],
    ) -> bool:
        """Let the command of a tool call run in the sandbox, where it may reach `hosts` that are not `denied`.

        Return False, and tell the user, if it cannot.
        """
        from crow_sandbox.policy import SandboxError

        state = session.state[REVIEW]
        if opened := find_opened(session, tool_call):
            use_opened(state, opened, tool_call)
            return True
        if state.sandbox is None:
            return False
        try:
            policy = await work_on_files(make_policy, session, permissions, self.settings)
            run = await begin_run(state.sandbox, replace(policy, hosts=tuple(hosts), denied=tuple(denied)))
        except SandboxError as error:
            session.state[REACHABLE].pop(tool_call.id, None)
            if state.fault != str(error):
                state.fault = str(error)
                await session.notice(to_line(f"{ASKS_BEFORE}: {error}"), "warning")
            return False
        start = session.folders.starts.get(tool_call.id) or session.cwd
        session.state[REACHABLE][tool_call.id] = hosts
        command = ReviewedCommand(run, tool_call, start, permissions.mode == "plan")
        state.commands[tool_call.id] = to_session(command) if tool_call.arguments.get("session") else command
        return True

    async def begin_limited(self, session: Session, permissions: SessionPermissions, tool_call: ToolCall) -> str:
        """Let a command that the mode yolo allows write only to the folders; return why that is not possible, or ""."""
        from crow_sandbox.policy import SandboxError

        state = session.state[REVIEW]
        if opened := find_opened(session, tool_call):
            use_opened(state, opened, tool_call)
            return ""
        if not can_review(session, tool_call, "workspace"):
            return f"{LIMITS_YOLO} This is for a session of the terminal that was opened outside of it."
        policy = await work_on_files(make_policy, session, permissions, self.settings)
        policy = replace(policy, level="workspace", hosts=None, private=())
        try:
            run = await begin_run(await self.find_sandbox(session), policy)
        except SandboxError as error:
            return f"{LIMITS_YOLO} {error}"
        command = ReviewedCommand(run, tool_call, session.cwd, in_plan=False)
        command.is_in_terminal = bool(tool_call.arguments.get("session"))
        state.commands[tool_call.id] = command
        await self.tell_level(session, permissions.mode)
        return ""

    def take_ended(self, session: Session, tool_call: ToolCall, result: ToolResult) -> ReviewedCommand | None:
        """Take the command that has ended, as the result of a tool call tells; None if there is none."""
        state = session.state[REVIEW]
        commands, ended = state.commands, result.meta.pop("crow/ended", "")
        state.used.pop(tool_call.id, None)
        if (command := commands.get(tool_call.id)) and ended != tool_call.id:
            command.is_running = command.has_started
            if not command.has_started:  # the tool has refused it
                command.run.remove()
                self.forget(session, tool_call.id)
        found = commands.get(ended)
        return self.forget(session, ended) if found else None

    def take_used(
        self, session: Session, tool_call: ToolCall, result: ToolResult
    ) -> tuple[ReviewedCommand, bool] | None:
        """Take the session in the sandbox that a result is about, and whether it has ended; None for no session."""
        state = session.state[REVIEW]
        if is_own_command(tool_call) and "crow/shell" in result.meta:
            state.open_names = result.meta["crow/shell"].get("sessions", ())
        opener = result.meta.pop("crow/opened", "")
        command = state.commands.get(opener or result.meta.get("crow/ended", ""))
        if command is None or not command.is_in_terminal:
            return None
        result.meta.pop("crow/ended", "")
        state.used.pop(tool_call.id, None)
        state.ending.discard(command.tool_call.id)
        command.is_running = True
        if tool_call.arguments.get("command"):
            command.line = tool_call
        return command, not opener

    def list_lasting(self, session: Session) -> "list[LastingRun]":
        """List the sessions in the sandbox whose changes are asked about."""
        return [each.lasting for each in session.state[REVIEW].commands.values() if each.lasting and each.is_running]

    async def renew(self, session: Session, paths: Sequence[str] = ()) -> None:
        """Let the programs of sessions see changes from outside; `paths` are the files that are known to have
        changed."""
        for lasting in self.list_lasting(session):
            await finish_in_thread(lasting.renew, paths)

    def forget(self, session: Session, call: str) -> ReviewedCommand | None:
        state = session.state[REVIEW]
        session.state[REACHABLE].pop(call, None)
        if (command := state.commands.pop(call, None)) and command.is_in_terminal:
            state.open_names = [name for name in state.open_names if name != get_name(command)]
        return command

    async def note_applied(self, session: Session) -> None:
        """Note for /undo the changes that a turn made before it was cancelled and before the results were in the
        log."""
        state = session.state[REVIEW]
        if session.log.is_frozen:  # it is done when the turn goes on
            return
        if applied := [*filter(None, state.applied)]:
            told = [list_edits(entry) for entry in session.log[find_prompts(session.log)[-1] :]]
            for edits in [each for each in applied if each not in told]:
                session.log.append({"crow": {"kind": "changes", "session": session.id, "changes": edits}})
            await session.log.written()
        state.applied.clear()

    async def drop_cancelled(self, session: Session) -> None:
        """Discard what the commands of a turn changed that was cancelled before their results."""
        state = session.state[REVIEW]
        for call, command in [*state.commands.items()]:
            if not command.is_running or call in state.ending:
                self.forget(session, call)
                await asyncio.to_thread(command.remove)
        state.used.clear()
        state.ending.clear()

    async def close(self, session: Session) -> None:
        """Discard open changes, and end the sandbox of a session."""
        state = session.state[REVIEW]
        for command in state.commands.values():
            await asyncio.to_thread(command.remove)
        state.commands.clear()
        if state.sandbox:
            await state.sandbox.close()


async def begin_run(sandbox: "Sandbox", policy: "Policy") -> "SandboxRun":
    """Begin a run; if this is cancelled meanwhile, remove it. Raises SandboxError."""
    beginning = asyncio.ensure_future(sandbox.begin(policy))
    try:
        return await asyncio.shield(beginning)
    except asyncio.CancelledError:
        await asyncio.wait([beginning])
        if not beginning.exception():
            beginning.result().remove()
        raise


def make_policy(session: Session, permissions: SessionPermissions, settings: ReviewSettings) -> "Policy":
    """Make the policy of a command from the folders of its session; it reaches no hosts."""
    from crow_sandbox.policy import Policy

    given = session.folders.roots
    roots = [*dict.fromkeys(map(os.path.realpath, given))]
    outer = [root for root in roots if not any(root != each and root.startswith(f"{each}/") for each in roots)]
    scratch = [each for each in session.folders.for_tools() if each not in given]
    own = [os.path.realpath(each) for each in permissions.own_folders]
    return Policy(
        "review",
        tuple(outer),
        tuple(map(os.path.realpath, scratch)),
        tuple(own),
        tuple(settings.expose),
        private=tuple(find_private_files(session, permissions.rules, outer, settings.private, settings.expose)),
        addresses=tuple(settings.hosts),
    )


def to_session(command: ReviewedCommand) -> ReviewedCommand:
    """Convert a command at the level `review` to one that opens a session."""
    from crow_sandbox.lasting import LastingRun  # imported here: a conversation may open no session

    command.is_in_terminal, command.lasting, command.line = True, LastingRun(command.run), command.tool_call
    return command


def add_note(result: ToolResult, note: str) -> ToolResult:
    """Add a sentence for the model to a result."""
    return replace(result, content=[*result.content, *ToolResult.text(f"[{note}]").content])


async def work_on_files(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function about the files of a command in a thread to its end. Raises SandboxError for whatever fails."""
    from crow_sandbox.policy import SandboxError

    try:
        return await finish_in_thread(function, *args, **kwargs)
    except SandboxError:
        raise
    except OSError as error:
        name = shorten_line(show_name(str(error.filename or "")), NAME_CHARACTERS)
        raise SandboxError(f"{f'{name}: ' if name else ''}{error.strerror or error}.") from error
    except Exception as error:  # the command may have made any files, and the turn is not to end for them
        said = shorten_line(show_name(str(error)), NAME_CHARACTERS)
        raise SandboxError(f"its files cannot be read ({type(error).__name__}: {said}).") from error


async def finish_in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in a thread to its end, also if this is cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
