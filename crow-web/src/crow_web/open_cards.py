"""The questions of the agent that wait for an answer, each shown as a card in the log of its chat."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crow_core.acp.schema import CreateElicitationResponse, RequestPermissionRequest, ToolCall
from crow_terminal.chat_client import AgentQuestion
from crow_terminal.open_questions import find_call, make_cancellation

from crow_web.live import Tab
from crow_web.log import BlockRenderer, Log
from crow_web.questions import Card, FormCard, PermissionCard, make_form
from crow_web.shared_agent import SharedAgent


@dataclass(frozen=True)
class OpenCard:
    """A question that waits."""

    card: Card
    log: Log
    block: str
    """The id of its block in the log."""
    call: str
    """The id of the tool call that it is about; empty for none."""


class OpenCards:
    """The questions of a session by their numbers. The first answer ends one, whichever page gives it."""

    def __init__(
        self, agent: SharedAgent, renderer: BlockRenderer, get_time: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        """`changed` is called after a question has come or gone."""
        self._agent, self._renderer, self._get_time, self._changed = agent, renderer, get_time, changed
        self._cards: dict[int, OpenCard] = {}

    @property
    def first(self) -> str:
        """The id of the block of the first question; empty for none."""
        return next((open.block for open in self._cards.values()), "")

    def ask(self, id: int, request: AgentQuestion, log: Log, folder: str) -> None:
        """Show a question of the agent."""
        now, call = self._get_time(), find_call(request)
        card: Card | None
        if isinstance(request, RequestPermissionRequest):
            log.show(log.record.propose(request.tool_call, now))
            known = log.record.running.get(call)
            about = known.call if known else ToolCall(tool_call_id=call, title=str(request.tool_call.title or ""))
            card = PermissionCard(request, about, folder, self._agent.abilities.answers)
        else:
            card = make_form(request)
        if card is None:
            self._agent.answer(id, make_cancellation(request))
            return
        log.show(log.record.end_text())
        log.record.start_question(call, now)
        self._cards[id] = open = OpenCard(card, log, log.take_id(), call)
        log.put(open.block, card.render(self._renderer, id))
        self._changed()

    def refuse(self, id: int, request: AgentQuestion, log: Log) -> None:
        """Answer a question of a turn that is being stopped."""
        log.record.leave_question(find_call(request))
        self._agent.answer(id, make_cancellation(request))

    def refuse_all(self) -> None:
        """Answer all questions, as their turn is being stopped."""
        for id, open in [*self._cards.items()]:
            self.refuse(id, open.card.request, open.log)
            self.withdraw(id)

    def answer(self, id: int, choice: int, text: str) -> None:
        """Answer a question for permission."""
        open = self._cards.get(id)
        if open and isinstance(open.card, PermissionCard) and (found := open.card.respond(choice, text)):
            response, record = found
            open.log.record.note_shown(open.call)
            self._end(id, self._renderer.render_block(record))
            self._agent.answer(id, response)

    def fill(self, tab: Tab, id: int, send: str, values: Mapping[str, Any]) -> None:
        """Answer a form: `send` is `accept` or `decline`. The page is told what is wrong with a value."""
        open = self._cards.get(id)
        if not open or not isinstance(open.card, FormCard):
            return
        response: CreateElicitationResponse | str = CreateElicitationResponse(action="decline")
        if send == "accept":
            response = open.card.respond({name: list_values(value) for name, value in values.items()})
        if isinstance(response, str):
            tab.add({"@problem": f"{open.block} {response}"})
            return
        self._end(id, self._renderer.render("filled", open.card.form, send))
        self._agent.answer(id, response)

    def withdraw(self, id: int) -> None:
        """Remove a question that needs no answer any more."""
        self._end(id, self._renderer.render("withdrawn"))

    def withdraw_all(self) -> None:
        for id in [*self._cards]:
            self.withdraw(id)

    def _end(self, id: int, html: str) -> None:
        if open := self._cards.pop(id, None):
            open.log.record.end_question(open.call, self._get_time())
            open.log.put(open.block, html)
            self._changed()


def list_values(value: Any) -> list[str]:
    """Return the values of a field of a form, which sends one alone, or a list of several."""
    return [*map(str, value)] if isinstance(value, list) else [str(value)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
