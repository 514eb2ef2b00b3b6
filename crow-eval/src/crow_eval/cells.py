"""Cells: one run of one task by one variant, which is a version of a prompt and a model."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from crow_eval.checks import CheckResult
from crow_eval.compared_prompts import PromptVersion

State = Literal["passed", "failed", "error"]
"""The outcomes of a cell. An `error` says nothing about the prompt and the model, and counts in no rate."""
LIMIT = "limit"
"""The kind of a result when a limit was reached, in addition to those of checks."""


class TaskName(Struct):
    """A task of an evaluation."""

    id: str
    digest: str


class Candidate(Struct, kw_only=True):
    """The state of one prompt in a search: its parent, its score and its fault.

    The prompt itself has the same index in the evaluation's list of prompts.
    """

    parent: int | None = None
    """The index of the prompt that it was made from; None for the first."""
    score: float | None = None
    """The rate of the validation tasks that it passed; None if it was not run on all of them."""
    fault: str = ""
    """Why it cannot be used; it was not run then."""


class Proposal(Struct, kw_only=True):
    """An answer of the model that proposes candidates."""

    key: str
    """The digest of what it was asked."""
    text: str
    session: str
    requests: int = 0
    tokens: int = 0
    cost: float | None = None
    currency: str | None = None
    total: float = 0.0
    """Milliseconds of the turn."""


class SearchNotes(Struct, kw_only=True):
    """The state of a search for a better prompt: what it may use, and what it has come to."""

    target: str
    """The name of the prompt."""
    train: list[str]
    """The tasks that candidates are made from, by their ids."""
    validation: list[str]
    """The tasks by which candidates are chosen."""
    test: list[str]
    """The tasks of the report, which no candidate is made from or chosen by."""
    seed: int
    max_runs: int
    """The most runs of tasks for the search; those of the report are not among them."""
    proposer: str = ""
    """The model that proposes, as it was asked for; empty for the one of the tasks."""
    limits: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The most of requests, tokens, money and minutes for the search and the report."""
    candidates: list[Candidate] = msgspec.field(default_factory=list[Candidate])
    proposals: list[Proposal] = msgspec.field(default_factory=list[Proposal])
    winner: int | None = None
    """The place of the prompt that the search chose, 0 for the first; None until it has ended."""
    stopped: str = ""
    """Why the search ended."""


class EvaluationSettings(Struct, kw_only=True):
    """The tasks, prompts and models of an evaluation."""

    tasks: list[TaskName]
    prompts: list[PromptVersion]
    models: list[str]
    """As they were asked for; empty for the configured one."""
    names: list[str]
    """The names of the models at their endpoints, in the same order."""
    repeat: int
    mode: str
    judge: str = ""
    """The model that judges."""
    crow: str = ""
    """The version of crow."""
    imported: str = ""
    """The program that has run it, if that was not crow."""
    search: SearchNotes | None = None
    """Of `crow prompts improve`: its prompts are candidates, and not each is run on each task."""

    @property
    def variants(self) -> "list[Variant]":
        """The combinations of prompts and models, in order."""
        pairs = [(prompt, at) for prompt in self.prompts for at in range(len(self.models))]
        return [Variant(number, prompt, self.models[at], self.names[at]) for number, (prompt, at) in enumerate(pairs)]


@dataclass(frozen=True)
class Variant:
    """A version of a prompt and a model."""

    number: int
    prompt: PromptVersion
    model: str
    """As it was asked for."""
    name: str
    """The name of the model, for people."""

    @property
    def label(self) -> str:
        """The prompt and the model."""
        return f"{self.prompt.label} · {self.name}"


class CellOutcome(Struct, kw_only=True):
    """The texts of a cell: the answer, errors, denied tool calls."""

    checks: list[CheckResult] = msgspec.field(default_factory=list[CheckResult])
    answer: str = ""
    """The agent's last message."""
    stop_reason: str = ""
    error: str = ""
    """Why the cell could not be run or checked."""
    denied: list[str] = msgspec.field(default_factory=list[str])
    """The titles of the tool calls that were denied a permission."""
    tool_calls: int = 0


class Cell(Struct, kw_only=True):
    """One run of one task by one variant, with its outcome."""

    task: str
    variant: int
    repetition: int
    session: str = ""
    state: State = "error"
    started: int = 0
    """Milliseconds since 1970, as `ended`."""
    ended: int = 0
    outcome: CellOutcome = msgspec.field(default_factory=CellOutcome)
    requests: int = 0
    input: int = 0
    """Tokens."""
    output: int = 0
    cached: int = 0
    cost: float | None = None
    currency: str | None = None
    first: float | None = None
    """Milliseconds until the first delta of the first model call."""
    total: float | None = None
    """Milliseconds of the turn."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The key of the cell within its evaluation."""
        return self.task, self.variant, self.repetition

    @property
    def failed_checks(self) -> list[CheckResult]:
        return [check for check in self.outcome.checks if not check.passed]


def to_row(cell: Cell) -> dict[str, Any]:
    """Convert a cell to a row of the table."""
    row = msgspec.structs.asdict(cell)
    return {**row, "outcome": msgspec.json.encode(cell.outcome).decode()}


def to_cell(row: Any) -> Cell:
    """Convert a row of the table to a cell."""
    values = {name: getattr(row, name) for name in Cell.__struct_fields__ if name != "outcome"}
    return Cell(**values, outcome=msgspec.json.decode(row.outcome, type=CellOutcome))
