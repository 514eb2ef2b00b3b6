"""A requirement on an agent, and the functions with which its check reads a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import msgspec

from crow_acp_tools.check import wire_lines
from crow_acp_tools.check.conversation import Conversation
from crow_acp_tools.check.scenarios import Scenario
from crow_acp_tools.check.validation import list_or_empty, to_struct
from crow_acp_tools.check.versions import VERSION_1, ProtocolVersion
from crow_acp_tools.check.wire_lines import CheckRequest, WireLine, describe_error

Level = Literal["mandatory", "capability", "advisory", "informational"]
CheckVerdict = Literal["pass", "fail", "not tested", "skipped"]
T = TypeVar("T")


class NotPassed(Exception):
    """A requirement that did not pass; the message is the reason."""

    verdict: CheckVerdict

    def __init__(self, why: str, *lines: WireLine) -> None:
        super().__init__(why)
        self.lines = lines
        """The lines that show it."""


class Failed(NotPassed):
    verdict = "fail"


class Unanswered(Failed):
    """A request that was not answered, or not in time.

    Outside of the requirement that its method succeeds, it is only a failure if that requirement passes.
    """

    def __init__(self, request: CheckRequest, why: str = "") -> None:
        super().__init__(why or request.no_answer_reason, *list_lines(request))
        self.request = request


class NotTested(NotPassed):
    """The agent did not do what the test needs."""

    verdict = "not tested"


class Skipped(NotPassed):
    """The requirement does not apply to this agent."""

    verdict = "skipped"


@dataclass(frozen=True)
class Requirement:
    """One requirement on an agent."""

    id: str
    level: Level
    sentence: str
    scenario: Scenario
    check: Callable[[Conversation], str | None]
    """Reads the conversation and returns a remark, or None. Raises NotPassed."""
    capability: str
    """The dotted path of the capability that the agent has to advertise; the empty text if none."""
    version: ProtocolVersion = VERSION_1


@dataclass
class RequirementGroup:
    """The requirements that one module declares."""

    version: ProtocolVersion = VERSION_1
    requirements: dict[str, Requirement] = field(default_factory=dict[str, Requirement])
    """Each by its id, in the order of the report."""

    def __call__(
        self, id: str, level: Level, sentence: str, scenario: Scenario, *, capability: str = ""
    ) -> Callable[[Callable[[Conversation], str | None]], Callable[[Conversation], str | None]]:
        """Declare the decorated function to be the check of a requirement."""

        def declare(check: Callable[[Conversation], str | None]) -> Callable[[Conversation], str | None]:
            own = self.version.prefix + id
            self.requirements[own] = Requirement(own, level, sentence, scenario, check, capability, self.version)
            return check

        return declare


def get_request(conversation: Conversation, method: str, nth: int = -1) -> CheckRequest:
    """Return the nth request of a method, by default the last. Raises NotTested if there is none."""
    steps = [step for step in conversation.requests if step.method == method]
    if len(steps) < (nth + 1 if nth >= 0 else -nth):
        raise NotTested(conversation.stopped or f"{method} was not called")
    return steps[nth]


def get_success(conversation: Conversation, method: str, nth: int = -1, *, see: str = "") -> CheckRequest:
    """Return a request that has a result. Raises NotPassed; `see` is the id of another requirement that then fails."""
    request, see = get_request(conversation, method, nth), see and conversation.version.prefix + see
    if wanted := conversation.login_needed(request):
        raise NotTested(wanted)
    if request.answer is None:
        raise NotTested(f"{request.no_answer_reason}; see {see}") if see else Unanswered(request)
    if request.error or "result" not in request.answer_message:
        raise make_failure(see, request, f"{method} was refused: {describe_error(request.error or {})}")
    return request


def get_result(conversation: Conversation, method: str, nth: int = -1, *, see: str = "") -> Any:
    """Return the valid result of a request, as a struct of its version. Raises NotPassed, as `get_success` does."""
    request = get_success(conversation, method, nth, see=see)
    kind = conversation.version.agent_methods[method].result
    see = see and conversation.version.prefix + see
    return convert_result(request, request.result, cast("type[Any]", kind), see=see)


def convert_result(request: CheckRequest, value: Any, kind: type[T], *, see: str = "") -> T:
    try:
        return cast("T", to_struct(value, cast("Any", kind)))
    except msgspec.ValidationError as error:
        raise make_failure(see, request, f"the result of {request.method} is invalid: {error}") from error
    except RecursionError as error:
        raise make_failure(see, request, f"the result of {request.method} is nested too deeply") from error


def make_failure(see: str, request: CheckRequest, why: str) -> NotPassed:
    return NotTested(f"{why}; see {see}") if see else Failed(why, *list_lines(request))


def list_lines(request: CheckRequest) -> Sequence[WireLine]:
    return [line for line in (request.sent, request.answer or request.late_answer) if line]


def get_member(conversation: Conversation, name: str, kind: type[T]) -> T:
    """Return a member of the result of `session/new`. Raises Skipped if it has none."""
    request = get_success(conversation, "session/new", 0, see="SESSION-001")
    if (value := request.member(name)) is None:
        raise Skipped(f"session/new gave no `{name}`")
    return convert_result(request, value, kind)


def check_complete(conversation: Conversation) -> None:
    """Pass if the conversation was finished: flaws are counted apart. Raises NotTested."""
    if conversation.stopped:
        raise NotTested(conversation.stopped)


def get_stop_reason(conversation: Conversation) -> str:
    """Return why the turn of the last prompt ended. Raises NotPassed."""
    result = get_result(conversation, "session/prompt")
    if conversation.version.number == 1:
        return result.stop_reason
    request = get_request(conversation, "session/prompt")
    if (end := conversation.find_end(request)) is None:
        raise Failed(conversation.stopped or "the turn did not end", *list_lines(request))
    return str(wire_lines.get_stop_reason(end))


def get_login_ids(conversation: Conversation) -> list[str]:
    """List the ids of the methods of authentication. Raises NotPassed."""
    result = get_result(conversation, "initialize", see="INIT-001")
    name = "id" if conversation.version.number == 1 else "method_id"
    return [getattr(method, name) for method in list_or_empty(result.auth_methods)]


def list_lines_after(conversation: Conversation, line: WireLine) -> list[WireLine]:
    """List the lines of the agent after a line."""
    return [other for other in conversation.lines[conversation.lines.index(line) + 1 :] if other.sender == "agent"]


def list_lines_of_turn(conversation: Conversation, request: CheckRequest) -> list[WireLine]:
    """List the lines of the agent between a prompt and the end of its turn."""
    lines, end = list_lines_after(conversation, request.sent), conversation.find_end(request)
    return lines[: lines.index(end)] if end else lines
