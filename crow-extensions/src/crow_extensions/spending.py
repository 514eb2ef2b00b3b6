"""Count what model calls use, and keep to limits: of sessions, programs, evaluations and commands."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock
from time import monotonic
from typing import TYPE_CHECKING

from crow_core.errors import ConfigError, EndTurn, ModelError

if TYPE_CHECKING:
    from crow_core.app import Crow
    from crow_core.models.model_call import Model, ModelCall, ModelRequest
    from crow_core.session.session import Session

# The modules of the core are imported where they are used: a program that makes an agent imports this one, and starts
# without them.


@dataclass
class Spending:
    """The requests, tokens, money and minutes that were used, and the most that may be used; None means no limit.

    Any number of sessions, agents and threads may share one. A model call is reserved before it is sent: it waits while
    the calls under way may use what is left. Each of these is expected to use as much as the largest so far, and the
    first call is sent alone if tokens or money are limited.
    """

    requests: float | None = None
    """Model calls."""
    tokens: float | None = None
    """Input and output together."""
    money: float | None = None
    """In the currency of the model's prices."""
    minutes: float | None = None
    """The time between `start` and `pause`."""
    spent: dict[str, float] = field(default_factory=dict[str, float])
    """The amounts used so far, by the names of the limits."""
    setting: str = "Budget(money=…)"
    """The setting that limits money, for the error about a model without prices."""
    stopped: str = field(default="", init=False)
    """A sentence about the limits at which a model call was not sent; empty if none was."""
    _since: float = field(default=0.0, init=False, repr=False)
    """The time up to which the minutes are counted, in seconds of the monotonic clock; 0 while they do not count."""
    _largest: dict[str, float] = field(default_factory=dict[str, float], init=False, repr=False)
    """The most that one call has used so far, by the names of the limits."""
    _under_way: Counter[str] = field(default_factory=Counter[str], init=False, repr=False)
    """The calls that are reserved and have not ended, by their sessions."""
    _waiting: "list[asyncio.Future[None]]" = field(
        default_factory=list["asyncio.Future[None]"], init=False, repr=False, compare=False
    )
    """Done when a call has ended."""
    _lock: RLock = field(default_factory=RLock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, limit in self.limits.items():
            if limit < 0:
                raise ValueError(f"The limit of {what} is {limit:g}. Give a number from 0 on, or None for no limit.")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        given = {"requests": self.requests, "tokens": self.tokens, "money": self.money, "minutes": self.minutes}
        return {what: limit for what, limit in given.items() if limit is not None}

    def start(self) -> None:
        """Let the minutes count from now on, unless they do already."""
        self._since = self._since or monotonic()

    def pause(self) -> None:
        """Let the minutes not count until the next `start`."""
        self._count_time()
        self._since = 0.0

    def _count_time(self) -> None:
        if self._since:
            now = monotonic()
            self.spend("minutes", (now - self._since) / 60)
            self._since = now

    def spend(self, what: str, amount: float) -> None:
        """Add to the amounts used."""
        with self._lock:
            self.spent[what] = self.spent.get(what, 0) + amount

    def grant(self, what: str, amount: float) -> None:
        """Set a limit to the amount used and this amount more."""
        setattr(self, what, self.spent.get(what, 0) + amount)

    def check_prices(self, model: "Model") -> None:
        """Raises ConfigError if money is limited and the model has no prices."""
        if self.money is not None:
            require_prices(model, self.setting)

    def find_reached(self) -> list[str]:
        """List the names of the limits that are reached."""
        self._count_time()
        return [what for what, limit in self.limits.items() if self.spent.get(what, 0) >= limit]

    def describe_reached(self) -> str:
        """Make a sentence about the limits that are reached; empty if none is."""
        limits = self.limits
        parts = (f"{self.spent.get(what, 0):,.6g} of {limits[what]:,.6g} {what}" for what in self.find_reached())
        sentence = ", ".join(parts)
        return f"The budget is used up: {sentence}." if sentence else ""

    async def reserve(self, session: str) -> str:
        """Wait until there is room for a call of a session, and reserve it; `settle` or `release` ends that.

        If a limit is reached, reserve nothing and return a sentence about it.
        """
        while True:
            with self._lock:
                if sentence := self.describe_reached():
                    self.stopped = sentence
                    return sentence
                if self._has_room():
                    self._under_way[session] += 1
                    return ""
                ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(ended)
            await ended

    def _has_room(self) -> bool:
        """Test whether a limit would not be reached even if each call under way used as much as the largest so far."""
        if not (calls := self._under_way.total()):
            return True
        each = {**self._largest, "requests": 1.0, "minutes": 0.0}
        return all(
            what in each and self.spent.get(what, 0) + calls * each[what] < limit for what, limit in self.limits.items()
        )

    def settle(self, session: str, used: dict[str, float]) -> None:
        """Count what a reserved call has used, by the names of the limits. An unknown amount is left out."""
        with self._lock:
            for what, amount in used.items():
                self.spend(what, amount)
                self._largest[what] = max(amount, self._largest.get(what, 0))
            self.release(session, 1)

    def release(self, session: str, calls: int = 0) -> None:
        """Give back what a session has reserved: a number of calls, or 0 for all."""
        with self._lock:
            self._under_way[session] -= min(calls or self._under_way[session], self._under_way[session])
            if not self._under_way[session]:
                del self._under_way[session]
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.get_loop().is_closed():
                each.get_loop().call_soon_threadsafe(wake, each)

    def count(self, model_call: "ModelCall", session: str) -> None:
        """Count a model call of a session if it has ended. One that was not answered counts as a request alone."""
        from crow_core.models.token_usage import count_tokens, find_price

        if not model_call.ended:
            return
        used = {"requests": 1.0}
        if model_call.first_delta or model_call.usage:
            counted = count_tokens(model_call)
            used["tokens"] = counted["prompt"] + counted["completion"]
        if "tokens" in used or model_call.cost:
            paid = find_price(model_call)
            used["money"] = paid[0] if paid else 0.0
        if model_call.purpose == "turn":
            self.settle(session, used)
        else:
            for what, amount in used.items():
                self.spend(what, amount)


def wake(waiting: "asyncio.Future[None]") -> None:
    """Let go of a call that waits, unless it was cancelled."""
    if not waiting.done():
        waiting.set_result(None)


def require_prices(model: "Model", setting: str) -> None:
    """Raises ConfigError if a model has no `prices`, so that a setting that limits money cannot hold."""
    if getattr(model, "prices", None) is None and not getattr(model, "is_free", False):
        raise ConfigError(
            f"{setting} needs the prices of {model.name}. Set `prices` of the model in config.toml; those of a model "
            "that costs nothing are 0."
        )


def count_calls(crow: "Crow", find: "Callable[[Session], Spending]") -> None:
    """Count the model calls of all sessions of an app; `find` returns what a session spends from."""

    @crow.model_call
    def count(session: "Session", model_call: "ModelCall") -> None:
        find(session).count(model_call, session.id)

    @crow.turn_end
    def release(session: "Session", outcome: object) -> None:
        find(session).release(session.id)


async def reserve_call(spending: Spending, session: "Session") -> str:
    """Reserve the next model call of a session. Return a sentence about a limit that is reached; empty if none is.

    Raises ModelError if the session's model has no prices, and money is limited.
    """
    try:
        spending.check_prices(session.model)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    return await spending.reserve(session.id)


def limit_calls(crow: "Crow", find: "Callable[[Session], Spending]") -> None:
    """Count the model calls of all sessions of an app, and end a turn before a call beyond a limit."""
    count_calls(crow, find)

    @crow.before_model
    async def reserve(request: "ModelRequest", session: "Session") -> None:
        if sentence := await reserve_call(find(session), session):
            raise EndTurn("max_turn_requests", sentence)
