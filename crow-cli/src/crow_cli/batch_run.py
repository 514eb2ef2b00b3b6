"""`crow batch`: run many tasks, each in a session of its own, and write one result a task to a file.

A result is written when its task is done, so that a batch that was stopped or killed goes on where it was.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from time import monotonic
from typing import Any, TypeAlias

import click
import crow_system as system
import msgspec
from crow_agent import Agent, AgentError, Budget, BudgetSpent, Result
from crow_core.errors import ConfigError
from crow_core.text import escape_controls
from msgspec import UNSET, UnsetType

from crow_cli.console import escape_line, shorten
from crow_cli.process import hide_memory

LINE_START = b'{"id":'
"""The start of each line of a file of results."""

FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | system.NO_TERMINAL | system.BINARY

REPORT_INTERVAL = 10.0
"""Seconds between two lines about the progress, if standard error is not a terminal."""

MAX_FAILURES_SHOWN = 20

MAX_FAILURE_WIDTH = 200
"""Columns of the line of a task that failed."""

STOP_SENTENCES = {
    "max_tokens": "The model's answer was cut at its length limit.",
    "max_turn_requests": "The task took as many model requests as allowed (--max-requests).",
    "refusal": "The model refused.",
    "cancelled": "The turn was cancelled.",
}
"""The errors of tasks whose turns did not end normally, by the stop reason."""


Report: TypeAlias = Callable[["BatchResult"], None]
"""Shows that a task is done."""


class BatchTask(msgspec.Struct):
    """A line of the file of tasks."""

    prompt: str
    id: str | int = ""
    """By default the number of the line."""
    cwd: str = ""
    """The folder of its session; by default that of the batch."""

    @property
    def key(self) -> str:
        """The id as text, which tells tasks apart."""
        return str(self.id)

    @property
    def digest(self) -> str:
        """A hash of the question, to notice that the file of tasks has changed since."""
        return sha256("\0".join([self.prompt, self.cwd]).encode("utf-8", "replace")).hexdigest()[:16]


class BatchResult(msgspec.Struct, kw_only=True):
    """A line of the file of results."""

    id: str | int
    session_id: str
    """The session of the task; `crow run -r` continues it. Empty if none was opened."""
    stop_reason: str
    """As in ACP; empty if the turn failed."""
    stopped_by: str | UnsetType = UNSET
    """The part of crow that ended the turn without an answer, such as `repeated_calls`."""
    error: str | None
    """The reason why the task failed; None if it succeeded."""
    task: str
    """The digest of the task."""
    output: Any = UNSET
    """The answer that fits the schema of --output-schema."""
    text: str | UnsetType = UNSET
    """The answer in place of `output`."""
    denied: list[dict[str, str]] | UnsetType = UNSET
    """The tool calls that were denied a permission: id, tool and title."""
    usage: dict[str, int] | None = None
    """Tokens."""
    cost: float | None = None

    @property
    def key(self) -> str:
        """The id as text."""
        return str(self.id)


@dataclass
class BatchTally:
    """The number of tasks, of those that are done, and what they took."""

    total: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    cost: float = 0.0
    failures: list[BatchResult] = field(default_factory=list[BatchResult])
    """The first that failed."""

    def add(self, result: BatchResult) -> None:
        """Count a task that is done."""
        self.done += 1
        self.tokens += (result.usage or {}).get("total_tokens", 0)
        self.cost += result.cost or 0
        if result.error is not None:
            self.failed += 1
            self.failures += [result] if len(self.failures) < MAX_FAILURES_SHOWN else []

    def describe(self) -> str:
        """Describe failures, tokens and cost in one line."""
        parts = [f"{self.failed:,} failed" if self.failed else "", f"{self.tokens:,} tokens"]
        return ", ".join(filter(None, [*parts, f"cost {self.cost:.4f}" if self.cost else ""]))


class ResultFile:
    """The file of results, locked against other processes while it is open."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file, remove a last line that was not written whole, and read the results.

        Raises ConfigError for a file that cannot be used; it is unchanged then.
        """
        self.path = path
        self.results: dict[str, BatchResult] = {}
        """The results, by the key of their tasks."""
        self._descriptors: list[int] = []
        """The open file, last; before it those that it has replaced, whose locks other processes may wait for."""
        try:
            self._open()
        except OSError as error:
            self.close()
            raise ConfigError(f"{path} cannot be opened: {error.strerror}.") from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        descriptor = os.open(self.path, FLAGS, 0o644)
        self._descriptors.append(descriptor)
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"--out: {self.path} is no file.")
        lock(descriptor, self.path)
        if not os.path.samestat(os.fstat(descriptor), os.stat(self.path)):  # replaced since it was opened
            raise to_lock_error(self.path)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
        whole, mark, rest = data.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if mark else [], 1):
            self._add(line, number)
        if not rest:
            return
        try:
            self._add(rest, whole.count(b"\n") + 2 if mark else 1)
            os.write(descriptor, b"\n")
        except ConfigError:
            if not is_torn(rest):
                raise
            os.ftruncate(descriptor, len(whole) + len(mark))
        write(descriptor, b"")

    def _add(self, line: bytes, number: int) -> None:
        """Read a line. Raises ConfigError."""
        try:
            result = msgspec.json.decode(line, type=BatchResult)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.path}: line {number} is no result of a batch ({error}). Give another --out."
            ) from (error)
        if result.key in self.results:
            raise ConfigError(f"{self.path}: line {number} is a second result for the task {result.id}. Remove one.")
        self.results[result.key] = result

    def append(self, result: BatchResult) -> None:
        """Write a result, and wait until it is on the disk. Raises ConfigError if it cannot be written."""
        descriptor, line = self._descriptors[-1], msgspec.json.encode(result) + b"\n"
        size = os.fstat(descriptor).st_size
        try:
            write(descriptor, line)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}. Mend this, then go on with the same command."
            ) from error
        self.results[result.key] = result

    def remove(self, keys: Iterable[str]) -> None:
        """Remove results, so that their tasks run again. Raises ConfigError."""
        left_out, path = set(keys), self.path.resolve()
        kept = {key: result for key, result in self.results.items() if key not in left_out}
        new = path.with_name(f".{path.name}.new")
        try:
            self._descriptors.append(descriptor := os.open(new, FLAGS | os.O_TRUNC, 0o600))
            lock(descriptor, self.path)
            system.set_mode(descriptor, os.fstat(self._descriptors[0]).st_mode & 0o777)
            write(descriptor, b"".join(msgspec.json.encode(result) + b"\n" for result in kept.values()))
            system.replace_file(new, path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be replaced: {error.strerror}.") from error
        self.results = kept

    def close(self) -> None:
        """Close the file, which unlocks it."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def is_torn(line: bytes) -> bool:
    """Tell whether the last line of a file is the start of a result that was not written whole."""
    text = line.rstrip(b"\0")
    if not text.startswith(LINE_START):
        return LINE_START.startswith(text)
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False


def lock(descriptor: int, path: Path) -> None:
    """Lock a file of results. Raises ConfigError if another process has locked it."""
    try:
        system.lock(descriptor, wait=False)
    except BlockingIOError:
        raise to_lock_error(path) from None


def to_lock_error(path: Path) -> ConfigError:
    """Make the error for a file that another process writes."""
    return ConfigError(f"{path} is being written by another crow batch. Wait for its end, or give another --out.")


def write(descriptor: int, data: bytes) -> None:
    """Write all of it to a file, and wait until it is on the disk."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def load_tasks(path: Path) -> list[BatchTask]:
    """Load a file of tasks. Raises ConfigError for a line that is not a task, and for two tasks with one id."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    tasks: list[BatchTask] = []
    known: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = msgspec.json.decode(line, type=BatchTask | str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'{path}: line {number} is no task ({error}). Write {{"prompt": "…"}} or a JSON string.'
            ) from error
        task = BatchTask(task) if isinstance(task, str) else task
        if not task.prompt.strip():
            raise ConfigError(f"{path}: line {number} has an empty prompt.")
        task.id = number if task.id == "" else task.id
        if (first := known.setdefault(task.key, number)) != number:
            raise ConfigError(
                f"{path}: lines {first} and {number} have the same id, {task.id}. Give each one of its own."
            )
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} has no tasks.")
    return tasks


async def batch(
    tasks_file: Path,
    out: Path,
    *,
    model: str,
    mode: Any,
    cwd: Path,
    at_once: int,
    output_schema: dict[str, Any] | None,
    timeout: float | None,
    max_requests: int | None,
    max_cost: float | None,
    max_tokens: int | None,
    max_minutes: float | None,
    retry_failed: bool,
) -> int:
    """Run the tasks that have no result yet, and return the exit code. Raises ConfigError."""
    tasks = load_tasks(tasks_file)
    file = ResultFile(out)
    try:
        results = file.results
        if retry_failed:
            file.remove(task.key for task in tasks if task.key in results and results[task.key].error is not None)
        check_unchanged(tasks, file)
        left = [task for task in tasks if task.key not in file.results]
        tally = BatchTally(len(tasks))
        for task in tasks:
            if result := file.results.get(task.key):
                tally.add(result)
        budget = Budget(money=max_cost, tokens=max_tokens, minutes=max_minutes, setting="--max-cost")
        budget.spent |= {"money": tally.cost, "tokens": tally.tokens}
        hide_memory()
        agent = Agent(model, mode=mode, cwd=cwd, max_requests=max_requests, budget=budget if budget.limits else None)
        reason = ""
        try:
            with reporting(tally) as report:
                if left:
                    reason = await run_tasks(agent, left, file, report, cwd, at_once, output_schema, timeout)
        except AgentError as error:
            raise ConfigError(str(error)) from error
        except BaseException:  # an interrupt, a full disk
            print_end(tally, "Stopped.")
            raise
        return print_end(tally, reason)
    finally:
        file.close()


def check_unchanged(tasks: Sequence[BatchTask], file: ResultFile) -> None:
    """Raises ConfigError if a result belongs to a task that was changed since."""
    for task in tasks:
        if (done := file.results.get(task.key)) and done.task != task.digest:
            raise ConfigError(
                f"{file.path} has a result for the task {task.id} as it was before it was changed. "
                "Give the task another id, or another --out."
            )


async def run_tasks(
    agent: Agent,
    tasks: Sequence[BatchTask],
    file: ResultFile,
    report: Report,
    cwd: Path,
    at_once: int,
    output: dict[str, Any] | None,
    timeout: float | None,
) -> str:
    """Run tasks, some at once, and write their results; return the reason why it ended early, or nothing.

    Raises AgentError if the agent cannot be started, ConfigError if a result cannot be written.
    """
    waiting, reason = iter(tasks), ""

    async def work() -> None:
        nonlocal reason
        for task in waiting:
            try:
                result = await run_task(agent, task, cwd, output, timeout)
            except BudgetSpent as error:
                reason = str(error)
                return
            file.append(result)
            report(result)
            if reason:
                return

    async with agent:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(tasks))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return reason


async def run_task(agent: Agent, task: BatchTask, cwd: Path, output: Any, timeout: float | None) -> BatchResult:
    """Send the prompt of a task to a session of its own. Raises BudgetSpent."""
    try:
        async with await agent.session(cwd=cwd / task.cwd) as session:
            result = await session.prompt(task.prompt, output=output, timeout=timeout)
        error = STOP_SENTENCES.get(result.stop_reason) if result.error is None else str(result.error)
    except BudgetSpent:
        raise
    except AgentError as failure:
        error, result = str(failure), failure.result or Result[Any]("")
    return BatchResult(
        id=task.id,
        session_id=result.session_id,
        stop_reason=result.stop_reason,
        stopped_by=result.stopped_by or UNSET,
        error=error,
        task=task.digest,
        output=result.value,
        text=result.text if result.value is UNSET else UNSET,
        denied=[{"id": call.tool_call_id, "tool": call.name or "", "title": call.title} for call in result.denied]
        or UNSET,
        usage={name: n for name, n in msgspec.structs.asdict(result.usage).items() if isinstance(n, int)}
        if result.usage
        else None,
        cost=result.cost,
    )


@contextmanager
def reporting(tally: BatchTally) -> Generator[Report]:
    """Yield a function that counts a task that is done and shows the progress, as a bar where there is a terminal."""
    if not sys.stderr.isatty():
        last = monotonic()

        def report(result: BatchResult) -> None:
            nonlocal last
            tally.add(result)
            if monotonic() - last > REPORT_INTERVAL:
                last = monotonic()
                click.echo(f"{tally.done:,} of {tally.total:,} tasks are done: {tally.describe()}", err=True)

        yield report
        return
    from rich.console import Console  # imported here because few commands show a bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(tally.describe(), total=tally.total, completed=tally.done)

        def advance(result: BatchResult) -> None:
            tally.add(result)
            progress.update(bar, completed=tally.done, description=tally.describe())

        yield advance


def print_end(tally: BatchTally, reason: str) -> int:
    """Print how the batch ended, and why if early; return the exit code."""
    for result in tally.failures:
        line = f"  {escape_line(str(result.id))}: {escape_line(result.error or '')}"
        click.secho(shorten(line, MAX_FAILURE_WIDTH), fg="red", err=True)
    if (more := tally.failed - len(tally.failures)) > 0:
        click.secho(f"  and {more:,} more", fg="red", err=True)
    left = tally.total - tally.done
    sentences = [
        f"{tally.done - tally.failed:,} of {tally.total:,} tasks succeeded: {tally.describe()}.",
        "Run those that failed again with --retry-failed." if tally.failed else "",
        escape_controls(reason),
        f"{left:,} tasks have no result yet: go on with the same command." if left else "",
    ]
    click.echo(f"crow: {' '.join(filter(None, sentences))}", err=True)
    return 1 if tally.failed or left else 0
