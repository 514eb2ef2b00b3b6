"""The second reading: a model finds corrections among the user's messages, and its answers are checked.

Among the messages are first prompts of sessions, which cannot correct anything. A model that finds corrections there is
not used. A quote has to stand in its message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

from crow_agent.agent import Agent
from crow_agent.errors import OutputError
from crow_core.session.prompts import Prompt

from crow_eval.lessons.call_signals import Signal
from crow_eval.lessons.session_signals import SaidMessage

MESSAGES_LIMIT = 200
"""Messages that a model reads, the latest."""
BATCH = 20
"""Messages of a request."""
CONTROLS = 4
"""First prompts among the messages of a request."""
TEXT_LIMIT = 600
"""Characters of a message that a model reads."""
ERRORS_LIMIT = 2
"""Requests without a usable answer after which no more are sent."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "corrections": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in ("id", "quote", "line")},
                "required": ["id", "quote", "line"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["corrections"],
    "additionalProperties": False,
}


@dataclass
class ModelReading:
    """The corrections that a model has found, and what speaks against it."""

    signals: list[Signal] = field(default_factory=list[Signal])
    read: int = 0
    """Messages that could be corrections."""
    controls: int = 0
    """Messages that could not."""
    agreed: int = 0
    """Of these, those that the model took for corrections."""
    invented: int = 0
    """Answers with a quote that is not in the message, or without such a message."""
    errors: list[str] = field(default_factory=list[str])

    @property
    def is_usable(self) -> bool:
        """True if the model tells corrections from other messages: of those that cannot correct anything, it takes
        fewer than half for corrections, and a smaller share than of the others."""
        share = self.agreed / max(self.controls, 1)
        return not self.agreed or share < min(0.5, len(self.signals) / max(self.read, 1))


async def read_with_model(model: Any, said: Sequence[SaidMessage], **options: Any) -> ModelReading:
    """Let a model read what users have said; `options` are those of its agent. Raises AgentError if there is no such
    model."""
    reading = ModelReading()
    prompt = Prompt.from_package("lessons", "crow_eval")
    # In a folder of its own, so that nobody continues its sessions as the last ones of theirs.
    with TemporaryDirectory(prefix="crow-lessons-") as folder:
        async with Agent(model, tools=[], system=prompt, cwd=folder, **options) as agent:
            await ask(agent, said, reading)
    return reading


async def ask(agent: Agent, said: Sequence[SaidMessage], reading: ModelReading) -> None:
    """Ask about each batch of messages, and add the answers to the reading."""
    for batch in make_batches(said):
        messages = {f"m{number}": one for number, one in enumerate(batch, 1)}
        text = "\n\n".join(f'<message id="{id}">\n{one.text}\n</message>' for id, one in messages.items())
        reading.read += sum(not one.is_first for one in batch)
        reading.controls += sum(one.is_first for one in batch)
        try:
            result = await agent.prompt(text, output=SCHEMA)
            add_answers(reading, messages, result.output["corrections"])
        except OutputError as error:
            reading.errors.append(str(error))
            if len(reading.errors) == ERRORS_LIMIT:
                break


def make_batches(said: Sequence[SaidMessage]) -> Iterator[list[SaidMessage]]:
    """Yield the messages of each request, with first prompts between them."""
    later = [one for one in said if not one.is_first][-MESSAGES_LIMIT:]
    first = [one for one in said if one.is_first]
    for start in range(0, len(later), BATCH):
        batch = [replace(one, text=one.text[:TEXT_LIMIT]) for one in later[start : start + BATCH]]
        begin = start // BATCH * CONTROLS % max(len(first), 1)
        for number, one in enumerate(islice([*first, *first], begin, begin + min(CONTROLS, len(first)))):
            batch.insert(number * 5 % (len(batch) + 1), replace(one, text=one.text[:TEXT_LIMIT]))
        yield batch


def add_answers(reading: ModelReading, messages: dict[str, SaidMessage], answers: Sequence[dict[str, str]]) -> None:
    """Add what a model answered to a request, but for what it has invented."""
    known = set[str]()
    for answer in answers:
        message, quote = messages.get(answer["id"]), " ".join(answer["quote"].split())
        if message is None or not quote or quote not in " ".join(message.text.split()):
            reading.invented += 1
        elif answer["id"] in known:
            continue
        elif message.is_first:
            reading.agreed += 1
        else:
            line = " ".join(answer["line"].split())
            reading.signals.append(Signal("correction", message.session, message.entry, message.cwd, quote, line))
        known.add(answer["id"])
