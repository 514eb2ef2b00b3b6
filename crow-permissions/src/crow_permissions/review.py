"""Review: a command runs at once on a copy of the folders, and the user is asked afterwards about what it changed.

`crow_sandbox` runs it and applies the changes; here it is decided which are applied.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from crow_core.acp.schema import BlockContent, SessionInfoUpdate, TextBlock, ToolCallFields
from crow_core.content import to_announcement
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import find_prompts, list_edits
from crow_core.messages.notes import EditNotes
from crow_core.session.session import Session
from crow_core.session.user import PermissionAnswer
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.shortening import shorten_line

from crow_permissions.judgement import Mode, SessionPermissions
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, now
from crow_permissions.lasting import Offer, get_folder
from crow_permissions.private_files import describe_missed, find_private_files, list_in_git
from crow_permissions.rules import COMMAND_TOOL
from crow_permissions.shown_changes import (
    NOTED_LIMIT,
    ChangeSet,
    describe_changes,
    is_text,
    list_untracked_removals,
    make_diffs,
    read_text,
    show_name,
    sort_changes,
)
from crow_permissions.subjects import find_subject, has_posix_shell

if TYPE_CHECKING:
    from crow_sandbox.applying import AppliedChange
    from crow_sandbox.lasting import LastingRun, Look
    from crow_sandbox.policy import Level, Policy
    from crow_sandbox.proxy import Decision
    from crow_sandbox.sandbox import Sandbox, SandboxRun

P = ParamSpec("P")
R = TypeVar("R")
UNDO_BYTES = 500_000
"""The largest file whose text is kept for /undo."""
UNDO_FILES = 200
UNDO_CHARACTERS = 2_000_000
"""The most files of one command, and the most characters in them, that are kept for /undo."""
NAME_CHARACTERS = 200
"""Characters of a path that a fault names."""
UNDOABLE = [("file", "added"), ("file", "changed"), ("file", "removed"), ("folder", "added")]
"""The types and kinds of changes whose texts /undo can keep."""
ASKS_BEFORE = "Commands are asked about before they run"
LIMITS_YOLO = 'In yolo, commands run in the sandbox "workspace", by [sandbox] yolo.'
ENDS_SESSION = "It goes on in its session; discarding ends the session."
NOT_IN_VIEW = {
    "hardlink different from source": "In the sandbox, git clones a local folder only with --no-hardlinks, or from file://",
    "Invalid cross-device link": "In the sandbox, an earlier folder cannot be renamed: `mv` copies it, and "
    "`git add -A` does what `git mv` does",
}
"""For what programs say where the copy-on-write view has no hard links to earlier files and renames no earlier folder:
what the model is told then."""

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

    def __init__(self, settings: ReviewSettings) -> None:
        self.settings = settings
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
        """Forget a command."""
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


@dataclass(frozen=True)
class ReviewDecision:
    """The decision about the changes that a command made, and its reason."""

    applies: bool
    by: str
    answer: KeptAnswer | None = None
    choice: PermissionAnswer | None = None
    """The user's answer, if the user was asked."""
    failed: bool = False
    """True if the changes were to be applied, and could not be."""


async def decide_changes(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, found: ChangeSet
) -> ReviewDecision | None:
    """Decide about changes by the mode, the rules and the answers; None if the user is asked."""
    mode = permissions.mode
    if command.in_plan or mode == "plan":
        return ReviewDecision(False, "plan mode")
    if found.denied:
        return ReviewDecision(False, f"the rule {found.denied[1]!r} says deny, and this changes {found.denied[0]}")
    if mode == "yolo":
        return ReviewDecision(True, "mode yolo")
    if found.must_ask:
        return None
    if found.only_caches:
        return ReviewDecision(True, "only caches have changed")
    if mode == "accept-edits":
        return ReviewDecision(True, "mode accept-edits")
    rule = get_answer_rule(session, command.line or command.tool_call)
    answer = permissions.find_answer([rule], get_folder(session))
    if answer is None or not answer.allows:
        return None
    git = await asyncio.to_thread(list_tracked, found)
    if list_untracked_removals(found, git):
        return None
    return ReviewDecision(True, f"the user answered so {answer.place}", answer)


def get_answer_rule(session: Session, tool_call: ToolCall) -> AnswerRule:
    """Return the rule of an answer about all that a command changes."""
    return AnswerRule("changes", tool_call.name, find_subject(session, tool_call))


def to_session(command: ReviewedCommand) -> ReviewedCommand:
    """Convert a command at the level `review` to one that opens a session."""
    from crow_sandbox.lasting import LastingRun  # imported here: a conversation may open no session

    command.is_in_terminal, command.lasting, command.line = True, LastingRun(command.run), command.tool_call
    return command


def list_tracked(found: ChangeSet) -> set[str]:
    """List the removed files that git has, by their absolute paths."""
    removed = [each.change for each in found.shown if each.change.kind == "removed" and each.change.type != "folder"]
    roots = {change.layer.root for change in removed}
    names = {root: [change.path for change in removed if change.layer.root == root] for root in roots}
    return {path for root in roots for path in list_in_git(root, names[root])}


async def ask_about_changes(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, found: ChangeSet
) -> ReviewDecision:
    """Ask the user whether changes are applied; without an answer they are not.

    Raises EndTurn if the client answers that the turn is cancelled, and SandboxError if the changes cannot be read.
    """
    tool_call = command.tool_call
    announcement = to_announcement(tool_call, session.cwd)
    count = len(found.list_names()) or len(found.shown)
    things = "file or folder" if count == 1 else "files or folders"
    told = f"It ran in the sandbox, and would change {count:,} {things}."
    told += f" {ENDS_SESSION}" if command.is_in_terminal else ""
    text = f"{told}\n\n{await work_on_files(describe_changes, found)}"
    diffs = await work_on_files(make_diffs, found, session.secrets)
    about = ToolCallFields(
        tool_call_id=tool_call.id,
        title=announcement.title,
        name=announcement.name,
        kind=tool_call.kind,
        status="pending",
        locations=announcement.locations,
        raw_input=announcement.raw_input,
        content=[BlockContent(content=TextBlock(text=text)), *diffs],
        meta={"crow": {"changed": count}},
    )
    rule, folder = get_answer_rule(session, command.line or tool_call), get_folder(session)
    offers = [Offer("allow-session", KeptAnswer(True, rule, "session", "", now()))]
    if permissions.kept is not None:
        offers.append(Offer("allow-folder", KeptAnswer(True, rule, "folder", folder, now())))
    options = [offer.to_option() for offer in offers]
    answer = await session.user.ask_allowed(about, options, yes="Apply", no="Discard")
    if answer.allowed and answer.choice.command:  # another command is another run
        return ReviewDecision(False, "the user wants another command: " + to_line(answer.choice.command), choice=answer)
    chosen = next((offer.answer for offer in offers if offer.option_id == answer.choice.option_id), None)
    return ReviewDecision(answer.allowed, answer.reason, chosen, answer)


def to_edits(applied: "Sequence[AppliedChange]") -> tuple[list[EditNotes], list[str]]:
    """Convert applied changes to edits that can be undone, and name those that cannot."""
    edits, stays, characters = list[EditNotes](), list[str](), 0
    for each in applied:
        change, root = each.change, each.change.layer.root
        if change.mode_only or (change.type, change.kind) not in UNDOABLE:
            stays.append(show_name(change.path))
            continue
        for name in [change.path] if change.type == "file" else list_applied(change.path, root):
            path = os.path.join(root, name)
            old = read_text(each.before, UNDO_BYTES) if each.before else None
            new = read_text(Path(path), UNDO_BYTES) if change.kind != "removed" else None
            is_known = (old is not None or each.before is None) and (new is not None or change.kind == "removed")
            characters += len(old or "") + len(new or "")
            if not is_known or not is_text(path) or len(edits) >= UNDO_FILES or characters > UNDO_CHARACTERS:
                stays.append(show_name(name))
                continue
            edits.append({"path": path, "old": old, "new": new, "before": to_digest(old), "after": to_digest(new)})
    return edits, stays


def list_applied(folder: str, root: Path) -> list[str]:
    """List the files below a folder that was applied, from the root, up to those that can be kept."""
    names: list[str] = []
    for place, _, files in os.walk(root / folder):
        names += [os.path.relpath(os.path.join(place, file), root) for file in files]
        if len(names) > UNDO_FILES:
            return [folder]  # which is no file, and so is named as one that stays
    return names


def to_digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def explain_limits(result: ToolResult) -> ToolResult:
    """Tell the model what to do instead, if a command has failed for what the copy-on-write view does not have."""
    texts = [str(block.get("text", "")) for block in result.content if result.meta.get("crow/exit")]
    for complaint, note in NOT_IN_VIEW.items():
        if any(complaint in text for text in texts):
            result = add_note(result, note)
    return result


def add_note(result: ToolResult, note: str) -> ToolResult:
    """Add a sentence for the model to a result."""
    return replace(result, content=[*result.content, *ToolResult.text(f"[{note}]").content])


def describe_discarded(found: ChangeSet, decision: ReviewDecision) -> str:
    """Tell the model which changes were discarded, and by whom."""
    names = found.name_files()
    choice = decision.choice
    if choice and not choice.allowed and choice.reason.startswith("the user rejected it"):
        said = f" The user says: {choice.choice.reason}" if choice.choice.reason else ""
        return f"The user discarded what this changed: {names}; the files are as before.{said}"
    return f"What this changed was discarded ({decision.by}): {names}; the files are as before."


def take_names(found: ChangeSet) -> list[str]:
    """Return the changed paths for the record of a decision."""
    names = found.list_names() or [each.name for each in found.shown]
    more = [f"and {len(names) - NOTED_LIMIT:,} more"] if len(names) > NOTED_LIMIT else []
    return [*names[:NOTED_LIMIT], *more]


def sort_for(session: Session, permissions: SessionPermissions, command: ReviewedCommand) -> ChangeSet:
    """Read and sort what a command changed. Raises SandboxError."""
    rules, own, protected = permissions.rules, permissions.own_folders, permissions.protected
    return sort_changes(session, rules, own, protected, command.changed.read_changes())


async def settle_changes(
    session: Session, permissions: SessionPermissions, command: ReviewedCommand, result: ToolResult
) -> tuple[ToolResult, ChangeSet, ReviewDecision | None]:
    """Apply or discard what a command changed, and return its result with what the model and /undo need to know.

    Raises EndTurn if the client answers that the turn is cancelled; then all is discarded.
    """
    from crow_sandbox.policy import SandboxError

    result = explain_limits(result)
    found, decision, run = ChangeSet(), None, command.changed
    result.meta["crow/stays"] = []
    try:
        if missed := await work_on_files(command.describe_missed, result):
            result = add_note(result, missed)
        found = await work_on_files(sort_for, session, permissions, command)
        if found.left:
            result = add_note(result, f"Never applied, as no ordinary files: {', '.join(found.left[:12])}")
        if not found.shown:
            return result, found, None
        decision = await decide_changes(session, permissions, command, found)
        if decision is None:
            async with permissions.queue:  # the answer to the question before may have settled this one
                decision = await decide_changes(session, permissions, command, found)
                decision = decision or await ask_about_changes(session, permissions, command, found)
        if not decision.applies:
            if decision.choice:
                result.meta["crow/denied"] = decision.by
            return add_note(result, describe_discarded(found, decision)), found, decision
        edits, stays = await work_on_files(apply_changes, session, run, found)
        result.meta["crow/changes"] = edits
        result.meta["crow/stays"] = stays[:NOTED_LIMIT]
    except SandboxError as error:
        said = show_name(str(error))
        decision = ReviewDecision(False, said, failed=True)
        said = f"What this changed could not be applied: {said}"
        if run.is_unfinished:
            del result.meta["crow/stays"]
            result = add_note(result, f"{said} Some of the files may be changed.")
        else:
            result = add_note(result, f"{said} The files are as before.")
    finally:
        await finish_in_thread(run.remove)
    return result, found, decision


def apply_changes(session: Session, run: "SandboxRun | Look", found: ChangeSet) -> tuple[list[EditNotes], list[str]]:
    """Apply changes, and return them as edits that can be undone, and what cannot. Raises SandboxError if none are
    applied.

    The edits are kept for a turn that is cancelled before the result is in the log.
    """
    applied = run.apply(found.changes)
    try:
        edits, stays = to_edits(applied)
    except Exception:  # they are applied: whatever fails here, they count as changes that stay
        edits, stays = [], take_names(found)
    edits = mask(edits, session.secrets)
    session.state[REVIEW].applied.append(edits)
    return edits, stays


def return_to_start(session: Session, command: ReviewedCommand, result: ToolResult) -> ToolResult:
    """Let the next command start where this one did, if the folder in which it ended was discarded."""
    folder = result.meta.get("crow/folder", "")
    if not folder or os.path.isdir(folder):
        return result
    result.meta["crow/folder"] = command.start
    if shell := result.meta.get("crow/shell"):
        result.meta["crow/shell"] = {**shell, "folder": command.start}
    return add_note(result, f"{to_line(folder)} does not exist outside of the sandbox; back in {command.start}")


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
