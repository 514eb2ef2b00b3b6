"""The errors of the SDK. Their texts are for a person; their fields hold the facts.

AgentError              any of these
    AgentClosed         the agent or the session was closed before
    AgentLost           the agent's process or connection ended, or never answered
    SessionNotFound     there is no stored session with that id
    PromptFailed        the agent answered a request with an error
    PromptTimeout       the turn took longer than its time limit, and was cancelled
    OutputError         no answer fitted the type that was asked for
    BudgetSpent         the budget is used up
    TurnStopped         crow ended the turn before the model did; the error of its `Result`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crow_agent.result import Result


class AgentError(Exception):
    """An agent could not do what it was asked."""

    result: "Result[Any] | None" = None
    """The result of the turn up to the error; None if no turn had started."""


class AgentClosed(AgentError):
    """The agent or the session was closed before."""


class AgentLost(AgentError):
    """The agent's process or connection ended, or never answered."""

    def __init__(self, sentence: str, *, agent: str = "", exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(sentence)
        self.agent = agent
        """The command or the address."""
        self.exit_code = exit_code
        """The exit code of its process; None if it still ran, or for an address."""
        self.stderr = stderr
        """The end of what its process wrote to standard error."""


class SessionNotFound(AgentError):
    """There is no stored session with that id."""

    def __init__(self, id: str) -> None:
        super().__init__(f"There is no session {id!r}. `crow sessions list` shows those that are stored.")
        self.session_id = id


class PromptFailed(AgentError):
    """The agent answered a request with an error, such as one of its model's endpoint."""

    def __init__(self, sentence: str, *, code: int = 0, data: Any = None) -> None:
        super().__init__(sentence)
        self.code = code
        """The JSON-RPC error code."""
        self.data = data
        """The data of the error."""


class PromptTimeout(AgentError):
    """The turn took longer than its time limit, and was cancelled."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The prompt was not done within {seconds:g} seconds. Give it a longer timeout.")
        self.seconds = seconds


class OutputError(AgentError):
    """No answer fitted the type that was asked for."""

    def __init__(self, name: str, faults: Sequence[str], why: str = "the turn ended without an answer.") -> None:
        attempts = f"{len(faults)} attempts" if len(faults) > 1 else "1 attempt"
        said = f"The answer did not fit {name} in {attempts}: {faults[-1]}" if faults else f"There is no {name}: {why}"
        super().__init__(said)
        self.faults = list(faults)
        """The reason why each of the answers did not fit, oldest first."""


class BudgetSpent(AgentError):
    """The budget is used up."""

    def __init__(self, sentence: str, *, spent: dict[str, float], limits: dict[str, float]) -> None:
        super().__init__(sentence)
        self.spent = spent
        """By name: "requests", "tokens", "money", "minutes"."""
        self.limits = limits
        """The limits under the same names."""


class TurnStopped(AgentError):
    """crow ended the turn before the model did, so that it has no answer."""

    def __init__(self, sentence: str, *, stopped_by: str = "") -> None:
        super().__init__(sentence)
        self.stopped_by = stopped_by
        """As in `Result`."""
