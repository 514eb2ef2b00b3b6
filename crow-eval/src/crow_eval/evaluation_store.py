"""The stored evaluations: write cells as they end, read them again."""

import asyncio
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any
from uuid import uuid4
from zlib import crc32

import crow_system as system
import msgspec
from crow_core.errors import StoreError
from crow_persistence.database import Database
from crow_system.files import make_private_folder

from crow_eval import rows as evaluations
from crow_eval.cells import Cell, EvaluationSettings, to_cell, to_row

logger = logging.getLogger("crow")

GATHER_TIME = 0.05
"""Seconds for which outcomes are gathered before they are written."""
STORE_WAIT = 600.0
"""Seconds for which outcomes that cannot be written wait."""
STORE_INTERVAL = 1.0
"""Seconds between two attempts to write them."""


class EvaluationRunsError(StoreError):
    """Another process runs the evaluation."""


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time() * 1000)


@dataclass
class Evaluation:
    """A stored evaluation."""

    number: int
    id: str
    dataset: str
    settings: EvaluationSettings
    created: int
    """Milliseconds since 1970."""
    ended: int | None = None
    cells: list[Cell] = field(default_factory=list[Cell])
    """The cells that have ended, in that order."""

    @property
    def cells_wanted(self) -> int:
        """The number of cells when all have ended; of a search, of those that it has run."""
        if self.settings.search:
            return len(self.finished)
        return len(self.settings.tasks) * len(self.settings.variants) * self.settings.repeat

    @property
    def has_all_cells(self) -> bool:
        """True if no cell is left to run. A search says itself when it ends."""
        return not self.settings.search and len(self.finished) == self.cells_wanted

    @property
    def finished(self) -> dict[tuple[str, int, int], Cell]:
        """The cells that have passed or failed, by their keys."""
        return {cell.key: cell for cell in self.cells if cell.state != "error"}


def create(database: Database, dataset: str, settings: EvaluationSettings) -> Evaluation:
    """Store a new evaluation. Raises StoreError."""
    id, at = uuid4().hex, now()
    with database.begin_write() as connection:
        text = msgspec.json.encode(settings).decode()
        number = evaluations.store_evaluation(connection, id, dataset, text, at)
    return Evaluation(number, id, dataset, settings, at)


def save_settings(database: Database, evaluation: Evaluation, *, ended: bool = False) -> None:
    """Store the settings of a search as they are now, and its end if it has `ended`. Raises StoreError."""
    with database.begin_write() as connection:
        text = msgspec.json.encode(evaluation.settings).decode()
        evaluations.replace_settings(connection, evaluation.number, text)
        if ended:
            evaluation.ended = now()
            evaluations.end_evaluation(connection, evaluation.number, evaluation.ended)


def load(database: Database, prefix: str) -> Evaluation:
    """Load the evaluation whose id begins with `prefix`. Raises StoreError."""
    with database.begin_read() as connection:
        row = evaluations.find_evaluation(connection, prefix)
        cells = [to_cell(each) for each in evaluations.load_cells(connection, row.number)]
    try:
        settings = msgspec.json.decode(row.settings, type=EvaluationSettings)
    except msgspec.DecodeError as error:
        raise StoreError(f"The evaluation {row.id} is damaged: {error}.") from error
    return Evaluation(row.number, row.id, row.dataset, settings, row.created, row.ended, cells)


@contextmanager
def locked(folder: Path, id: str) -> Generator[None]:
    """Hold the lock of an evaluation, which the system releases when the process ends.

    The lock is a byte of a file in `folder`, so it is held against processes of this machine only.
    Raises EvaluationRunsError if another process holds it, StoreError if the file cannot be opened.
    """
    path = folder / "evaluations.lock"
    try:
        make_private_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error
    try:
        if not system.lock_byte(descriptor, crc32(id.encode())):
            raise EvaluationRunsError(f"The evaluation {id[:8]} runs in another process. Wait for its end, or stop it.")
        yield
    finally:
        os.close(descriptor)


def list_stored(database: Database, limit: int) -> Sequence[Any]:
    """Return the rows of the latest evaluations, newest first. Raises StoreError."""
    with database.begin_read() as connection:
        return evaluations.list_evaluations(connection, limit)


class CellWriter:
    """Writes cells of an evaluation as they end, together with those that end within GATHER_TIME.

    A cell that cannot be written, for instance as the disk is full, waits for `close`.
    """

    def __init__(self, database: Database, evaluation: Evaluation) -> None:
        self._database = database
        self._evaluation = evaluation
        self._waiting: list[Cell] = []
        self._writing = asyncio.Lock()

    async def write(self, cell: Cell) -> None:
        """Write a cell, and those that wait. Raises StoreError; the cells wait on then."""
        self._waiting.append(cell)
        async with self._writing:
            if cell in self._waiting:
                await asyncio.sleep(GATHER_TIME)
                await self._store()

    async def close(self, *, ended: bool) -> None:
        """Write what waits, and the end of the evaluation if it has `ended`.

        While it cannot be written, try again for STORE_WAIT seconds, since what has ended may have cost money.
        Raises StoreError.
        """
        deadline, is_told = monotonic() + STORE_WAIT, False
        async with self._writing:
            while True:
                try:
                    return await self._store(ended=ended)
                except StoreError as error:
                    count = len(self._waiting)
                    if not count or monotonic() > deadline:
                        lost = f" Outcomes that are lost, so that their cells run again: {count:,}." if count else ""
                        raise StoreError(f"{error}{lost}") from error
                    if not is_told:
                        logger.warning("%s Outcomes that wait for it: %d. ^C gives them up.", error, count)
                    is_told = True
                await asyncio.sleep(STORE_INTERVAL)

    async def _store(self, *, ended: bool = False) -> None:
        """Write all cells that wait in one transaction, and the end. Raises StoreError."""
        cells = [*self._waiting]
        if cells or ended:
            await asyncio.to_thread(store_cells, self._database, self._evaluation.number, cells, ended=ended)
            del self._waiting[: len(cells)]


def store_cells(database: Database, number: int, cells: Sequence[Cell], *, ended: bool) -> None:
    """Store cells of an evaluation, and its end if it has `ended`, in one transaction. Raises StoreError."""
    with database.begin_write() as connection:
        if cells:
            evaluations.store_cells(connection, number, map(to_row, cells))
        if ended:
            evaluations.end_evaluation(connection, number, now())
