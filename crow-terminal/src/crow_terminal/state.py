"""The state of the terminal: each event is a method that changes it and returns the effects to carry out.

Nothing here prints, waits or reads a clock: times are arguments, in seconds of one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crow_core.acp.schema import (
    AuthMethod,
    AvailableCommand,
    AvailableCommandsUpdate,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    PromptResponse,
    SessionConfigOption,
    SessionInfoUpdate,
    SessionModeState,
    SessionUpdate,
    Usage,
    UsageUpdate,
)
from msgspec import UNSET
from msgspec.structs import replace

from crow_terminal.blocks import KEPT_LINES, Block, BlockRecord, CommandOutput, Note, UserPrompt
from crow_terminal.dialogs import TextDialog
from crow_terminal.effects import (
    CallBackground,
    Cancel,
    Edit,
    Effect,
    Leave,
    LogIn,
    Open,
    Run,
    Send,
    Show,
    Steer,
    StopCommand,
)
from crow_terminal.open_questions import NEVER, NOTIFY_AFTER, WITHDRAWN, OpenQuestions, find_call
from crow_terminal.paint import format_seconds
from crow_terminal.printable_text import escape_line
from crow_terminal.prompt_queue import PromptQueue
from crow_terminal.question import Question
from crow_terminal.session_options import OfferedOptions
from crow_terminal.stops import describe_stop

LEAVE_WITHIN = 2.0
"""Seconds between two Ctrl-C that leave."""
NOT_SENT = "Nothing runs that can go to the background: a command or a sub-agent."
LEAVE_HINT = "Ctrl-C again leaves."


@dataclass
class State(OpenQuestions):
    """The terminal, as far as it can be known without a terminal."""

    branch: str = ""
    has_page: bool = False
    """True if a browser can show the session."""
    has_worktrees: bool = False
    """True if the user can go on in a git worktree."""
    turns: list[str] = field(default_factory=list[str])
    """The prompts to go back to that the user was offered last, newest first."""
    queue: PromptQueue = field(default_factory=PromptQueue)
    command: str = ""
    """The user's command that runs."""
    command_lines: list[str] = field(default_factory=list[str])
    command_hidden: int = 0
    """The lines of its output before `command_lines`."""
    step_since: float = 0.0
    """The time since which the turn waits for the model: it was asked, or the last tool call ended."""
    options: OfferedOptions = field(default_factory=OfferedOptions)
    commands: list[AvailableCommand] = field(default_factory=list[AvailableCommand])
    usage: UsageUpdate | None = None
    cached: float | None = None
    """The share of the tokens of the last turn that came from the server's cache."""
    title: str = ""
    interrupted: float = NEVER
    """The time of the last Ctrl-C, if no other key followed it."""
    background: list[str] = field(default_factory=list[str])
    """The titles of what runs in the background."""
    sandbox: str = ""
    """True if commands run in a sandbox, as the status line shows it; empty before the first one."""
    fold_output: bool = True
    loading: bool = False
    """True if a stored session is being shown."""
    login: AuthMethod | None = None
    """The log-in that Enter runs; None if Enter opens the session again."""
    by_agent: bool = False
    """True if the running turn is one that the agent has begun by itself."""
    muted: bool = False
    """True if updates are not shown, as they were before."""

    @property
    def busy(self) -> bool:
        """True if something runs that Esc stops."""
        return self.phase == "working" or bool(self.command)

    def is_moving(self, now: float) -> bool:
        """True if what is shown changes with time."""
        return (self.busy and not self.asked) or (bool(self.hint) and now < self.hint_until + 0.2)

    # The agent

    def open_session(
        self, modes: SessionModeState | None, options: Sequence[SessionConfigOption], now: float
    ) -> list[Effect]:
        """A session is open."""
        self.phase, self.loading, self.muted = "ready", False, False
        self.options = OfferedOptions(modes, options)
        return [*self._end_blocks(now), *self._send_next(now)]

    def leave_session(self, name: str = "New session", *, again: bool = False) -> list[Effect]:
        """The session is closed, as another one of this `name` is opened, or the same one `again`.

        The name is empty if no session was open.
        """
        effects = self._cancel_questions()
        self.queue.leave_steers()
        self.phase, self.commands, self.by_agent, self.stopped = "starting", [], False, 0
        self.muted, self.loading = again, not again
        effects += self._end_background()
        if not again:
            self.transcript, self.usage, self.cached, self.title = BlockRecord(), None, None, ""
            self.sandbox = ""
            self.turns, self.folded = [], []
            effects += self.remark(name, "rule") if name else []
        return effects

    def receive(self, update: SessionUpdate, now: float) -> list[Effect]:
        """The agent has sent an update."""
        match update:
            case AvailableCommandsUpdate(available_commands=commands):
                self.commands = [*commands]
            case CurrentModeUpdate(current_mode_id=mode):
                self.options.set_mode(mode)
            case ConfigOptionUpdate(config_options=options):
                self.options.config = options
            case UsageUpdate():
                known = self.usage.cost if self.usage else UNSET
                self.usage = replace(update, cost=update.cost or known)
            case SessionInfoUpdate(meta={"crow": {"sandbox": str(level)}}):
                self.sandbox = "no sandbox" if level == "off" else f"sandbox: {escape_line(level)}"
            case SessionInfoUpdate(meta={"crow": {"background": [*titles]}}):
                self.background = [escape_line(str(title)) for title in titles]
            case SessionInfoUpdate(meta={"crow": {"turn": "began"}}):
                return self._begin_by_agent(now)
            case SessionInfoUpdate(meta={"crow": {"turn": "ended"}}):
                return self._end_by_agent(now)
            case SessionInfoUpdate(title=title):
                self.title = escape_line(title) if isinstance(title, str) else self.title
            case _ if self.muted:
                pass
            case _:
                running = bool(self.transcript.running)
                effects = self._show(self.transcript.add(update, now))
                if running and not self.transcript.running:
                    self.step_since = now
                return effects
        return []

    def _begin_by_agent(self, now: float) -> list[Effect]:
        """A turn begins that nobody here has prompted, such as that of a timer."""
        if self.phase != "ready":
            return []
        self.phase, self.cancelled, self.by_agent = "working", False, True
        self.since = self.step_since = now
        return self._show(self.transcript.end_text())

    def _end_by_agent(self, now: float) -> list[Effect]:
        """That turn has ended."""
        if not self.by_agent:
            return []
        self.phase, self.cancelled, self.hint, self.by_agent = "ready", False, "", False
        return [*self._end_blocks(now), *self._cancel_questions(), *self._send_next(now)]

    def end_turn(self, response: PromptResponse, now: float) -> list[Effect]:
        """The agent has answered a prompt."""
        effects = self._end_blocks(now)
        seconds = now - self.since
        usage = response.usage
        if isinstance(usage, Usage) and isinstance(usage.cached_read_tokens, int) and usage.input_tokens > 0:
            self.cached = usage.cached_read_tokens / usage.input_tokens
        if sentence := describe_stop(response):
            effects.append(Show(Note(sentence, "warning")))
        elif seconds >= NOTIFY_AFTER:
            effects.append(Show(Note(f"Took {format_seconds(seconds)}.", "done")))
        if not self.queue:
            effects += self._ring(f"{self.agent} is done", now)
        self.phase, self.cancelled, self.hint = "ready", False, ""
        if self.asked:
            self.show_hint(WITHDRAWN, now)
        return [*effects, *self._cancel_questions(), *self._send_next(now)]

    def fail_turn(self, sentence: str, now: float) -> list[Effect]:
        """The agent has answered a prompt with an error."""
        effects = self._end_blocks(now)
        self.phase, self.cancelled, self.queue.returning = "ready", False, bool(self.queue.steers)
        return [*effects, Show(Note(sentence, "error")), *self._cancel_questions(), *self.queue.restore()]

    def end_agent(self, sentence: str, now: float, login: AuthMethod | None = None) -> list[Effect]:
        """The connection to the agent has ended, or it could not be opened, as the agent wants this log-in first."""
        effects = self._end_blocks(now)
        self.queue.leave_steers()
        self.phase, self.login = "ended", login
        stop = "" if sentence.endswith((".", "!", "?")) else "."
        gap = "\n" if "\n" in sentence or login else " "
        note = Note(f"{sentence}{stop}{gap}Enter{f': {login.name}' if login else ' starts it again'}.", "error")
        return [*effects, Show(note), *self._end_background(), *self._cancel_questions(), *self.queue.restore()]

    def _end_background(self) -> list[Effect]:
        """Background work ends with the session."""
        sentence, self.background = self.describe_background_end(), []
        return self.remark(sentence, "warning") if sentence else []

    def describe_background_end(self) -> str:
        """Say what ends with the session; empty for nothing."""
        return f"Stopped with the session: {', '.join(self.background)}." if self.background else ""

    def end_steer(self, steer: Steer, taken: bool, now: float) -> list[Effect]:
        """The agent has answered whether the running turn has the words."""
        if not any(one is steer for one in self.queue.steers):
            return []  # the agent has ended meanwhile
        effects = self._show(self.transcript.end_text()) if taken else []
        effects += self.queue.end_steer(steer, taken=taken)
        return [*effects, *self._send_next(now)]

    def remark(self, sentence: str, severity: str = "info") -> list[Effect]:
        """Something is to be said to the user."""
        return self._show([Note(sentence, severity)])

    # The user

    def submit(self, text: str, now: float, *, later: bool = False) -> list[Effect]:
        """The user has pressed Enter, with this text in the editor; `later` keeps it for after the turn."""
        if isinstance(self.dialog, TextDialog) and self.writes_answer:
            return self.dialog.submit(text, now)
        stripped = text.strip()
        if not stripped:
            return self._submit_nothing()
        if stripped.startswith("!"):
            if self.command:
                self.show_hint("A command runs already; Esc stops it.", now)
                return []
            return [Edit(""), *self._run(stripped, now)]
        if self._can_steer(stripped) and not later:
            return [Edit(""), self.queue.steer(text)]
        if self.phase != "ready" or self.command or self.queue.steers:
            self.queue.prompts.append(text)
            restart: list[Effect] = []
            if self.phase == "ended":
                restart = self._restart()
            return [Edit(""), *restart]
        return [Edit(""), *self._send(text, now)]

    def _submit_nothing(self) -> list[Effect]:
        if self.asked:
            return []
        if self.phase == "ended":
            return self._restart()
        if self.phase == "working" and self.queue and not self.cancelled:
            self.cancelled = True
            return [Cancel()]  # the next prompt of the queue follows
        return []

    def _can_steer(self, text: str) -> bool:
        """True if words join the running turn; slash commands, and all while the user's command runs, do not."""
        runs = self.phase == "working" and not self.cancelled and not self.command
        return self.abilities.steers and runs and not text.startswith("/")

    def _restart(self) -> list[Effect]:
        self.phase = "starting"
        if self.login:
            return [LogIn(self.login.args, self.login.env)]
        return [Open(again=True)]

    def begin_turn(self, text: str, now: float) -> list[Effect]:
        """A prompt is sent, which was said here or on the page."""
        self.phase, self.cancelled = "working", False
        self.since = self.step_since = now
        return self._show([*self.transcript.end_text(), UserPrompt(text)])

    def _send(self, text: str, now: float) -> list[Effect]:
        # Before a slash command, nothing may stand: the agent would not know it.
        outputs = () if text.startswith("/") else self.queue.take_outputs()
        return [*self.begin_turn(text, now), Send(text, outputs)]

    def _send_next(self, now: float) -> list[Effect]:
        """Send the next prompt of the queue."""
        waits = self.phase != "ready" or self.command or self.queue.steers
        return self._send(self.queue.prompts.pop(0), now) if self.queue.prompts and not waits else []

    def _run(self, text: str, now: float) -> list[Effect]:
        shared = not text.startswith("!!")
        command = text.lstrip("!").strip()
        if not command:
            self.show_hint("Write a command after the `!`.", now)
            return []
        self.command, self.command_lines, self.command_hidden = command, [], 0
        if self.phase != "working":
            self.since = now
        return [Run(command, shared)]

    def extend_command(self, lines: Sequence[str]) -> list[Effect]:
        """The user's command has printed some lines."""
        known = [*self.command_lines, *lines]
        self.command_lines = known[-KEPT_LINES:]
        self.command_hidden += len(known) - len(self.command_lines)
        return []

    def end_command(self, output: CommandOutput, shared: bool, now: float) -> list[Effect]:
        """The user's command has ended."""
        self.command, self.command_lines = "", []
        if shared:
            self.queue.outputs.append(output)
        return [*self._show([output]), *self._send_next(now)]

    def stop(self, now: float) -> list[Effect]:
        """The user has pressed Esc: stop what runs, and stay."""
        if self.command:
            return [StopCommand()]
        if isinstance(self.dialog, TextDialog) and isinstance(self.dialog.back, Question):
            self.dialog, self.is_open = self.dialog.back, False
            return [Edit("")]
        if isinstance(self.dialog, Question) and self.dialog.is_about_lasting:
            self.dialog.enter_step(lasting=False)
            return []
        if self.dialog and not isinstance(self.dialog, Question):
            return self._dismiss(now)
        return self.cancel(now)

    def cancel(self, now: float) -> list[Effect]:
        """Cancel the turn with its questions, and those that an agent asks without a turn."""
        asked: list[Block] = []
        if isinstance(self.dialog, Question):
            self.transcript.note_shown(self.asked_call)
            asked = [self.dialog.record("not answered, as the turn was stopped")]
        if self.phase != "working":
            return [*self._show(asked), *self._cancel_questions()]
        restored = self.queue.restore()
        self.queue.returning = bool(self.queue.steers)
        if self.cancelled:
            return restored
        self.cancelled = True
        for call in (self.asked_call, *(find_call(request) for _, request in self.waiting)):
            self.transcript.leave_question(call)
        self.show_hint("Stopping…", now)
        return [*self._show(asked), *restored, Cancel(), *self._cancel_questions()]

    def send_to_background(self, now: float) -> list[Effect]:
        """The user has pressed Ctrl-B."""
        if self.abilities.backgrounds and self.phase == "working":
            return [CallBackground("send")]
        self.show_hint(NOT_SENT if self.abilities.backgrounds else "This agent has no background.", now)
        return []

    def end_send(self, sent: int, now: float) -> list[Effect]:
        """The agent has answered how much it sent to the background."""
        if not sent:
            self.show_hint(NOT_SENT, now)
        return []

    def interrupt(self, text: str, now: float) -> list[Effect]:
        """The user has pressed Ctrl-C."""
        again = now - self.interrupted < LEAVE_WITHIN
        self.interrupted = now
        if again:
            return [Leave()]
        effects: list[Effect] = [Edit("")] if text else []
        if self.busy or self.dialog:
            effects = self.stop(now)
        self.show_hint(LEAVE_HINT, now, LEAVE_WITHIN)
        return effects

    def disarm(self) -> None:
        """The user has pressed another key than Ctrl-C: the next Ctrl-C does not leave."""
        if self.interrupted != NEVER:
            self.interrupted = NEVER
            self.hint = "" if self.hint == LEAVE_HINT else self.hint

    # What is printed

    def take_back(self, turns: int, sentence: str) -> list[Effect]:
        """The agent has taken back the last turns."""
        text = self.turns[turns - 1] if turns <= len(self.turns) else ""
        return [*self._show([Note(sentence, "warning")]), Edit(text)]

    def unfold(self, now: float) -> list[Effect]:
        """Print the last folded block whole; each further time the one before it."""
        if not self.folded:
            self.show_hint("Nothing is folded.", now)
            return []
        return [Show(self.folded.pop(), whole=True)]
