"""Evaluations of Inspect: its logs become evaluations here, with their samples as cells and stored sessions.

A module of its own, as it imports Inspect, which takes seconds and is an extra.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from crow_core.errors import ConfigError
from crow_persistence.database import Database
from crow_persistence.sql_store import BlockingStore
from crow_persistence.tables import evaluations as evaluations_table
from crow_persistence.tables import sessions
from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.model import ChatMessage, ContentReasoning, ContentText
from sqlalchemy import Table, select

from crow_eval import rows as evaluations
from crow_eval.cells import LIMIT, Cell, CellOutcome, EvaluationSettings, TaskName, to_row
from crow_eval.checks import REASON_LIMIT, CheckResult
from crow_eval.compared_prompts import PromptVersion
from crow_eval.histories.history import ForeignSession, get_dict, get_list, make_reply, make_use, to_time
from crow_eval.histories.importing import Imported, import_session
from crow_eval.runs import ANSWER_LIMIT

SCORE = "score"
"""The kind of the result of one of Inspect's scorers."""
NAMED_SCORES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""The scores that are words, as Inspect converts them: correct, partial, incorrect, no answer."""

MAX_ROWS = 1_000
"""Cells that are stored by one statement: databases limit its parameters."""


@dataclass
class ImportedLog:
    """A log that was read, as an evaluation that can be stored."""

    id: str
    """The id of the evaluation: the same for the same log, scorer and least score."""
    dataset: str
    settings: EvaluationSettings
    created: int
    """Milliseconds since 1970."""
    ended: int | None
    cells: list[Cell] = field(default_factory=list[Cell])
    histories: dict[str, ForeignSession] = field(default_factory=dict[str, ForeignSession])
    """The messages of the samples, by the ids of the sessions that they become."""
    own: dict[str, str] = field(default_factory=dict[str, str])
    """The sessions that crow has named in the samples, by the ids of those that their messages would become."""
    partial: int = 0
    """The number of scores above 0 that are too small to pass."""
    is_known: bool = False
    """True if the evaluation was stored before, and was left as it is."""


def read_log(path: Path, scorer: str, least: float | None) -> ImportedLog:
    """Read a log of Inspect. `scorer` names the only scorer that counts, `least` is the least score that passes.

    Raises ConfigError for an incomplete log, an evaluation that has not ended, and a score that is not a verdict.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    try:
        log = read_eval_log(path.absolute(), resolve_attachments=True)
    except Exception as error:  # of the formats of the file, and of pydantic
        said = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(f"{path} cannot be read as a log of Inspect: {said}.") from error
    if log.status == "started" or not log.samples:
        raise ConfigError(f"{path} has no samples of an evaluation that has ended (its status is {log.status}).")
    samples, spec = log.samples, log.eval
    keys = Counter((str(sample.id), sample.epoch) for sample in samples)
    if twice := next((key for key, count in keys.items() if count > 1), None):
        raise ConfigError(f"{path} has the sample {twice[0]} twice in the epoch {twice[1]}.")
    if scorer and not any(scorer in (sample.scores or {}) for sample in samples):
        known = ", ".join(sorted({name for sample in samples for name in sample.scores or {}})) or "none"
        raise ConfigError(f"{path} has no scores of {scorer!r}. Its scorers are: {known}.")
    digests = {str(sample.id): find_digest(sample) for sample in samples}
    names = dict.fromkeys([*map(str, spec.dataset.sample_ids or ()), *digests])
    reader = f"inspect_ai {spec.packages.get('inspect_ai', '')}".strip()
    imported = ImportedLog(
        sha256(f"inspect\0{spec.eval_id or spec.run_id}\0{scorer}\0{least}".encode()).hexdigest()[:32],
        spec.task,
        EvaluationSettings(
            tasks=[TaskName(name, digests.get(name, "")) for name in names],
            prompts=[PromptVersion(describe_solver(log), "system", "")],
            models=[spec.model],
            names=[spec.model],
            repeat=max(spec.config.epochs or 1, *(sample.epoch for sample in samples)),
            mode="",
            imported=reader,
        ),
        to_time(spec.created),
        None,
    )
    for sample in samples:
        add_sample(imported, sample, spec.model, path, scorer, least)
    wanted = len(names) * imported.settings.repeat
    if log.status == "success" and len(samples) == wanted:
        imported.ended = to_time(log.stats.completed_at) or imported.created
    return imported


def describe_solver(log: EvalLog) -> str:
    """Describe what has solved the samples: the solver and its arguments, or the steps of the plan."""
    given = ", ".join(f"{name}={value}" for name, value in (log.eval.solver_args_passed or {}).items())
    if log.eval.solver:
        return f"{log.eval.solver}({given})" if given else log.eval.solver
    return " + ".join(step.solver for step in log.plan.steps) or "inspect"


def find_digest(sample: EvalSample) -> str:
    """Make a digest of what a sample asks and wants, by which a changed one is known."""
    said = sample.input if isinstance(sample.input, str) else [(each.role, each.text) for each in sample.input]
    return sha256(json.dumps([said, sample.target, sample.choices]).encode()).hexdigest()


def add_sample(
    imported: ImportedLog, sample: EvalSample, model: str, path: Path, scorer: str, least: float | None
) -> None:
    """Add a sample of a log as a cell, with its messages as a session. Raises ConfigError."""
    found, notes = to_session(sample, model, path, imported.id), get_dict(sample.store, "crow")
    ended = sample.output.choices[0].stop_reason if sample.output.choices else ""
    outcome = CellOutcome(
        answer=sample.output.completion[-ANSWER_LIMIT:],
        stop_reason=f"{sample.limit.type} limit" if sample.limit else ended,
        denied=[str(title) for title in get_list(notes, "denied")],
        tool_calls=sum(len(each.tool_calls or ()) for each in sample.messages if each.role == "assistant"),
    )
    cell = Cell(task=str(sample.id), variant=0, repetition=sample.epoch, outcome=outcome)
    if found.entries:
        cell.session = found.own_id
        imported.histories[found.own_id] = found
        imported.own[found.own_id] = str(notes.get("session", ""))
    if sample.error:
        outcome.error = sample.error.message
    elif sample.invalidation:
        outcome.error = "The sample was invalidated."
    else:
        judge(imported, cell, sample, path, scorer, least)
    take_usage(cell, sample, model)
    imported.cells.append(cell)


def judge(imported: ImportedLog, cell: Cell, sample: EvalSample, path: Path, scorer: str, least: float | None) -> None:
    """Give a cell its outcome by the scores of its sample. Raises ConfigError for a score that is not a verdict."""
    outcome = cell.outcome
    for name, score in (sample.scores or {}).items():
        for label, value in flatten(name, score.value) if scorer in ("", name) else ():
            number = to_number(value)
            if number is None:
                outcome.error = f"The score of {label} is {value!r}, which is no number."
                return
            if least is None and not 0 <= number <= 1:
                raise ConfigError(
                    f"{path}: the score of {label} for {sample.id} is {value!r}, which is no verdict. Name another "
                    "scorer with --scorer, or the least score that passes with --pass-at."
                )
            passed = number >= (1 if least is None else least)
            imported.partial += not passed and number > 0
            said = f"{value}: {score.explanation}" if score.explanation else str(value)
            outcome.checks.append(CheckResult(name=label, kind=SCORE, passed=passed, reason=said[:REASON_LIMIT]))
    if not outcome.checks:
        outcome.error = "Inspect has no score of the sample."
        return
    cell.state = "passed" if all(check.passed for check in outcome.checks) else "failed"
    if sample.limit and cell.state == "failed":
        said = sample.limit.reason or f"The limit of {sample.limit.limit:g} is reached."
        outcome.checks.append(CheckResult(name="limit", kind=LIMIT, passed=False, reason=said))


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the single values of a score, each with a name."""
    if isinstance(value, dict):
        for key, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield f"{name}.{key}", each
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, each in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield f"{name}.{number}", each
    else:
        yield name, value


def to_number(value: Any) -> float | None:
    """Convert a single value of a score to a number; None if there is none, as for a word that is none of Inspect's."""
    if isinstance(value, str):
        if (named := NAMED_SCORES.get(value, NAMED_SCORES.get(value.lower()))) is not None:
            return named
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None


def take_usage(cell: Cell, sample: EvalSample, model: str) -> None:
    """Give a cell what its sample took: the tokens of the model, not of others, such as those of scorers."""
    usage = sample.model_usage.get(model)
    if usage is not None:
        cell.cached = usage.input_tokens_cache_read or 0
        cell.input = usage.input_tokens + cell.cached + (usage.input_tokens_cache_write or 0)
        cell.output, cell.cost = usage.output_tokens, usage.total_cost
        cell.currency = None if usage.total_cost is None else "USD"
    asked = sum(event.event == "model" and event.model == model for event in sample.events)
    cell.requests = asked or sum(message.role == "assistant" for message in sample.messages)
    cell.started, cell.ended = to_time(sample.started_at), to_time(sample.completed_at)
    seconds = sample.working_time if sample.working_time is not None else sample.total_time
    cell.total = None if seconds is None else seconds * 1000


def to_session(sample: EvalSample, model: str, path: Path, evaluation: str) -> ForeignSession:
    """Convert the messages of a sample to a session. Their times are those of the sample's start and end."""
    id = sample.uuid or f"{evaluation}/{sample.id}/{sample.epoch}"
    session = ForeignSession("inspect", id, path, title=f"{sample.id} (epoch {sample.epoch})", model=model)
    at = to_time(sample.started_at)
    for message in sample.messages:
        text, reasoning = split_content(message, session.left_out)
        match message.role:
            case "system":
                session.left_out["system prompts"] += 1
            case "user":
                session.add_text(at, "user", text)
            case "assistant":
                uses = [make_use(call.id, call.function, call.arguments) for call in message.tool_calls or ()]
                if text or reasoning or uses:
                    session.add(at, make_reply(text, reasoning, uses))
            case "tool":
                failed = message.error.message if message.error else ""
                session.add_result(at, message.tool_call_id or "", text or failed, failed=bool(failed))
    session.settle()
    if session.entries:
        session.entries[-1] = (to_time(sample.completed_at) or at, session.entries[-1][1])
    return session


def split_content(message: ChatMessage, left_out: Counter[str]) -> tuple[str, str]:
    """Return the text and the reasoning of a message; count its other parts."""
    if isinstance(message.content, str):
        return message.content, ""
    texts, reasoning = list[str](), list[str]()
    for part in message.content:
        match part:
            case ContentText(text=text):
                texts.append(text)
            case ContentReasoning():
                reasoning.append(part.text)
            case _:
                left_out[f"parts of type {part.type}"] += 1
    return "\n\n".join(texts), "\n\n".join(reasoning)


def store_log(store: BlockingStore, log: ImportedLog) -> Imported:
    """Store an evaluation with its cells and sessions; one that was stored before is left as it is. Raises StoreError.

    A sample that crow has solved keeps crow's own session, if this database has it.
    """
    imported = Imported()
    log.is_known = is_stored(store.database, evaluations_table, log.id)
    if log.is_known:
        return imported
    for cell in log.cells:
        own = log.own.get(cell.session, "")
        if own and is_stored(store.database, sessions, own):
            cell.session = own
        elif cell.session:
            import_session(store, log.histories[cell.session], imported)
    with store.database.begin_write() as connection:
        text = msgspec.json.encode(log.settings).decode()
        number = evaluations.store_evaluation(connection, log.id, log.dataset, text, log.created)
        rows = [to_row(cell) for cell in log.cells]
        for start in range(0, len(rows), MAX_ROWS):
            evaluations.store_cells(connection, number, rows[start : start + MAX_ROWS])
        if log.ended is not None:
            evaluations.end_evaluation(connection, number, log.ended)
    return imported


def is_stored(database: Database, table: Table, id: str) -> bool:
    """Tell whether a table has the row with an id. Raises StoreError."""
    with database.begin_read() as connection:
        return connection.scalar(select(table.c.number).where(table.c.id == id)) is not None
