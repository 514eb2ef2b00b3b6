"""Compact a session before its context is full, on /compact, and after a refusal: `crow.use(compact)`."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from crow_core.acp.schema import CompactionUpdate, ContentBlock, StopReason, TextBlock, UsageUpdate
from crow_core.app import Crow
from crow_core.content import find_first_text
from crow_core.errors import ModelError
from crow_core.messages.message import Message, get_id
from crow_core.models.chat_model import get_window
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.token_usage import ASSUMED_WINDOW
from crow_core.session.log import new_id
from crow_core.session.prompts import Prompt
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from crow_system.shortening import shorten_line
from msgspec import Meta

from crow_compact.compaction import RETRY_GROWTH, Compaction, find_limit, is_due, replace_messages
from crow_compact.preview import ask_for_summary
from crow_compact.read_output import TOOL, make_server
from crow_compact.summary import CannotCompact
from crow_compact.tokens import TokenEstimator

AtLeastZero = Annotated[float, Meta(ge=0)]


def compact(
    crow: Crow,
    *,
    threshold: AtLeastZero = 0.8,
    models: Mapping[str, AtLeastZero] | None = None,
    ask: bool = False,
) -> None:
    """Compact a session when its next request would have more tokens than `threshold`.

    Up to 1 it is a share of the model's window, above 1 a number of tokens; with 0, compact only on the command and
    after a refusal. `models` has other thresholds by the name of a model. With `ask`, the user is shown each summary
    before it counts. Define the commands /compact and /pin and the tool `read_output`.
    """
    crow.prompts["compaction"] = Prompt.from_package("compaction", "crow_compact")
    crow.servers.append(make_server())

    @crow.tools
    def leave_out_tool(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]] | None:
        if find_tool(session.toolbox.sent or ()) or session.view.find_kind("shrink"):
            return None
        return [schema for schema in schemas if schema["function"]["name"] != TOOL]

    async def offer_tool(session: Session) -> None:
        """Offer the tool as soon as an output has been shortened; the beginning of the request changes then anyway."""
        if not find_tool(session.toolbox.sent or ()):
            schemas = await crow.tools.run(session.toolbox.schemas(), session)
            if find_tool(schemas):
                session.toolbox.sent = schemas
                session.log.append({"crow": {"kind": "tools", "schemas": schemas}})

    async def attempt(planned: Compaction, tokens: int) -> bool:
        worked = await compact_session(planned, tokens)
        await offer_tool(planned.session)
        return worked

    def plan(session: Session, instructions: str = "", *, preview: bool = False) -> Compaction:
        estimator = get_estimator(session)
        window = min(get_window(session.model) or ASSUMED_WINDOW, estimator.refused or 1 << 62)
        limit = find_limit(session, window, threshold, models or {})
        about = partial(ask_for_summary, session, must_ask=preview) if ask or preview else None
        return Compaction(session, estimator, window, limit, must_fit=window, instructions=instructions, ask=about)

    @crow.after_model
    async def compact_after_reply(session: Session, model_call: ModelCall) -> None:
        planned = plan(session)
        estimator = planned.estimator
        estimator.full = 0
        since_request = {"messages": session.view.messages()[len(model_call.request["messages"]) - 1 :]}
        tokens = estimator.learn(model_call) + estimator.estimate(since_request)
        if planned.limit and is_due(planned, tokens, planned.limit):
            await attempt(planned, tokens)

    @crow.before_model
    async def compact_before_request(request: ModelRequest, session: Session) -> ModelRequest | None:
        planned = plan(session)
        estimator, tokens = planned.estimator, planned.estimator.estimate(request)
        if not planned.limit or not estimator.rate or not is_due(planned, tokens, planned.window):
            return None
        if estimator.estimate(replace_messages(request, request["messages"][-1:])) > planned.window:
            return None  # the last message alone is too long
        estimator.tried = tokens
        return await session.request() if await attempt(planned, tokens) else None

    @crow.model_error
    async def compact_after_refusal(session: Session, error: ModelError) -> bool | None:
        estimator = get_estimator(session)
        if not error.too_long:
            return None
        tokens = estimator.estimate(await session.request())
        if estimator.full and tokens * RETRY_GROWTH > estimator.full:
            return None  # it did not become much shorter
        estimator.refused = estimator.full = tokens
        planned = plan(session)
        planned.limit = planned.must_fit = planned.limit or planned.window // 2
        return await attempt(planned, estimator.refused)

    @crow.turn_end
    def reset(session: Session, outcome: StopReason | Exception) -> None:
        get_estimator(session).full = 0

    @crow.commands
    def commands(session: Session) -> list[Command]:
        return [
            Command(
                "compact",
                "Sum up the conversation to make room",
                run_command,
                hint="[--preview] [what to keep in mind]",
            ),
            Command(
                "pin",
                "Keep a message word for word when the conversation is summed up",
                pin_message,
                hint="[its words]",
            ),
        ]

    async def run_command(session: Session, words: str) -> str:
        preview = words.split()[:1] == ["--preview"]
        planned = plan(session, words.removeprefix("--preview").strip() if preview else words, preview=preview)
        planned.limit, planned.must_fit = planned.limit or planned.window // 2, 0
        try:
            report = await run_compaction(planned, shrink=False)
            return f"{report} {planned.warning}".strip()
        except CannotCompact as error:
            is_shown = client_shows_compactions(session)  # with the error
            return "" if is_shown else f"Nothing was compacted. {error}"
        finally:
            await offer_tool(session)


def find_tool(schemas: Sequence[dict[str, Any]]) -> bool:
    """Return whether `read_output` is among these tools."""
    return any(schema["function"]["name"] == TOOL for schema in schemas)


ESTIMATORS = StateKey("compact", dict[str, TokenEstimator])
"""The token estimators of a session, by the names of its models."""


def get_estimator(session: Session) -> TokenEstimator:
    """Return the token estimator of a session and its current model."""
    return session.state[ESTIMATORS].setdefault(session.model.name, TokenEstimator())


async def compact_session(planned: Compaction, tokens: int) -> bool:
    """Compact a session whose request has about `tokens` tokens, and notify the user; return whether it worked."""
    session = planned.session
    is_known = get_window(session.model) or planned.window != ASSUMED_WINDOW
    assumed = "" if is_known else " (assumed: set the model's window)"
    await session.notice(f"About {tokens:,} tokens of {planned.window:,}{assumed}: making room.")
    try:
        report = await run_compaction(planned)
    except CannotCompact as error:
        await session.notice(f"The conversation could not be made shorter. {error}", "warning")
        return False
    if not client_shows_compactions(session):
        await session.notice(report)
    if planned.warning:
        await session.notice(planned.warning, "warning")
    return True


async def run_compaction(planned: Compaction, *, shrink: bool = True) -> str:
    """Compact with progress updates for a client that shows them; return the report. Raises CannotCompact."""
    session, id = planned.session, new_id()
    shows_progress = client_shows_compactions(session)
    if shows_progress:
        await session.update(CompactionUpdate(compaction_id=id, status="in_progress"))
    try:
        report = await planned.run(shrink=shrink)
    except CannotCompact as error:
        if shows_progress:
            await session.update(CompactionUpdate(compaction_id=id, status="failed", error=str(error)))
        raise
    except asyncio.CancelledError:
        if shows_progress:
            await session.send(CompactionUpdate(compaction_id=id, status="cancelled"))
        raise
    if shows_progress:
        summary: list[ContentBlock] = [TextBlock(text=text) for text in (report, planned.summary) if text]
        await session.update(CompactionUpdate(compaction_id=id, status="completed", summary=summary))
    size = get_window(session.model) or ASSUMED_WINDOW
    await session.update(UsageUpdate(used=planned.estimator.tried, size=size))
    return report


def client_shows_compactions(session: Session) -> bool:
    """Return whether the client has the capability for compaction updates."""
    capabilities = session.client.capabilities.session
    return bool(capabilities and capabilities.compaction)


async def pin_message(session: Session, words: str) -> str:
    """Run /pin: pin the latest message that contains these words or, without words, the last prompt."""
    messages = [entry for entry in session.view.entries() if entry.get("role") in ("user", "assistant")]
    message = next((entry for entry in reversed(messages) if is_selected(entry, words)), None)
    if message is None:
        return f"No message contains {words!r}." if words else "You have not said anything yet."
    session.log.append({"crow": {"kind": "pin", "entry": get_id(message)}})
    text = " ".join(find_first_text(message).split())
    return f"Kept word for word from now on: “{shorten_line(text, 60)}”"


def is_selected(entry: Message, words: str) -> bool:
    """Return whether a message contains these words or, without words, whether it is a prompt of the user."""
    if words:
        return words.casefold() in find_first_text(entry).casefold()
    return entry.get("role") == "user" and not entry.get("crow", {}).get("hidden")
