"""The errors that the core raises.

Their texts are for the user: what happened, where, and what to do.

    ModelError          a model call failed
    PromptError         a template cannot be rendered, or a prompt is refused
    ConfigError         a setting cannot be used
    ElicitationError    the user cannot be asked, or the answer does not fit the question
    StoreError          a session cannot be written or read
        SessionBusy     the session is open in another process
    EndTurn             raised in a hook to end the turn; not a failure
"""

from collections.abc import Sequence

from crow_core.acp.schema import StopReason


class ModelError(Exception):
    """A model call failed; the text names the endpoint and says what to do."""

    def __init__(
        self,
        sentence: str,
        *,
        retry: bool = False,
        retry_after: float | None = None,
        patient: bool = False,
        too_long: bool = False,
        unavailable: bool = False,
        unexplained: bool = False,
        said: str = "",
    ) -> None:
        super().__init__(sentence)
        self.retry = retry
        """True if the same request may succeed later."""
        self.retry_after = retry_after
        """Seconds to wait before a retry, as the server asked; None if it did not."""
        self.patient = patient
        """True if the waits before retries grow to a minute, unless the server asked for another wait."""
        self.too_long = too_long
        """True if the request exceeded the window: a shorter one may succeed."""
        self.unavailable = unavailable
        """True if the endpoint answers no request until the user acts: it is not running, or wants to be paid."""
        self.unexplained = unexplained
        """True if the endpoint refused the request, and no rule knows which part of it."""
        self.said = said
        """The endpoint's own words; "" if it sent none."""
        self.images: Sequence[str] = ()
        """The digests of the images that the endpoint refused, or may have refused."""

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed later, in minutes or hours."""
        return self.retry or self.retry_after is not None


class PromptError(Exception):
    """A template cannot be rendered, or a prompt is refused; the text names the prompt and the fault."""


class StoreError(Exception):
    """A session cannot be written or read; the text says why and what to do."""

    is_lost = False
    """True if another process has the session now, or it was deleted: this process never writes it again."""


class SessionBusy(StoreError):
    """A session is open in another process; it can still be forked."""


class ConfigError(Exception):
    """A setting cannot be used; the text names the file, the line, the key, and what to do."""


class ElicitationError(Exception):
    """The user cannot be asked, or the answer does not fit the question; the text says why."""


class EndTurn(Exception):
    """Raised in a hook to end the turn, for example after a command or when a budget is used up."""

    def __init__(self, stop_reason: StopReason = "end_turn", text: str = "", *, stopped_by: str = "") -> None:
        super().__init__(text or stop_reason)
        self.stop_reason: StopReason = stop_reason
        self.text = text
        """The text that the user sees: the answer to the prompt, or the reason why the turn has none."""
        self.stopped_by = stopped_by
        """A word that tells programs why the turn has no answer, such as `repeated_calls`; empty if it has one.

        With a word, the text is a notice instead of a message of the agent, and the answer to the prompt has both in
        `_meta.crow.stopped`, as `by` and `reason`.
        """
