"""The state of the terminal: each event is a method that changes it and returns the effects to carry out.

Nothing here prints, waits or reads a clock: times are arguments, in seconds of one clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.client import answer_permission
from crow_core.acp.schema import (
    AvailableCommand,
    AvailableCommandsUpdate,
    ConfigOptionUpdate,
    CreateElicitationRequest,
    CreateElicitationResponse,
    CurrentModeUpdate,
    PromptResponse,
    RequestPermissionRequest,
    SessionConfigOption,
    SessionInfoUpdate,
    SessionModeState,
    SessionUpdate,
    ToolCall,
    Usage,
    UsageUpdate,
)
from msgspec import UNSET, Struct
from msgspec.structs import replace

from crow_terminal.blocks import KEPT_LINES, Block, BlockRecord, Call, CommandOutput, Note, UserPrompt
from crow_terminal.dialogs import Dialog, ListDialog, Row, TextDialog
from crow_terminal.effects import (
    Cancel,
    Edit,
    Effect,
    Leave,
    Open,
    Respond,
    Ring,
    Run,
    Send,
    Show,
    Steer,
    StopCommand,
    Wait,
)
from crow_terminal.forms import Form, start_form
from crow_terminal.markdown import Prose
from crow_terminal.paint import format_seconds
from crow_terminal.permission import Answer, make_answer
from crow_terminal.printable_text import escape_line
from crow_terminal.prompt_queue import PromptQueue
from crow_terminal.question import Question, make_question
from crow_terminal.session_options import OfferedOptions
from crow_terminal.typing_pause import ALONE, PAUSE, TypingPause

LEAVE_WITHIN = 2.0
"""Seconds between two Ctrl-C that leave."""
LEAVE_HINT = "Ctrl-C again leaves."
WITHDRAWN = "The agent does not ask this any more."
NEVER = float("-inf")
HINT_SECONDS = 4.0
"""Seconds that a hint stays."""
NOTIFY_AFTER = 10.0
"""Seconds that a turn takes before its end is announced by a bell."""
RING_GAP = 5.0
"""Seconds between two bells, however often an agent asks."""
UNFOLDABLE = 50
"""Folded blocks that are remembered, to be shown whole."""


class Abilities(Struct):
    """The capabilities of the agent beyond prompts."""

    name: str = ""
    """Its name."""
    lists: bool = False
    """Whether it lists stored sessions."""
    loads: bool = False
    """Whether it loads stored sessions."""
    undoes: bool = False
    """Whether it takes back turns with the changes of their files."""
    images: bool = False
    resumes: bool = False
    """Whether it opens a stored session without sending what was said in it."""
    answers: tuple[str, ...] = ()
    """The additions that it accepts in the answer to a permission question: `reason`, `command`."""
    steers: bool = False
    """Whether it takes words for the running turn."""


@dataclass
class State:
    """The terminal, as far as it can be known without a terminal."""

    agent: str = "crow"
    """The agent for people: its command or address."""
    folder: str = ""
    branch: str = ""
    abilities: Abilities = field(default_factory=Abilities)
    has_page: bool = False
    """Whether a browser can show the session."""
    phase: str = "starting"
    """`starting`, `ready`, `working`, `ended`."""
    transcript: BlockRecord = field(default_factory=BlockRecord)
    turns: list[str] = field(default_factory=list[str])
    """The prompts to go back to that the user was offered last, newest first."""
    queue: PromptQueue = field(default_factory=PromptQueue)
    command: str = ""
    """The user's command that runs."""
    command_lines: list[str] = field(default_factory=list[str])
    command_hidden: int = 0
    """The lines of its output before `command_lines`."""
    since: float = 0.0
    """The time at which the turn, or the command, began."""
    step_since: float = 0.0
    """The time since which the turn waits for the model: it was asked, or the last tool call ended."""
    rung: float = NEVER
    """The time of the last bell."""
    cancelled: bool = False
    """Whether the running turn was cancelled."""
    dialog: Dialog | Question | None = None
    pause: TypingPause = field(default_factory=TypingPause)
    is_open: bool = False
    """Whether a form of the agent takes keys: after a pause, until which they go to the prompt."""
    waiting: list[tuple[int, RequestPermissionRequest | CreateElicitationRequest]] = field(
        default_factory=list[tuple[int, RequestPermissionRequest | CreateElicitationRequest]]
    )
    """Questions of the agent behind the one that is shown."""
    asked: int = 0
    """The id of the agent's question that is shown; 0 for none."""
    request: RequestPermissionRequest | CreateElicitationRequest | None = None
    """The question with this id."""
    answered: int = 0
    """The questions that were answered while others waited."""
    options: OfferedOptions = field(default_factory=OfferedOptions)
    commands: list[AvailableCommand] = field(default_factory=list[AvailableCommand])
    usage: UsageUpdate | None = None
    cached: float | None = None
    """The share of the tokens of the last turn that came from the server's cache."""
    title: str = ""
    hint: str = ""
    hint_until: float = 0.0
    interrupted: float = NEVER
    """The time of the last Ctrl-C, if no other key followed it."""
    folded: list[Block] = field(default_factory=list[Block])
    """The blocks that were not printed whole, oldest first."""
    sandbox: str = ""
    """Whether commands run in a sandbox, as the status line shows it; empty before the first one."""
    fold_thoughts: bool = False
    fold_output: bool = True
    loading: bool = False
    """Whether a stored session is being shown."""
    muted: bool = False
    """Whether updates are not shown, as they were before."""

    @property
    def busy(self) -> bool:
        """Whether something runs that Esc stops."""
        return self.phase == "working" or bool(self.command)

    @property
    def writes_answer(self) -> bool:
        """Whether the editor holds an answer that the user writes, and not the prompt."""
        return isinstance(self.dialog, TextDialog) and (not self.asked or self.is_open)

    @property
    def chooses(self) -> bool:
        """Whether keys choose from a list, in place of the editor."""
        return isinstance(self.dialog, ListDialog) and (not self.asked or self.is_open)

    @property
    def asked_call(self) -> str:
        """The id of the tool call that the question is about; empty for none."""
        return find_call(self.request) if self.request else ""

    def is_moving(self, now: float) -> bool:
        """Whether what is shown changes with time."""
        return (self.busy and not self.asked) or (bool(self.hint) and now < self.hint_until + 0.2)

    # The agent

    def open_session(
        self, modes: SessionModeState | None, options: Sequence[SessionConfigOption], now: float
    ) -> list[Effect]:
        """A session is open."""
        self.phase, self.loading, self.muted = "ready", False, False
        self.options = OfferedOptions(modes, options)
        return [*self._show(self.transcript.end_turn(now)), *self._send_next(now)]

    def leave_session(self, name: str = "New session", *, again: bool = False) -> list[Effect]:
        """The session is closed, as another one of this `name` is opened, or the same one `again`."""
        effects = self._cancel_questions()
        self.queue.leave_steers()
        self.phase, self.commands = "starting", []
        self.muted, self.loading = again, not again
        if not again:
            self.transcript, self.usage, self.cached, self.title = BlockRecord(), None, None, ""
            self.sandbox = ""
            self.turns, self.folded = [], []
            effects += self.remark(name, "rule")
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

    def end_turn(self, response: PromptResponse, now: float) -> list[Effect]:
        """The agent has answered a prompt."""
        effects = self._show(self.transcript.end_turn(now))
        seconds = now - self.since
        usage = response.usage
        if isinstance(usage, Usage) and isinstance(usage.cached_read_tokens, int) and usage.input_tokens > 0:
            self.cached = usage.cached_read_tokens / usage.input_tokens
        sentence = {
            "cancelled": "Cancelled.",
            "max_tokens": "The answer was cut: the model reached its limit of tokens.",
            "max_turn_requests": "Stopped at the limit of requests. Say “go on” to go on.",
            "refusal": "The model refused to answer.",
        }.get(response.stop_reason)
        match response.meta:
            case {"crow": {"stopped": {"by": "repeated_calls" | "budget"}}}:
                sentence = "Say “go on” to go on."  # a notice has said why it stopped
            case _:
                pass
        if sentence:
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
        effects = self._show(self.transcript.end_turn(now))
        self.phase, self.cancelled, self.queue.returning = "ready", False, bool(self.queue.steers)
        return [*effects, Show(Note(sentence, "error")), *self._cancel_questions(), *self.queue.restore()]

    def end_agent(self, sentence: str, now: float) -> list[Effect]:
        """The connection to the agent has ended, or it could not be opened."""
        effects = self._show(self.transcript.end_turn(now))
        self.queue.leave_steers()
        self.phase = "ended"
        stop = "" if sentence.endswith((".", "!", "?")) else "."
        gap = "\n" if "\n" in sentence else " "
        note = Note(f"{sentence}{stop}{gap}Enter starts it again.", "error")
        return [*effects, Show(note), *self._cancel_questions(), *self.queue.restore()]

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

    # Questions of the agent

    def ask(self, id: int, request: RequestPermissionRequest | CreateElicitationRequest, now: float) -> list[Effect]:
        """The agent asks for a permission, or with a form. While a turn is being cancelled, that is the answer."""
        if self.cancelled and self.phase == "working":
            self.transcript.leave_question(find_call(request))
            return [Respond(id, make_cancellation(request))]
        self.waiting.append((id, request))
        self.transcript.start_question(find_call(request), now)
        return [] if self.asked else self._ask_next(now)

    def withdraw(self, id: int, now: float) -> list[Effect]:
        """The agent does not need an answer any more."""
        for other, request in self.waiting:
            if other == id:
                self.transcript.end_question(find_call(request), now)
        self.waiting = [one for one in self.waiting if one[0] != id]
        if self.asked != id:
            return []
        self.transcript.end_question(self.asked_call, now)
        self._close_question()
        self.show_hint(WITHDRAWN, now)
        return self._ask_next(now)

    def _ask_next(self, now: float) -> list[Effect]:
        """Show the next question, in place of a picker."""
        if not self.waiting:
            return []
        self.asked, request = self.waiting.pop(0)
        self.request, self.is_open = request, False
        self.pause.begin(now)
        if isinstance(request, RequestPermissionRequest):
            return self._ask_permission(request, now)
        form = start_form(request)
        if form is None:
            return self._reply(CreateElicitationResponse(action="cancel"), now)
        self._show_field(form)
        return [*self._show(self.transcript.end_text()), *self._ring(f"{self.agent} asks", now), Wait(PAUSE)]

    def _ask_permission(self, request: RequestPermissionRequest, now: float) -> list[Effect]:
        call = request.tool_call
        effects = self._show(self.transcript.propose(call, now))
        self.transcript.start_question(call.tool_call_id, now)
        known = self.transcript.running.get(call.tool_call_id)
        about = known.call if known else ToolCall(tool_call_id=call.tool_call_id, title=call.title or "")

        def choose(row: Row, at: float) -> list[Effect]:
            chosen: Answer | None = row.value
            if chosen is None:
                question.enter_step(lasting=True)
                self.pause.begin(at)
                return [Wait(PAUSE)]
            if not chosen.wants:
                return finish(chosen, "", at)
            self.is_open = True
            self.dialog = TextDialog(chosen.wants, chosen.text, lambda text, at: finish(chosen, text, at), question)
            return [Edit(chosen.text)]

        def finish(chosen: Answer, text: str, at: float) -> list[Effect]:
            self.transcript.note_shown(call.tool_call_id)
            name = f"{chosen.name}: {chosen.rule}" if chosen.rule else chosen.name
            return [*self._show([question.record(name, text)]), *self._reply(make_answer(chosen, text), at)]

        self.dialog = question = make_question(request, about, self.folder, self.abilities.answers, choose)
        return [*effects, *self._ring(f"{self.agent} asks: {question.title}", now), Wait(PAUSE)]

    def _show_field(self, form: Form) -> list[Effect]:
        """Show the next field of a form, or send the form."""

        def fill(value: Any, at: float) -> list[Effect]:
            problem = form.fill(value)
            if problem:
                self.show_hint(problem, at)
                return []
            return self._show_field(form) if form.field else self._reply(form.respond(), at)

        def decline(at: float) -> list[Effect]:
            return self._reply(CreateElicitationResponse(action="decline"), at)

        self.dialog = form.make_dialog(fill, decline)
        return [Edit(self.dialog.text)] if isinstance(self.dialog, TextDialog) and self.is_open else []

    def _reply(self, response: Any, now: float) -> list[Effect]:
        effects: list[Effect] = [Respond(self.asked, response)]
        self.transcript.end_question(self.asked_call, now)
        was_entry = self.writes_answer
        self.answered = self.answered + 1 if self.waiting else 0
        self._close_question()
        return [*effects, *([Edit("")] if was_entry else []), *self._ask_next(now)]

    def _close_question(self) -> None:
        if self.asked:
            self.asked, self.request, self.dialog = 0, None, None

    def _cancel_questions(self) -> list[Effect]:
        """Answer all open questions of the agent by `cancelled`, as the protocol wants it of a turn that ends."""
        shown = [(self.asked, self.request)] if self.request else []
        open = [*shown, *self.waiting]
        self._close_question()
        self.waiting.clear()
        self.answered = 0
        return [Respond(id, make_cancellation(request)) for id, request in open]

    # The user

    def submit(self, text: str, now: float, *, later: bool = False) -> list[Effect]:
        """The user has pressed Enter, with this text in the editor; `later` keeps it for after the turn."""
        if isinstance(self.dialog, TextDialog) and self.writes_answer:
            return self.dialog.submit(text, now)
        stripped = text.strip()
        if not stripped:
            return self._submit_nothing(now)
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

    def _submit_nothing(self, now: float) -> list[Effect]:
        if self.asked:
            return []
        if self.phase == "ended":
            return self._restart()
        if self.phase == "working" and self.queue and not self.cancelled:
            self.cancelled = True
            return [Cancel()]  # the next prompt of the queue follows
        return []

    def _can_steer(self, text: str) -> bool:
        """Whether words join the running turn; slash commands, and all while the user's command runs, do not."""
        runs = self.phase == "working" and not self.cancelled and not self.command
        return self.abilities.steers and runs and not text.startswith("/")

    def _restart(self) -> list[Effect]:
        self.phase = "starting"
        return [Open(again=True)]

    def _send(self, text: str, now: float) -> list[Effect]:
        self.phase, self.cancelled = "working", False
        self.since = self.step_since = now
        # Before a slash command, nothing may stand: the agent would not know it.
        outputs = () if text.startswith("/") else self.queue.take_outputs()
        return [*self._show([*self.transcript.end_text(), UserPrompt(text)]), Send(text, outputs)]

    def _send_next(self, now: float) -> list[Effect]:
        """Send the next prompt of the queue."""
        waits = self.phase != "ready" or self.command or self.queue.steers
        return self._send(self.queue.prompts.pop(0), now) if self.queue.prompts and not waits else []

    def _run(self, text: str, now: float) -> list[Effect]:
        shared = not text.startswith("!!")
        command = text.lstrip("!").strip()
        if not command:
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

    def show_hint(self, text: str, now: float, seconds: float = HINT_SECONDS) -> None:
        """Show a sentence at the bottom for some seconds."""
        self.hint, self.hint_until = text, now + seconds

    # Dialogs

    def note_key(self, now: float) -> list[Effect]:
        """The user has pressed a key; what it does comes after."""
        is_first = bool(self.asked) and not self.pause.get_rest(now)
        self.pause.note_key(now)
        return [Wait(PAUSE)] if is_first else []

    def note_letter(self, letter: str) -> list[Effect]:
        """A letter has gone to the prompt. It answers the question for permission if it stays alone; see `wake`."""
        if not isinstance(self.dialog, Question) or not self.dialog.find(letter) or not self.pause.came_before():
            return []
        self.pause.letter = letter
        return [Wait(ALONE)]

    def wake(self, now: float) -> list[Effect]:
        """The time of a `Wait` is over."""
        if not self.asked:
            return []
        if rest := self.pause.get_rest(now):
            return [Wait(rest + 0.001)]
        if isinstance(self.dialog, Question) or self.is_open:
            return []
        self.is_open = True
        return [Edit(self.dialog.text)] if isinstance(self.dialog, TextDialog) else []

    def take_letter(self, now: float) -> str:
        """Take the letter that was typed alone and answers the question; empty if there is none."""
        return self.pause.take_letter(now) if isinstance(self.dialog, Question) else ""

    def answer(self, letter: str, now: float) -> list[Effect]:
        """The user has answered the question for permission by a letter."""
        row = self.dialog.find(letter) if isinstance(self.dialog, Question) else None
        return self.dialog.choose(row, now) if row and isinstance(self.dialog, Question) else []

    def pick(
        self,
        title: str,
        rows: Sequence[Row],
        choose: Callable[[Row, float], list[Effect]],
        about: Sequence[str] = (),
    ) -> list[Effect]:
        """Let the user choose one of these rows, after some lines to read."""

        def close(row: Row, now: float) -> list[Effect]:
            self.dialog = None
            return [*choose(row, now), *self._ask_next(now)]

        def dismiss(now: float) -> list[Effect]:
            self.dialog = None
            return self._ask_next(now)

        if not self.asked:
            self.dialog = ListDialog(title, [*rows], close, dismiss, about=about, searchable=True)
            self.dialog.selected = next((n for n, row in enumerate(rows) if row.current), 0)
        return []

    def move(self, delta: int) -> list[Effect]:
        """The user has pressed an arrow."""
        if isinstance(self.dialog, ListDialog | Question):
            self.dialog.move(delta)
            self.pause.forget_key()
        return []

    def scroll(self, pages: int) -> list[Effect]:
        """The user reads on in a question for permission, or back."""
        if isinstance(self.dialog, Question):
            self.dialog.scroll(pages * self.dialog.page)
            self.pause.forget_key()
        return []

    def choose(self, number: int | None, now: float) -> list[Effect]:
        """The user has chosen a row: the one with this number, or the one that is marked."""
        if isinstance(self.dialog, Question):
            return self.dialog.choose(self.dialog.shown_rows[self.dialog.selected], now)
        if not isinstance(self.dialog, ListDialog) or not self.chooses:
            return []
        row = self.dialog.find(number)
        return self.dialog.choose(row, now) if row else []

    def _dismiss(self, now: float) -> list[Effect]:
        dialog, was_entry = self.dialog, self.writes_answer
        if dialog is None or isinstance(dialog, Question):
            return []
        return [*dialog.dismiss(now), *([Edit("")] if was_entry else [])]

    # What is printed

    def take_back(self, turns: int, sentence: str) -> list[Effect]:
        """The agent has taken back the last turns."""
        text = self.turns[turns - 1] if turns <= len(self.turns) else ""
        return [*self._show([Note(sentence, "warning")]), Edit(text)]

    def unfold(self) -> list[Effect]:
        """Print the last folded block whole; each further time the one before it."""
        if not self.folded:
            return self.remark("Nothing is folded.")
        return [Show(self.folded.pop(), whole=True)]

    def _ring(self, sentence: str, now: float) -> list[Effect]:
        """Tell the user, if the turn has taken so long that they may look elsewhere."""
        if now - self.since < NOTIFY_AFTER or now - self.rung < RING_GAP:
            return []
        self.rung = now
        return [Ring(sentence)]

    def _show(self, blocks: Sequence[Block]) -> list[Effect]:
        for block in blocks:
            if isinstance(block, Call | CommandOutput) or (
                self.fold_thoughts and isinstance(block, Prose) and block.thought
            ):
                self.folded.append(block)
        del self.folded[:-UNFOLDABLE]
        return [Show(block) for block in blocks]


def find_call(request: RequestPermissionRequest | CreateElicitationRequest) -> str:
    """Return the id of the tool call that a question is about; empty if it is about none."""
    if isinstance(request, RequestPermissionRequest):
        return request.tool_call.tool_call_id
    return request.tool_call_id if isinstance(request.tool_call_id, str) else ""


def make_cancellation(request: RequestPermissionRequest | CreateElicitationRequest) -> Any:
    """Make the answer to a question of a turn that is cancelled."""
    is_form = isinstance(request, CreateElicitationRequest)
    return CreateElicitationResponse(action="cancel") if is_form else answer_permission()
