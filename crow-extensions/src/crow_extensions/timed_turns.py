"""The timers of a session, and the turns that they begin. Imported by the first /every or /at."""

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as TimeOfDay
from math import ceil
from typing import cast

from crow_core.acp.connection import ConnectionClosed
from crow_core.agent.client_turn import run_own_turn
from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.messages.notes import Notes
from crow_core.models.token_usage import TURN_TOTALS, TokenTotals
from crow_core.session.session import Session
from crow_core.text import to_line
from crow_system.shortening import shorten_line

from crow_extensions.spending import Spending

PERIOD = re.compile(r"(?:\d+[smhd])+", re.IGNORECASE)
SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
LONGEST = 366 * 86_400
"""The most seconds between two turns of a timer."""
MOST_TIMERS = 10
LOOK = 30.0
"""Seconds after which the clock is read again: a computer may have slept, or its clock was set."""
WORDS_LENGTH = 60
"""Characters of a prompt in a list of timers."""


class TimerNotes(Notes, total=False):
    """The timers have changed."""

    timers: list[str]
    """The commands of those that are open."""


@dataclass(eq=False)
class Timer:
    """A prompt, and when it is sent."""

    command: str
    """The command with which it began, but for the words: `/every 10m`."""
    words: str
    due: float
    """The time of the next turn, in seconds since 1970."""
    period: float
    """The seconds between two turns; 0 if there is only one."""
    spending: Spending
    times: int = 0
    """The turns so far."""

    def describe(self) -> str:
        """Describe the timer on a line."""
        return f"{self.command} {shorten_line(to_line(self.words), WORDS_LENGTH)}"


class TimedTurns:
    """The timers of a session. One task waits for all of them, so that only one turn of theirs runs or waits."""

    def __init__(self, crow: Crow, session: Session, limits: Mapping[str, float | None]) -> None:
        self._crow, self._session, self._limits = crow, session, limits
        self.open: list[Timer] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def answer(self, text: str, kind: str) -> str:
        """Run a command: begin, list or end timers. Return what to tell the user."""
        first, _, words = text.partition(" ")
        if not text:
            return self.describe()
        if first.lower() == "off":
            return self.end(words.strip())
        try:
            period = parse_period(first) if kind == "every" else 0.0
            due = time.time() + period if period else find_next(parse_time(first), datetime.now())
        except ValueError as error:
            return str(error)
        if not words.strip():
            return f"Say what to do: /{kind} {first} WORDS."
        if len(self.open) == MOST_TIMERS:
            return f"There are {MOST_TIMERS} timers already. /every lists them, /every off NUMBER ends one."
        requests, money, minutes = (self._limits[what] for what in ("requests", "money", "minutes"))
        spending = Spending(requests, None, money, minutes, setting="`money` in [extensions.timers]")
        try:
            spending.check_prices(self._session.model)
        except ConfigError as error:
            return str(error)
        self.open.append(Timer(f"/{kind} {first}", words.strip(), due, period, spending))
        self._note()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), context=Context())  # not that of this prompt
        return f"The next turn is {describe_time(due)}, if this session is open then. /every lists, /every off ends it."

    def describe(self) -> str:
        """List the timers."""
        if not self.open:
            return "There is no timer. To begin one: /every 10m WORDS, or /at 18:00 WORDS"
        return "\n".join(
            f"{number}. {timer.describe()} · next {describe_time(timer.due)}, {timer.times} times so far, "
            f"{timer.spending.spent.get('requests', 0):g} of {timer.spending.limits['requests']:g} requests"
            for number, timer in enumerate(self.open, 1)
        )

    def end(self, number: str) -> str:
        """End the timer of this number in the list, or all."""
        if number and not (number.isdecimal() and 0 < int(number) <= len(self.open)):
            return f"There is no timer {number}. /every lists them."
        ended = [self.open[int(number) - 1]] if number else [*self.open]
        if not ended and not self.read_ended():
            return "There is no timer."
        self.open = [timer for timer in self.open if timer not in ended]
        self._note()
        return "The timer is ended." if len(ended) == 1 else "All timers are ended."

    def read_ended(self) -> list[str]:
        """Read the timers that ended with an earlier session of the log."""
        found = self._session.view.find_kind("timers")
        return cast(TimerNotes, found[-1].get("crow", {})).get("timers", []) if found and not self.open else []

    def stop(self) -> None:
        """Let no timer fire any more, as the session ends."""
        if self._task:
            self._task.cancel()

    def _note(self) -> None:
        notes: TimerNotes = {"kind": "timers", "timers": [timer.describe() for timer in self.open]}
        self._session.log.append({"crow": notes})
        self.look()

    def look(self) -> None:
        """Let the waiting task look at the timers and at the clock."""
        self._changed.set()

    async def _run(self) -> None:
        """Wait for the timers and run their turns until there is none."""
        try:
            with suppress(ConnectionClosed):
                while self.open:
                    timer = min(self.open, key=lambda each: each.due)
                    self._changed.clear()
                    if (left := timer.due - time.time()) > 0:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(min(left, LOOK)):
                                await self._changed.wait()
                    else:
                        await self._wait_until_idle()
                        if timer in self.open:
                            await self._fire(timer)
        finally:
            self._task = None

    async def _wait_until_idle(self) -> None:
        """Wait until no turn runs, and none waits."""
        turns = self._session.turns
        while turns.tasks or turns.lock.locked():
            async with turns.lock:
                pass

    async def _fire(self, timer: Timer) -> None:
        """Run a turn of a timer; it is over when its limits are reached."""
        session, now = self._session, time.time()
        timer.times += 1
        if timer.period:
            timer.due += timer.period * ceil((now - timer.due) / timer.period or 1)  # without those that were missed
        else:
            self._drop(timer)
        TURN_TOTALS.set(used := TokenTotals())
        timer.spending.start()
        try:
            await run_own_turn(self._crow, session, {"role": "user", "content": timer.words})
        finally:
            timer.spending.pause()
            timer.spending.spend("requests", max(used.calls, session.turns.requests))
            timer.spending.spend("money", used.cost)
        if timer in self.open and (reached := timer.spending.describe_reached()):
            self._drop(timer)
            await session.notice(f"{timer.describe()} is ended. {reached}")

    def _drop(self, timer: Timer) -> None:
        self.open.remove(timer)
        self._note()


def parse_period(text: str) -> float:
    """Parse a period such as 10m or 1h30m. Raises ValueError with a sentence."""
    if not PERIOD.fullmatch(text):
        raise ValueError(f"{text!r} says not how often. Write it as 30s, 10m, 2h, 1h30m or 1d: /every 10m WORDS.")
    seconds = sum(int(number) * SECONDS[unit.lower()] for number, unit in re.findall(r"(\d+)(\D)", text))
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"{text!r} is no usable time: from 1s to 366d there may be between two turns.")
    return float(seconds)


def parse_time(text: str) -> TimeOfDay:
    """Parse a time of the day. Raises ValueError with a sentence."""
    try:
        found = TimeOfDay.fromisoformat(text.rjust(5, "0") if text[1:2] == ":" else text)
        if found.tzinfo is None and ":" in text:
            return found
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no time of the day. Write it as 18:00: /at 18:00 WORDS.")


def find_next(at: TimeOfDay, now: datetime) -> float:
    """Return when the local clock next shows a time of the day, in seconds since 1970.

    A time that a clock change leaves out is an hour later; of one that comes twice, it is the first.
    """
    today = datetime.combine(now.date(), at)
    return today.timestamp() if today.timestamp() > now.timestamp() else (today + timedelta(days=1)).timestamp()


def describe_time(at: float) -> str:
    """Describe a time in words, with the day if it is not today."""
    due = datetime.fromtimestamp(at)
    form = "%H:%M:%S" if at - time.time() < 120 else "%H:%M"
    return f"at {due:{form}}" if due.date() == datetime.now().date() else f"on {due:%a %d %b} at {due:%H:%M}"
