"""`crow.use(compact)`: when the context fills up, it becomes a shorter view of the same log."""

import asyncio
from collections.abc import Mapping
from typing import Annotated

from crow_core.acp.schema import CompactionUpdate, ContentBlock, StopReason, TextBlock, UsageUpdate
from crow_core.app import Crow
from crow_core.content import find_first_text
from crow_core.errors import ModelError
from crow_core.log import new_id
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages import Message, drop_rewound
from crow_core.models.chat import ModelCall, Request, effective_window
from crow_core.models.usage import ASSUMED_WINDOW
from crow_core.prompts import Prompt
from crow_core.session import Command, Session
from msgspec import Meta

from crow_compact import outputs
from crow_compact.compaction import Compaction, Unable, id_of, since, with_messages
from crow_compact.gauge import Gauge

GROWTH = 1.1
"""How much longer a conversation must have become before it is tried again where it is still too long."""


AtLeastZero = Annotated[float, Meta(ge=0)]


def compact(crow: Crow, *, threshold: AtLeastZero = 0.8, models: Mapping[str, AtLeastZero] | None = None) -> None:
    """Make the context shorter when the next request would pass `threshold`: up to 1 a share of the model's window,
    above it a number of tokens, 0 for never by itself. `models` has others, by the name a user picks.

    Brings /compact and /pin, and the tool `read_output`.
    """
    crow.prompts["compaction"] = Prompt.packaged("compaction", "crow_compact")
    crow.servers.append(tools := outputs.server())

    def limit_of(session: Session, window: int) -> int:
        name = next((name for name, model in session.models.items() if model is session.model), "")
        share = (models or {}).get(name, threshold)
        return int(share if share > 1 else share * window)

    def plan(session: Session, instructions: str = "") -> Compaction:
        gauge = gauge_of(session)
        window = min(effective_window(session.model) or ASSUMED_WINDOW, gauge.refused or 1 << 62)
        return Compaction(session, gauge, window, limit_of(session, window), instructions)

    @crow.after_model
    async def watch(session: Session, model_call: ModelCall) -> None:
        planned = plan(session)
        gauge = planned.gauge
        gauge.full = False
        next_one = gauge.learn(model_call) + gauge.tokens({"messages": since(session.log, model_call.id)})
        if planned.limit and next_one > max(planned.limit, gauge.tried * GROWTH):
            await attempt(planned, next_one)

    @crow.before_model
    async def foresee(request: Request, session: Session) -> Request | None:
        planned = plan(session)
        gauge, tokens = planned.gauge, planned.gauge.tokens(request)
        if not planned.limit or not gauge.rate or tokens <= max(planned.window, gauge.tried * GROWTH):
            return None
        if gauge.tokens(with_messages(request, request["messages"][-1:])) > planned.window:
            return None  # what was said last is too long by itself
        gauge.tried = tokens
        return await session.request() if await attempt(planned, tokens) else None

    @crow.model_error
    async def make_room(session: Session, error: ModelError) -> bool | None:
        gauge = gauge_of(session)
        if not error.too_long or gauge.full:
            return None
        gauge.full = True
        gauge.refused = gauge.tokens(await session.request())
        planned = plan(session)
        planned.limit = planned.limit or planned.window // 2
        return await attempt(planned, gauge.refused)

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        gauge_of(session).full = False

    @crow.before_tool
    async def read(session: Session, tool_call: ToolCall) -> ToolResult | None:
        return outputs.read(session, tool_call) if tool_call.is_for(tools) else None

    @crow.commands
    def commands(session: Session) -> list[Command]:
        return [
            Command("compact", "Sum up the conversation to make room", by_hand, hint="[what to keep in mind]"),
            Command("pin", "Keep a message word for word when the conversation is summed up", pin, hint="[its words]"),
        ]

    async def by_hand(session: Session, words: str) -> str:
        planned = plan(session, words)
        planned.limit = planned.limit or planned.window // 2
        try:
            return await told(planned, shrink=False)
        except Unable as why:
            return f"Nothing was compacted. {why}"


def gauge_of(session: Session) -> Gauge:
    """What is known of a session with the model it has now."""
    gauges: dict[str, Gauge] = session.state.setdefault("compact", {})
    return gauges.setdefault(session.model.name, Gauge())


async def attempt(planned: Compaction, tokens: int) -> bool:
    """Compact, and tell the person what came of it; gives whether it did."""
    session = planned.session
    known = effective_window(session.model) or planned.window != ASSUMED_WINDOW
    assumed = "" if known else " (assumed: set the model's window)"
    await session.notice(f"About {tokens:,} tokens of {planned.window:,}{assumed}: making room.")
    try:
        report = await told(planned)
    except Unable as why:
        await session.notice(f"The conversation could not be made shorter. {why}", "warning")
        return False
    if not shows_compactions(session):
        await session.notice(report)
    return True


async def told(planned: Compaction, *, shrink: bool = True) -> str:
    """Compact under the eyes of a client that follows it; gives the report. Raises Unable."""
    session, id = planned.session, new_id()
    shows = shows_compactions(session)
    if shows:
        await session.update(CompactionUpdate(compaction_id=id, status="in_progress"))
    try:
        report = await planned.run(shrink=shrink)
    except Unable as why:
        if shows:
            await session.update(CompactionUpdate(compaction_id=id, status="failed", error=str(why)))
        raise
    except asyncio.CancelledError:
        if shows:
            await session.send(CompactionUpdate(compaction_id=id, status="cancelled"))
        raise
    if shows:
        summary: list[ContentBlock] = [TextBlock(text=text) for text in (report, planned.summary) if text]
        await session.update(CompactionUpdate(compaction_id=id, status="completed", summary=summary))
    size = effective_window(session.model) or ASSUMED_WINDOW
    await session.update(UsageUpdate(used=planned.gauge.tried, size=size))
    return report


def shows_compactions(session: Session) -> bool:
    wanted = session.client.capabilities.session
    return bool(wanted and wanted.compaction)


async def pin(session: Session, words: str) -> str:
    """The command: pins the latest message that holds these words, or the last prompt."""
    said = [entry for entry in drop_rewound(session.log) if entry.get("role") in ("user", "assistant")]
    found = next((entry for entry in reversed(said) if is_meant(entry, words)), None)
    if found is None:
        return f"No message holds {words!r}." if words else "You have not said anything yet."
    session.log.append({"crow": {"kind": "pin", "entry": id_of(found)}})
    text = " ".join(find_first_text(found).split())
    return f"Kept word for word from now on: “{text if len(text) <= 60 else f'{text[:59]}…'}”"


def is_meant(entry: Message, words: str) -> bool:
    if words:
        return words.casefold() in find_first_text(entry).casefold()
    return entry.get("role") == "user" and not entry.get("crow", {}).get("hidden")
