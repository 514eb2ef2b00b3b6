"""The part of the state that the questions of the agent, and lists to choose from, belong to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.client import answer_permission
from crow_core.acp.schema import (
    CreateElicitationRequest,
    CreateElicitationResponse,
    RequestPermissionRequest,
    ToolCall,
)
from msgspec.structs import replace

from crow_terminal.abilities import Abilities
from crow_terminal.blocks import Block, BlockRecord, Call, CommandOutput, Note
from crow_terminal.dialogs import Dialog, ListDialog, Row, TextDialog
from crow_terminal.effects import (
    Edit,
    Effect,
    Respond,
    Ring,
    Show,
    Wait,
)
from crow_terminal.forms import Form, start_form
from crow_terminal.markdown import Prose
from crow_terminal.permission import Answer, make_answer
from crow_terminal.question import Question, make_question
from crow_terminal.typing_pause import ALONE, PAUSE, TypingPause

WITHDRAWN = "The agent does not ask this any more."
NEVER = float("-inf")
HINT_SECONDS = 4.0
"""Seconds that a hint stays."""
NOTIFY_AFTER = 10.0
"""Seconds that a turn takes before its end is announced by a bell."""
RING_GAP = 5.0
"""Seconds between two bells, however often an agent asks."""
SHOWN_STOPS = 3
"""Tool calls that the user stopped and that have a line each; of more, only the number is printed."""
UNFOLDABLE = 50
"""Folded blocks that are remembered, to be shown whole."""


@dataclass
class OpenQuestions:
    """The agent's questions: one is shown, or a list; and the effects of the answers."""

    agent: str = "crow"
    """The agent for people: its command or address."""
    folder: str = ""
    abilities: Abilities = field(default_factory=Abilities)
    phase: str = "starting"
    """`starting`, `ready`, `working`, `ended`."""
    transcript: BlockRecord = field(default_factory=BlockRecord)
    since: float = 0.0
    """The time at which the turn, or the command, began."""
    rung: float = NEVER
    """The time of the last bell."""
    cancelled: bool = False
    """True if the running turn was cancelled."""
    stopped: int = 0
    """The tool calls that ended, or did not run, because of that."""
    dialog: Dialog | Question | None = None
    pause: TypingPause = field(default_factory=TypingPause)
    is_open: bool = False
    """True if a form of the agent takes keys: after a pause, until which they go to the prompt."""
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
    hint: str = ""
    hint_until: float = 0.0
    folded: list[Block] = field(default_factory=list[Block])
    """The blocks that were not printed whole, oldest first."""
    fold_thoughts: bool = False

    @property
    def writes_answer(self) -> bool:
        """True if the editor holds an answer that the user writes, and not the prompt."""
        return isinstance(self.dialog, TextDialog) and (not self.asked or self.is_open)

    @property
    def chooses(self) -> bool:
        """True if keys choose from a list, in place of the editor."""
        return isinstance(self.dialog, ListDialog) and (not self.asked or self.is_open)

    @property
    def question(self) -> Question | None:
        """The question for permission that is shown, also while the user writes its answer."""
        shown = self.dialog.back if isinstance(self.dialog, TextDialog) else self.dialog
        return shown if isinstance(shown, Question) else None

    @property
    def asked_call(self) -> str:
        """The id of the tool call that the question is about; empty for none."""
        return find_call(self.request) if self.request else ""

    def ask(self, id: int, request: RequestPermissionRequest | CreateElicitationRequest, now: float) -> list[Effect]:
        """The agent asks for a permission, or with a form. While a turn is being cancelled, that is the answer."""
        if self.cancelled and self.phase == "working":
            self.transcript.leave_question(find_call(request))
            return [Respond(id, make_cancellation(request))]
        self.waiting.append((id, request))
        self.transcript.start_question(find_call(request), now)
        return [] if self.asked else self._ask_next(now)

    def withdraw(self, id: int, now: float, answer: str = "") -> list[Effect]:
        """The agent does not need an answer any more, as it was given elsewhere if there is an `answer`."""
        for other, request in self.waiting:
            if other == id:
                self.transcript.end_question(find_call(request), now)
        self.waiting = [one for one in self.waiting if one[0] != id]
        if self.asked != id:
            return []
        self.transcript.end_question(self.asked_call, now)
        question = self.question
        shown: list[Block] = []
        if answer and question:
            self.transcript.note_shown(self.asked_call)
            shown = [question.record(answer)]
        self._close_question()
        self.show_hint(f"The question was {answer}." if answer and not shown else "" if answer else WITHDRAWN, now)
        return [*self._show(shown), *self._ask_next(now)]

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

    def note_key(self, now: float) -> list[Effect]:
        """The user has pressed a key; what it does comes after."""
        is_first = bool(self.asked) and not self.pause.get_rest(now)
        self.pause.note_key(now)
        return [Wait(PAUSE)] if is_first else []

    def note_letter(self, letter: str) -> list[Effect]:
        """A letter has gone to the prompt. It answers the question for permission if it stays alone; see `wake`."""
        question, pause = self.dialog, self.pause
        if not isinstance(question, Question):
            return []
        is_second = question.is_about_lasting and pause.is_first()
        if pause.followed and question.can_answer(pause.followed + letter):
            pause.letters = pause.followed + letter
        elif question.can_answer(letter) and (is_second or pause.came_before()):
            pause.letters = letter
        return [Wait(ALONE)] if pause.letters else []

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

    def take_letters(self, now: float) -> str:
        """Take the letters that were typed alone and answer the question; empty if there are none."""
        return self.pause.take_letters(now) if isinstance(self.dialog, Question) else ""

    def answer(self, letters: str, now: float) -> list[Effect]:
        """The user has answered the question for permission by a letter, or by those of both steps."""
        effects: list[Effect] = []
        for letter in letters:
            if isinstance(question := self.dialog, Question) and (row := question.find(letter)):
                effects += question.choose(row, now)
        return effects

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
            has_letters = any(row.letter for row in rows)
            self.dialog = ListDialog(title, [*rows], close, dismiss, about=about, searchable=not has_letters)
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
        if question := self.question:
            question.scroll(pages * question.page)
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

    def _ring(self, sentence: str, now: float) -> list[Effect]:
        """Tell the user, if the turn has taken so long that they may look elsewhere."""
        if now - self.since < NOTIFY_AFTER or now - self.rung < RING_GAP:
            return []
        self.rung = now
        return [Ring(sentence)]

    def _show(self, blocks: Sequence[Block]) -> list[Effect]:
        if self.cancelled:
            blocks = self._count_stops([note_stop(block) for block in blocks])
        for block in blocks:
            if isinstance(block, Call | CommandOutput) or (
                self.fold_thoughts and isinstance(block, Prose) and block.thought
            ):
                self.folded.append(block)
        del self.folded[:-UNFOLDABLE]
        return [Show(block) for block in blocks]

    def _count_stops(self, blocks: Sequence[Block]) -> list[Block]:
        """Count the tool calls that were stopped, and leave out all but the first."""
        kept: list[Block] = []
        for block in blocks:
            self.stopped += is_stopped(block)
            (self.folded if is_stopped(block) and self.stopped > SHOWN_STOPS else kept).append(block)
        return kept

    def _end_blocks(self, now: float) -> list[Effect]:
        """End the turn: show the open blocks, and the number of stopped tool calls without a line."""
        effects = self._show(self.transcript.end_turn(now))
        more, self.stopped = self.stopped - SHOWN_STOPS, 0
        if more > 0:
            calls = "call was" if more == 1 else "calls were"
            effects.append(Show(Note(f"{more} more {calls} stopped · Ctrl-O", "done")))
        return effects

    def show_hint(self, text: str, now: float, seconds: float = HINT_SECONDS) -> None:
        """Show a sentence at the bottom for some seconds."""
        self.hint, self.hint_until = text, now + seconds


def find_call(request: RequestPermissionRequest | CreateElicitationRequest) -> str:
    """Return the id of the tool call that a question is about; empty if it is about none."""
    if isinstance(request, RequestPermissionRequest):
        return request.tool_call.tool_call_id
    return request.tool_call_id if isinstance(request.tool_call_id, str) else ""


def note_stop(block: Block) -> Block:
    """Mark a tool call that ended because the user stopped the turn. Other blocks stay as they are."""
    if isinstance(block, Call) and block.call.status == "failed" and not (block.denied or block.not_run):
        return replace(block, stopped=True)
    return block


def is_stopped(block: Block) -> bool:
    """Return whether a block of a turn that the user stopped is a tool call that did not come to its end."""
    return isinstance(block, Call) and block.call.status != "completed" and not block.denied


def make_cancellation(request: RequestPermissionRequest | CreateElicitationRequest) -> Any:
    """Make the answer to a question of a turn that is cancelled."""
    is_form = isinstance(request, CreateElicitationRequest)
    return CreateElicitationResponse(action="cancel") if is_form else answer_permission()
