"""Stored sessions as the tasks of a search: each is asked again, and passes if its reply is as good as the stored."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from crow_agent.agent import Agent
from crow_agent.budget import Budget
from crow_agent.errors import AgentError
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_core.app import Crow
from crow_core.errors import ModelError, PromptError, StoreError
from crow_core.messages.message import Message, marker_kind
from crow_core.models.model_call import Model
from crow_core.session.prompts import Prompt
from crow_persistence.database import Database
from crow_persistence.search import extract_texts
from crow_persistence.tables import messages, sessions
from sqlalchemy import Connection, select

from crow_eval.cells import Cell, Variant
from crow_eval.checks import CheckResult
from crow_eval.compared_prompts import JUDGE, PromptVersion, load_judge_prompt, replace_prompts
from crow_eval.evaluation_store import now
from crow_eval.judging import ask_judge
from crow_eval.meter import Meter, measure
from crow_eval.reask import Changes, Reasked, StoredRequest, StoredSession, load_stored, read_log, reask, render_system
from crow_eval.runs import CellRunner, take_counts
from crow_eval.tasks import Task, TaskFile

RATED = "rated"
"""The name of the dataset of all stored sessions with a rating."""
SHOWN = 12_000
"""Characters of a conversation that a judge reads, from its end."""
AS_GOOD = "Is the new reply at least as good a next step for the person as the stored one?"
WELL = "Does the answer do well what the person asked for?"
BETTER = "The person rated the stored reply as bad. Is the new reply clearly better for the person?"


def find_rated(connection: Connection) -> list[str]:
    """List the ids of the stored sessions that have a rating, oldest first."""
    rated = select(messages.c.session).where(messages.c.kind == "rating")
    found = select(sessions.c.id).where(sessions.c.number.in_(rated), sessions.c.deleted.is_(None))
    return [*connection.scalars(found.order_by(sessions.c.number))]


def load_sessions(connection: Connection, ids: Collection[str], first: PromptVersion) -> list[StoredSession]:
    """Load sessions to ask them again. Raises StoreError, PromptError for one that cannot be asked with `first`."""
    found = {stored.id: stored for stored in (load_stored(connection, id) for id in ids)}
    for stored in found.values():
        if first.name == JUDGE:
            find_rated_reply(stored)
        else:
            render_system(stored, Changes(Prompt(first.name, first.template)))
    return [*found.values()]


def to_task(stored: StoredSession) -> Task:
    asked = next((entry for entry in stored.log if entry.get("role") == "user"), None)
    return Task(
        id=stored.id,
        source=f"the session {stored.id}",
        prompt=to_text(asked) if asked else "",
        checks=[],
        settings=TaskFile(),
        folder=Path(stored.cwd),
        has_folder=False,
        digest=stored.derive_id(Changes())[:16],
    )


def to_text(entry: Message) -> str:
    """Return the text of an entry of the log, with its tool calls."""
    calls = [f"{use['function']['name']} {use['function']['arguments']}" for use in entry.get("tool_calls", [])]
    (_, text), *_ = extract_texts(entry)
    return "\n".join([text, *calls]).strip() or "(nothing)"


def find_rating(stored: StoredSession) -> tuple[str, str]:
    """Return the last rating of a session, `good` or `bad`, and the word why; empty if there is none."""
    for entry in reversed(stored.log):
        if marker_kind(entry) == "rating":
            notes: Any = entry.get("crow", {})
            return str(notes.get("rating", "")), str(notes.get("why", ""))
    return "", ""


def find_rated_reply(stored: StoredSession) -> int:
    """Return the index of the reply that the last rating of a session is about. Raises StoreError if there is none."""
    rated = [entry.get("crow", {}) for entry in stored.log if marker_kind(entry) == "rating"]
    reply: Any = rated[-1].get("reply") if rated else None
    found = [at for at, entry in enumerate(stored.log) if reply and entry.get("crow", {}).get("id") == reply]
    if not found:
        raise StoreError(f"Session {stored.id} has no rated answer. Rate one with /good or /bad.")
    return found[0]


def find_replies(stored: StoredSession, outcome: Reasked, log: Sequence[Message]) -> tuple[int, Message, Message]:
    """Return the number of the request that decides, its stored reply, and the new one: the departure, or the last."""
    if outcome.departure:
        return outcome.departure.request, outcome.departure.was, outcome.departure.now
    number = len(stored.requests)
    was = stored.log[stored.requests[-1].entry]
    replies = [entry for entry in log if entry.get("role") == "assistant"]
    return number, was, replies[-1] if replies else was


def describe_before(stored: StoredSession, at: int) -> str:
    """Return the end of the conversation before an entry of the log, for a judge."""
    entries = [entry for entry in stored.log[:at] if entry.get("role")]
    return "\n\n".join(f"{entry.get('role')}: {to_text(entry)}" for entry in entries)[-SHOWN:]


@dataclass
class SessionRunner:
    """Asks stored sessions again with a prompt, and has the replies judged."""

    app: Crow
    database: Database
    stored: Mapping[str, StoredSession]
    prompt: Prompt
    choose_model: Callable[[StoredRequest], Model]
    judge: Agent
    budget: Budget

    async def run(self, cell: Cell, task: Task) -> None:
        """Ask a session again. A failure of the endpoint or of the judge is the error of the cell."""
        stored, cell.started, began = self.stored[task.id], now(), monotonic()
        try:
            changes = Changes(self.prompt, repetition=cell.repetition)
            outcome = await reask(self.app, self.database, stored, changes, self.choose_model)
            cell.session = outcome.session
            self.count(cell, outcome)
            if outcome.error:
                raise AgentError(outcome.error)
            await self.decide(cell, stored, outcome)
        except (AgentError, ModelError, PromptError) as error:
            cell.state, cell.outcome.error = "error", str(error)
        cell.total, cell.ended = (monotonic() - began) * 1000, now()

    def count(self, cell: Cell, outcome: Reasked) -> None:
        """Give a cell what its session took, and count it."""
        totals = outcome.totals
        cell.requests, cell.input = totals.get("calls", 0), totals.get("input", 0)
        cell.output, cell.cached = totals.get("output", 0), totals.get("cached", 0)
        with suppress(StopIteration):
            cell.currency, cell.cost = next(iter(totals.get("cost", {}).items()))
        for what, amount in (
            ("requests", cell.requests),
            ("tokens", cell.input + cell.output),
            ("money", cell.cost or 0.0),
        ):
            self.budget.spend(what, amount)

    async def decide(self, cell: Cell, stored: StoredSession, outcome: Reasked) -> None:
        """Decide whether a session passes: by its rating where the replies are the same, else by the judge."""
        log = read_log(self.database, outcome.session)
        number, was, now_ = find_replies(stored, outcome, log)
        rating, why = find_rating(stored)
        cell.outcome.answer = to_text(now_)
        if to_text(was) == to_text(now_):
            said = f"It is the stored one, which was rated as {rating}." if rating else "It is the stored one."
            result = CheckResult(name="reply", kind="rating", passed=rating != "bad", reason=said)
        else:
            parts = {
                "task": describe_before(stored, stored.requests[number - 1].entry),
                "stored reply": to_text(was),
                **({"why it was rated so": why} if why else {}),
                "new reply": to_text(now_),
            }
            given, session = await ask_judge(self.judge, parts, BETTER if rating == "bad" else AS_GOOD)
            result = CheckResult(
                name="reply",
                kind="judge",
                passed=given["verdict"] == "yes",
                reason=f"{given['verdict']}: {given['reason']}",
                session=session,
            )
        cell.outcome.checks.append(result)
        cell.state = "passed" if result.passed else "failed"


@asynccontextmanager
async def open_session_runners(
    make_app: Callable[[], Crow],
    database: Database,
    stored: Mapping[str, StoredSession],
    choose_model: Callable[[StoredRequest], Model],
    judge: str,
    env: Mapping[str, str],
    budget: Budget,
    variants: Sequence[Variant],
) -> AsyncGenerator[Mapping[int, CellRunner]]:
    """Start the app that asks again, and the judge. Raises AgentError."""
    home = Home.find(env)
    system = load_judge_prompt(load_config(home, env), home)

    def use(crow: Crow) -> None:
        crow.use(replace_prompts, prompts={"system": system})

    async with AsyncExitStack() as stack:
        app = make_app()
        stack.push_async_callback(app.shut_down)
        agent = await stack.enter_async_context(Agent(judge, tools=[], extensions=[use], budget=budget, env=env))
        yield {
            variant.number: SessionRunner(
                app,
                database,
                stored,
                Prompt(variant.prompt.name, variant.prompt.template),
                choose_model,
                agent,
                budget,
            )
            for variant in variants
        }


@dataclass
class RatingRunner:
    """Has a judge judge answers that a person rated; a verdict passes if it is the person's."""

    stored: Mapping[str, StoredSession]
    judge: Agent
    meter: Meter

    async def run(self, cell: Cell, task: Task) -> None:
        """Have an answer judged. A failure of the judge is the error of the cell."""
        stored, cell.started, began = self.stored[task.id], now(), monotonic()
        at, (rating, _) = find_rated_reply(stored), find_rating(stored)
        try:
            parts = {"task": describe_before(stored, at), "answer": to_text(stored.log[at])}
            given, cell.session = await ask_judge(self.judge, parts, WELL)
            result = CheckResult(
                name=f"the person's rating: {rating}",
                kind="judge",
                passed=(given["verdict"] == "yes") == (rating == "good"),
                reason=f"{given['verdict']}: {given['reason']}",
            )
            cell.outcome.answer = result.reason
            cell.outcome.checks.append(result)
            cell.state = "passed" if result.passed else "failed"
            take_counts(cell, self.meter.counts[cell.session])
        except AgentError as error:
            cell.state, cell.outcome.error = "error", str(error)
        cell.total, cell.ended = (monotonic() - began) * 1000, now()


@asynccontextmanager
async def open_rating_runners(
    stored: Mapping[str, StoredSession],
    model: str,
    env: Mapping[str, str],
    budget: Budget,
    variants: Sequence[Variant],
) -> AsyncGenerator[Mapping[int, CellRunner]]:
    """Start a judge for each variant of its prompt. Raises AgentError."""
    async with AsyncExitStack() as stack:
        runners: dict[int, CellRunner] = {}
        for variant in variants:
            prompt, meter = Prompt(variant.prompt.name, variant.prompt.template), Meter()

            def use(crow: Crow, prompt: Prompt = prompt, meter: Meter = meter) -> None:
                crow.use(replace_prompts, prompts={"system": prompt})
                crow.use(measure, meter=meter)

            agent = Agent(model, tools=[], extensions=[use], budget=budget, env=env)
            runners[variant.number] = RatingRunner(stored, await stack.enter_async_context(agent), meter)
        yield runners
