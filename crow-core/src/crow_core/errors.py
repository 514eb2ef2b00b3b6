"""The errors that the core raises for a person to read; each text is one sentence: what happened, where, what to do.

ModelError          an endpoint did not answer as it should
PromptError         a template cannot be rendered
ConfigError         a setting cannot be used
ElicitationError    the user cannot be asked, or the answer does not fit the question
StoreError          a session cannot be written or read
    SessionBusy     it is open in another process
EndTurn             raised in a hook to end the turn; not a failure
"""

from crow_core.acp.schema import (
    StopReason,
)


class ModelError(Exception):
    """The endpoint did not answer as it should; the text is a sentence for a person."""

    def __init__(
        self, sentence: str, *, retry: bool = False, after: float | None = None, too_long: bool = False
    ) -> None:
        super().__init__(sentence)
        self.retry = retry
        """Whether the same request may succeed a little later."""
        self.after = after
        """Seconds the server asked to wait."""
        self.too_long = too_long
        """The request was longer than what fits: a shorter one may do."""


class PromptError(Exception):
    """A template that cannot be rendered; the text names it and says what to do."""


class StoreError(Exception):
    """A session cannot be written or read; the text is for a person: what happened, where, what to do."""


class SessionBusy(StoreError):
    """A session is open in another process; it can be forked."""


class ConfigError(Exception):
    """A setting that cannot be used; the text names the file, the line, the key, and what to do."""


class ElicitationError(Exception):
    """A person cannot be asked so, or the answer does not fit the question; the text says why."""


class EndTurn(Exception):
    """Raised in a hook to end the turn in good order: a command was answered, a budget is spent."""

    def __init__(self, stop_reason: StopReason = "end_turn", text: str = "") -> None:
        super().__init__(text or stop_reason)
        self.stop_reason: StopReason = stop_reason
        self.text = text
        """What the user is told."""
