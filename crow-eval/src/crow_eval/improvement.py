"""Search for a better prompt: candidates by GEPA, tasks by `crow eval`, a report on tasks that the search never saw.

A search is an evaluation whose prompts are the candidates. Every run and every proposal is stored when it ends. A
search that goes on starts anew with the same seed, and finds in the store what was paid for.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import Any, TypeVar

from crow_agent.agent import Agent
from crow_agent.budget import Budget
from crow_agent.errors import AgentError, PromptFailed
from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.mcp.tool import DESCRIPTION_LIMIT
from crow_core.models.model_call import ModelCall
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_core.text import to_line
from crow_extensions.tool_descriptions import TOOL
from crow_persistence.database import Database
from crow_persistence.prompt_versions import find_number, find_variables, find_version, store_version

from crow_eval.cells import Candidate, Cell, Proposal, SearchNotes
from crow_eval.compared_prompts import JUDGE, SYSTEM, SYSTEM_VARIABLES, PromptVersion, check_prompt, replace_prompts
from crow_eval.context_files import find_file_fault, is_file_name
from crow_eval.evaluation_store import Evaluation, now, save_settings
from crow_eval.gepa_search import MINIBATCH, search
from crow_eval.meter import Meter, measure
from crow_eval.runs import Runners, run_cells
from crow_eval.tasks import Task

T = TypeVar("T")
IDLE_PROPOSALS = 8
"""Proposals in a row that lead to no new run, after which a search ends."""
IDLE_ROUNDS = 60
"""Rounds in a row without a new run, as when all tasks pass, after which a search ends."""
SEARCH_SHARE = 0.5
"""The part of each limit that the search may use. The report has the rest."""
SHOWN = 4_000
"""Characters of a task and of an answer that a proposal sees."""
QUESTION = """The text, a {what} with the name {name}:

```
<curr_param>
```

Runs of the agent with this text:

<side_info>
"""


class SearchOver(Exception):
    """The search has used what it may use; the text says what."""


@dataclass
class Improvement:
    """A search under way. Its steps are called by GEPA, in a thread, and run in the loop of `run`."""

    evaluation: Evaluation
    tasks: Sequence[Task]
    database: Database
    runners: Runners
    budget: Budget
    env: Mapping[str, str]
    at_once: int
    report: Callable[[Cell], None]
    _seen: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]], init=False)
    """The runs that the search has asked for, whether they were stored or not."""
    _parent: int = field(default=0, init=False)
    _asked: int = field(default=0, init=False)
    """The proposals that the search has asked for."""
    _idle: int = field(default=0, init=False)
    """The rounds since the last new run."""
    _idle_proposals: int = field(default=0, init=False)
    _failure: Exception | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _pending: "Future[Any] | None" = field(default=None, init=False)

    @property
    def notes(self) -> SearchNotes:
        """The state that is stored."""
        assert self.evaluation.settings.search
        return self.evaluation.settings.search

    @property
    def question(self) -> str:
        """The template of the words to the model that proposes."""
        name = self.notes.target
        what = "file" if is_file_name(name) else "Jinja template"
        what = "description of a tool for the model" if name.startswith(TOOL) else what
        return QUESTION.format(what=what, name=name.removeprefix(TOOL))

    async def run(self) -> None:
        """Search, unless the search has ended, and run the tasks of the report.

        A search that has reached a limit goes on, as there may be a higher one, until a task of the report is run.
        Raises AgentError, StoreError, ConfigError, BudgetSpent; the runs until then are stored.
        """
        if self.notes.winner is None or not any(cell.task in self.notes.test for cell in self.evaluation.cells):
            await self.search()
        winner = self.notes.winner
        if winner or self.notes.target == JUDGE:  # the agreement of today's judge is told in any case
            repetitions = range(1, self.evaluation.settings.repeat + 1)
            compared = sorted({0, winner or 0})
            keys = [(id, at, n) for n in repetitions for id in self.notes.test for at in compared]
            await self.run_all(keys)
        save_settings(self.database, self.evaluation, ended=True)

    async def search(self) -> None:
        """Search for a candidate that does better on the validation tasks than the first prompt, and note it."""
        self._loop, self.notes.stopped, self.notes.winner = asyncio.get_running_loop(), "", None
        thread = asyncio.create_task(asyncio.to_thread(self.search_in_thread))
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._failure = AgentError("The search was stopped.")
            if self._pending:
                self._pending.cancel()
            with suppress(Exception):
                await thread
            raise
        scores = [candidate.score or 0.0 for candidate in self.notes.candidates]
        self.notes.winner = scores.index(max(scores))
        save_settings(self.database, self.evaluation)

    def search_in_thread(self) -> None:
        """Let GEPA search. Raises what has ended the search, unless it has used what it may use."""
        notes = self.notes
        with suppress(SearchOver):
            search(self.evaluation.settings.prompts[0].template, notes.train, notes.validation, self, notes.seed)
        if self._failure and not isinstance(self._failure, SearchOver):
            raise self._failure

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of `run`, and wait for it. Its error ends the search."""
        try:
            self._pending = asyncio.run_coroutine_threadsafe(work, self._loop)
            return self._pending.result()
        except Exception as error:  # kept for `search_in_thread`: GEPA may catch any of them
            self._failure = self._failure or error
            raise

    # The steps, called by GEPA

    def evaluate(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, dict[str, Any]]]:
        """Run pairs of a candidate and a task; return the score of each, and what a proposal may see."""
        return self.call(self.evaluate_pairs(pairs))

    def propose(self, question: str) -> str:
        """Ask the model for another text, or return its stored answer."""
        if self._failure:
            raise self._failure
        return self.call(self.find_proposal(question))

    def choose_parent(self, text: str) -> None:
        """Note the candidate that the next one is made from."""
        self._parent = self.find_candidate(text)
        self._idle += 1

    def accept(self, text: str, score: float) -> None:
        """Note the score of a candidate on all validation tasks."""
        self.notes.candidates[self.find_candidate(text)].score = score

    def is_over(self) -> bool:
        """Return True if no further candidate is to be made, and note why."""
        left = self.notes.max_runs - len(self._seen)
        if not self.notes.stopped and not self._failure:
            if left < MINIBATCH + len(self.notes.validation):
                self.notes.stopped = f"The limit of {self.notes.max_runs} runs is reached."
            elif self._idle_proposals >= IDLE_PROPOSALS:
                self.notes.stopped = f"The last {IDLE_PROPOSALS} proposals were faulty, or known before."
            elif self._idle >= IDLE_ROUNDS:
                self.notes.stopped = "The tasks to learn from pass."
        return bool(self.notes.stopped or self._failure)

    # What the steps do

    def find_candidate(self, text: str) -> int:
        """Return the place of a candidate; store a new one as a version of the prompt, with its parent."""
        settings, target = self.evaluation.settings, self.notes.target
        for at, prompt in enumerate(settings.prompts):
            if prompt.template == text:
                return at
        with self.database.begin_write() as connection:
            store_version(connection, target, text, now())
            number = find_number(connection, target, text)
        prompt = PromptVersion(f"{target}@{number}", target, text)
        settings.prompts.append(prompt)
        fault = find_fault(prompt, settings.prompts[0])
        self.notes.candidates.append(Candidate(parent=self._parent, fault=fault))
        save_settings(self.database, self.evaluation)
        return len(settings.prompts) - 1

    async def evaluate_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, dict[str, Any]]]:
        """Run those of the pairs that are not stored; see `evaluate`. Raises SearchOver, AgentError, StoreError."""
        keys = [(task, self.find_candidate(text), 1) for text, task in pairs]
        valid = [key for key in keys if not self.notes.candidates[key[1]].fault]
        new = {*valid} - self._seen
        if len(self._seen) + len(new) > self.notes.max_runs:
            raise self.stop(f"The limit of {self.notes.max_runs} runs is reached.")
        self._seen |= new
        if new:
            self._idle = self._idle_proposals = 0
        if new - self.evaluation.finished.keys():
            self.check_share()
        await self.run_all(valid)
        cells = self.evaluation.finished
        by_id = {task.id: task for task in self.tasks}
        return [
            describe_run(by_id[key[0]], cells[key])
            if key in cells
            else (0.0, {"Fault": self.notes.candidates[key[1]].fault})
            for key in keys
        ]

    async def run_all(self, keys: Sequence[tuple[str, int, int]]) -> None:
        """Run the cells that are not stored; those that end with an error a second time.

        Raises AgentError if one ends so again, StoreError, ConfigError, BudgetSpent.
        """
        for _ in range(2):
            left = [key for key in dict.fromkeys(keys) if key not in self.evaluation.finished]
            if not left:
                return
            cells = [Cell(task=task, variant=at, repetition=n) for task, at, n in left]
            await run_cells(
                self.evaluation,
                cells,
                self.tasks,
                self.database,
                self.runners,
                env=self.env,
                at_once=self.at_once,
                report=self.report,
                budget=self.budget,
            )
        if errors := [cell for cell in self.evaluation.cells if cell.state == "error"]:
            said = to_line(errors[0].outcome.error)
            raise AgentError(f"{len(errors):,} runs ended with an error, the first, of {errors[0].task}, with: {said}")

    def check_share(self) -> None:
        """Raise SearchOver if the search has used its share of a limit."""
        self.budget.find_reached()  # counts the time until now
        for what, limit in self.budget.limits.items():
            if self.budget.spent.get(what, 0) >= limit * SEARCH_SHARE:
                raise self.stop(f"Half of the {limit:,.6g} {what} is used; the rest is for the report.")

    def stop(self, reason: str) -> SearchOver:
        """Note why the search ends, and return the error that ends it."""
        self.notes.stopped = reason
        self._failure = SearchOver(reason)
        return self._failure

    async def find_proposal(self, question: str) -> str:
        """Return the stored answer to a question, or ask the model. Raises SearchOver, AgentError, StoreError."""
        key, proposals = sha256(question.encode()).hexdigest(), self.notes.proposals
        self._asked += 1
        self._idle_proposals += 1
        if len(proposals) >= self._asked:
            if proposals[self._asked - 1].key == key:
                return proposals[self._asked - 1].text
            del proposals[self._asked - 1 :]  # another version of GEPA asks otherwise
        self.check_share()
        proposals.append(await self.ask(key, question))
        save_settings(self.database, self.evaluation)
        return proposals[-1].text

    async def ask(self, key: str, question: str) -> Proposal:
        """Ask the model that proposes; a useless reply, such as an echo, proposes an empty text. Raises AgentError."""
        system, meter, replies = Prompt.from_package("improve", "crow_eval"), Meter(), list[ModelCall]()

        def use(crow: Crow) -> None:
            crow.use(replace_prompts, prompts={"system": system})
            crow.use(measure, meter=meter)

            @crow.after_model
            def keep(session: Session, model_call: ModelCall) -> None:
                replies.append(model_call)

        model = self.notes.proposer or self.evaluation.settings.models[0]
        async with Agent(model, tools=[], extensions=[use], budget=self.budget, env=self.env) as agent:
            session = await agent.session()
            began = monotonic()
            try:
                text = (await session.prompt(question)).text
            except PromptFailed:
                if not replies or replies[-1].interruption:
                    raise
                text = ""
            finally:
                await session.close()
        counts = meter.counts[session.id]
        return Proposal(
            key=key,
            text=text,
            session=session.id,
            requests=counts.requests,
            tokens=counts.input + counts.output,
            cost=counts.cost,
            currency=counts.currency,
            total=(monotonic() - began) * 1000,
        )


def find_fault(prompt: PromptVersion, first: PromptVersion) -> str:
    """Return why a candidate cannot take the place of the first prompt; "" if it can."""
    if not prompt.template.strip():
        return "The text is empty."
    if is_file_name(prompt.name):
        return find_file_fault(prompt.name, prompt.template)
    try:
        check_prompt(prompt)
    except ConfigError as error:
        fault = str(error).removeprefix(f"--prompt {prompt.label}").lstrip(": ")
        return fault[0].upper() + fault[1:]
    given = SYSTEM_VARIABLES if prompt.name in SYSTEM else find_variables(first.template)
    if new := sorted({*find_variables(prompt.template)} - {*given}):
        return f"The template uses {new[0]}, which it is not given."
    if prompt.name.startswith(TOOL) and len(prompt.template) > DESCRIPTION_LIMIT:
        return f"The description has more than {DESCRIPTION_LIMIT:,} characters."
    if lost := sorted({*find_variables(first.template)} - {*find_variables(prompt.template)}):
        return f"The template has lost {', '.join(f'{{{{ {name} }}}}' for name in lost)}."
    return ""


def describe_run(task: Task, cell: Cell) -> tuple[float, dict[str, Any]]:
    """Return the score of a run, and what the model that proposes sees of it."""
    passed, outcome = cell.state == "passed", cell.outcome
    seen: dict[str, Any] = {
        "Task": task.prompt[:SHOWN],
        "Last message of the agent": outcome.answer[-SHOWN:] or "(none)",
        "Result": "passed" if passed else "failed",
    }
    if not passed:
        seen["Checks that failed"] = [f"{check.name}: {check.reason[:SHOWN]}" for check in cell.failed_checks]
    if outcome.denied:
        seen["Tool calls that were denied"] = outcome.denied
    return float(passed), seen


def load_first(database: Database, prompt: PromptVersion) -> PromptVersion:
    """Store the prompt that a search begins with; return it as a version of its name. Raises StoreError."""
    with database.begin_write() as connection:
        store_version(connection, prompt.name, prompt.template, now())
        row = find_version(connection, f"{prompt.name}@{find_number(connection, prompt.name, prompt.template)}")
    return PromptVersion(f"{row.name}@{row.number}", row.name, row.template)
