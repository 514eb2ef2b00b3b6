"""The requirements on an ACP agent, version 1, with the ids of the protocol's test kit.

Each is checked in the conversation of one scenario. For some, a flaw in any other conversation counts as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import msgspec
from crow_core.acp.schema import (
    AGENT_METHODS,
    AUTH_REQUIRED,
    METHOD_NOT_FOUND,
    BooleanConfigOption,
    InitializeResponse,
    ListSessionsResponse,
    NewSessionResponse,
    PromptResponse,
    SelectConfigOption,
    SessionConfigOption,
    SessionModeState,
    SetSessionConfigOptionResponse,
)

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import (
    CheckRequest,
    Conversation,
    Message,
    WireLine,
    describe_error,
    filter_turn_updates,
    is_update,
    update_kind,
)
from crow_acp_tools.check.scenarios import FUTURE_VERSION, Scenario, list_choices
from crow_acp_tools.check.validation import get_path, list_or_empty, to_short_json, to_struct

Level = Literal["mandatory", "capability", "advisory", "informational"]
CheckVerdict = Literal["pass", "fail", "not tested", "skipped"]
T = TypeVar("T")

ANSWERED_BY = {"initialize": "INIT-001", "session/new": "SESSION-001", "session/prompt": "PROMPT-001"}
"""The requirement that the method of a basic scenario succeeds, by the method."""
BUSY_HINT = "give --cancel-prompt with something that keeps the agent busy for some seconds"
HISTORY_UPDATES = {"user_message_chunk", "agent_message_chunk", "agent_thought_chunk"}


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


REQUIREMENTS: dict[str, Requirement] = {}
"""The requirements by their ids, in the order of the report."""


def requirement(
    id: str, level: Level, sentence: str, scenario: Scenario, *, capability: str = ""
) -> Callable[[Callable[[Conversation], str | None]], Callable[[Conversation], str | None]]:
    """Declare the decorated function to be the check of a requirement."""

    def declare(check: Callable[[Conversation], str | None]) -> Callable[[Conversation], str | None]:
        REQUIREMENTS[id] = Requirement(id, level, sentence, scenario, check, capability)
        return check

    return declare


# Reading a conversation


def get_request(conversation: Conversation, method: str, nth: int = -1) -> CheckRequest:
    """Return the nth request of a method, by default the last. Raises NotTested if there is none."""
    steps = [step for step in conversation.requests if step.method == method]
    if len(steps) < (nth + 1 if nth >= 0 else -nth):
        raise NotTested(conversation.stopped or f"{method} was not called")
    return steps[nth]


def get_success(conversation: Conversation, method: str, nth: int = -1, *, see: str = "") -> CheckRequest:
    """Return a request that has a result. Raises NotPassed; `see` is the id of another requirement that then fails."""
    request = get_request(conversation, method, nth)
    if wanted := conversation.login_needed(request):
        raise NotTested(wanted)
    if request.answer is None:
        raise NotTested(f"{request.no_answer_reason}; see {see}") if see else Unanswered(request)
    if request.error or "result" not in request.answer_message:
        raise make_failure(see, request, f"{method} was refused: {describe_error(request.error or {})}")
    return request


def get_result(conversation: Conversation, method: str, kind: type[T], nth: int = -1, *, see: str = "") -> T:
    """Return the valid result of a request. Raises NotPassed, as `get_success` does."""
    request = get_success(conversation, method, nth, see=see)
    return convert_result(request, request.result, kind, see=see)


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
    return get_result(conversation, "session/prompt", PromptResponse).stop_reason


# The wire

requirement(
    "TRANSPORT-001", "mandatory", "Every line on standard output is one JSON-RPC message.", scenarios.one_prompt
)(check_complete)
requirement("TRANSPORT-002", "mandatory", "Standard output is UTF-8.", scenarios.one_prompt)(check_complete)


@requirement(
    "JSONRPC-001", "mandatory", "An answer has the id of its request, which is a number or a text.", scenarios.ids
)
def echoes_ids(conversation: Conversation) -> None:
    for method in ("initialize", "session/new"):
        request = get_request(conversation, method)
        if not (request.answer or request.late_answer):
            raise NotTested(request.no_answer_reason) if request.is_lost else Unanswered(request)


@requirement(
    "JSONRPC-002",
    "mandatory",
    "An answer has either a result, or an error with an integer code and a message.",
    scenarios.invalid_params,
)
def answers_wrong_parameters(conversation: Conversation) -> str:
    request = get_request(conversation, "session/new", 0)
    if request.answer is None:
        raise Unanswered(request, f"without `cwd`, {request.no_answer_reason}")
    return f"session/new without `cwd`: {describe_error(request.error)}" if request.error else ""


@requirement("JSONRPC-003", "mandatory", "A notification is never answered.", scenarios.notifications)
def leaves_notifications_unanswered(conversation: Conversation) -> None:
    get_request(conversation, "session/new")
    if conversation.stopped:
        raise NotTested(conversation.stopped)
    sent = [line for line in conversation.lines if line.sender == "client"]
    first = next(line for line in sent if line.message and "id" not in line.message)
    answers = [line for line in list_lines_after(conversation, first) if line.message and "method" not in line.message]
    if answers:
        raise Failed("a notification was answered", first, *answers)


@requirement("JSONRPC-004", "advisory", "An unknown method is refused with -32601.", scenarios.extension)
def refuses_unknown_methods(conversation: Conversation) -> None:
    request = get_request(conversation, scenarios.UNKNOWN_METHOD)
    if request.answer is None:
        raise NotTested(request.no_answer_reason)
    if not request.error or request.error.get("code") != METHOD_NOT_FOUND:
        raise Failed("the answer is not the error -32601", *list_lines(request))


@requirement("JSONRPC-005", "advisory", "After a refused request, the next one works.", scenarios.invalid_params)
def works_after_an_error(conversation: Conversation) -> None:
    get_request(conversation, "session/new", 1)
    get_success(conversation, "session/new", 1)


# initialize


@requirement("INIT-001", "mandatory", "initialize succeeds, and its result is valid.", scenarios.initializing)
def initializes(conversation: Conversation) -> None:
    request = get_success(conversation, "initialize")
    if conversation.is_version_1(request):
        get_result(conversation, "initialize", InitializeResponse)


@requirement("INIT-002", "mandatory", "Asked for version 1, the agent answers 1.", scenarios.initializing)
def speaks_version_1(conversation: Conversation) -> None:
    request = get_success(conversation, "initialize", see="INIT-001")
    version: object = request.member("protocolVersion")
    if type(version) is not int or version != 1:
        raise Failed(f"it answers {to_short_json(version)}", *list_lines(request))


@requirement(
    "INIT-003",
    "mandatory",
    f"Asked for a version that it cannot know ({FUTURE_VERSION}), it answers its own.",
    scenarios.future_version,
)
def offers_its_own_version(conversation: Conversation) -> str:
    request = get_success(conversation, "initialize")
    match request.member("protocolVersion"):
        case int(version) if not isinstance(version, bool) and 1 <= version < FUTURE_VERSION:
            return f"it answers {version}"
        case other:
            raise Failed(f"it answers {to_short_json(other)}", *list_lines(request))


@requirement("INIT-004", "advisory", "initialize gives the agent's name and version.", scenarios.initializing)
def gives_name_and_version(conversation: Conversation) -> str:
    info = get_result(conversation, "initialize", InitializeResponse, see="INIT-001").agent_info
    if not info:
        raise Failed("there is no `agentInfo`", *list_lines(get_request(conversation, "initialize")))
    return f"{info.name} {info.version}"


requirement("SCHEMA-001", "mandatory", "Every message of the agent is valid by the schema.", scenarios.one_prompt)(
    check_complete
)
requirement(
    "SCHEMA-002",
    "advisory",
    "The protocol's objects have no keys of the agent's own; those belong in `_meta`.",
    scenarios.one_prompt,
)(check_complete)

# Authentication


@requirement("AUTH-001", "advisory", "Authentication methods have different ids.", scenarios.initializing)
def has_unique_method_ids(conversation: Conversation) -> None:
    ids = [
        method.id for method in get_result(conversation, "initialize", InitializeResponse, see="INIT-001").auth_methods
    ]
    if len(ids) != len(set(ids)):
        raise Failed(f"the ids are {', '.join(ids)}", *list_lines(get_request(conversation, "initialize")))


@requirement(
    "AUTH-002",
    "mandatory",
    "No method of the type `terminal` is offered to a client without that capability.",
    scenarios.initializing,
)
def offers_no_terminal_login(conversation: Conversation) -> None:
    methods = get_result(conversation, "initialize", InitializeResponse, see="INIT-001").auth_methods
    if "terminal" in [method.type for method in methods]:
        why = "there is one, and `clientCapabilities.auth.terminal` was not set"
        raise Failed(why, *list_lines(get_request(conversation, "initialize")))


@requirement("AUTH-003", "capability", "After authenticate, session/new needs no login.", scenarios.logging_in)
def accepts_sessions_after_login(conversation: Conversation) -> None:
    offered = [
        method.id for method in get_result(conversation, "initialize", InitializeResponse, see="INIT-001").auth_methods
    ]
    if not offered:
        raise Skipped("there are no methods")
    if not conversation.options.auth_method:
        raise NotTested(f"give --auth-method with one of: {', '.join(offered)}")
    login = get_request(conversation, "authenticate")
    if login.answer is None or login.error:
        raise NotTested(conversation.stopped or login.no_answer_reason)
    request = get_request(conversation, "session/new")
    if request.error and request.error.get("code") == AUTH_REQUIRED:
        raise Failed("session/new still wants a login", *list_lines(login), *list_lines(request))
    get_success(conversation, "session/new")


@requirement("AUTH-004", "capability", "logout succeeds.", scenarios.logging_out, capability="auth.logout")
def logs_out(conversation: Conversation) -> None:
    if not conversation.options.allow_logout:
        raise NotTested("you may have to log in again; --allow-logout allows it")
    get_result(conversation, "logout", cast("Any", AGENT_METHODS["logout"].result))


@requirement("AUTH-005", "advisory", "An agent without authentication methods needs no login.", scenarios.sessions)
def needs_no_login_without_methods(conversation: Conversation) -> None:
    if get_request(conversation, "initialize").member("authMethods"):
        raise Skipped("there are methods")
    request = get_request(conversation, "session/new", 0)
    if request.error and request.error.get("code") == AUTH_REQUIRED:
        raise Failed("session/new wants a login, and no method is offered", *list_lines(request))


# Sessions


@requirement("SESSION-001", "mandatory", "session/new gives an id that is not empty.", scenarios.sessions)
def opens_a_session(conversation: Conversation) -> None:
    if not get_result(conversation, "session/new", NewSessionResponse, 0).session_id:
        raise Failed("`sessionId` is empty", *list_lines(get_request(conversation, "session/new", 0)))


@requirement("SESSION-002", "mandatory", "Two sessions have two ids.", scenarios.sessions)
def has_unique_session_ids(conversation: Conversation) -> None:
    one, other = (
        get_success(conversation, "session/new", nth, see="SESSION-001").member("sessionId") for nth in (0, 1)
    )
    if one == other:
        raise Failed(
            f"both are {to_short_json(one)}",
            *list_lines(get_request(conversation, "session/new", 0)),
            *list_lines(get_request(conversation, "session/new", 1)),
        )


@requirement("PROMPT-001", "mandatory", "A prompt is answered with a stop reason.", scenarios.one_prompt)
def ends_a_turn(conversation: Conversation) -> str:
    return f"stopReason {get_stop_reason(conversation)}"


@requirement(
    "PROMPT-002", "mandatory", "Updates during a turn are valid, and of the session it runs in.", scenarios.one_prompt
)
def updates_its_session(conversation: Conversation) -> str:
    turn = get_request(conversation, "session/prompt")
    during = [
        line
        for line in list_lines_until_answer(conversation, turn)
        if line.message and line.message.get("method") == "session/update"
    ]
    for line in during:
        if not is_update(line, turn.params["sessionId"]):
            raise Failed("an update has another `sessionId` than the prompt", turn.sent, line)
    for flaw in conversation.flaws:
        if flaw.id == "SCHEMA-001" and flaw.line in during:
            raise Failed(flaw.why, turn.sent, flaw.line)
    if turn.answer is None:
        raise NotTested(turn.no_answer_reason)
    return f"{len(during)} updates"


@requirement("PROMPT-003", "advisory", "A prompt may contain a link to a resource.", scenarios.resource_link)
def takes_links(conversation: Conversation) -> str:
    return f"stopReason {get_stop_reason(conversation)}"


@requirement("CANCEL-001", "mandatory", "session/cancel ends a turn with `cancelled`, no error.", scenarios.cancelling)
def ends_cancelled_turns(conversation: Conversation) -> None:
    check_interrupted_turn(conversation)


def check_interrupted_turn(conversation: Conversation) -> None:
    """Check that the turn that was interrupted ended with `cancelled`. Raises NotPassed."""
    turn = get_request(conversation, "session/prompt")
    if turn.interrupted is None:
        if turn.answer is None:
            raise NotTested(turn.no_answer_reason)
        raise NotTested(f"the turn ended before it could be interrupted; {BUSY_HINT}")
    lines = [turn.sent, turn.interrupted]
    if turn.answer is None:
        raise Unanswered(turn)
    if turn.error:
        raise Failed(f"the prompt was answered with an error: {describe_error(turn.error)}", *lines, turn.answer)
    if (reason := turn.member("stopReason")) == "cancelled":
        return
    late = turn.answer.at - turn.interrupted.at
    if late < conversation.options.quiet:
        raise NotTested(
            f"the turn ended by itself ({to_short_json(reason)}), {late:.2f} s after it was interrupted; {BUSY_HINT}"
        )
    raise Failed(f"the turn went on for {late:.1f} s and ended with {to_short_json(reason)}", *lines, turn.answer)


@requirement("CANCEL-002", "mandatory", "No update of a cancelled turn comes after its answer.", scenarios.cancelling)
def is_silent_after_cancel(conversation: Conversation) -> None:
    turn = get_request(conversation, "session/prompt")
    late = filter_turn_updates(conversation.updates(turn.params["sessionId"], turn.answer)) if turn.answer else []
    if turn.interrupted and late:
        raise Failed("an update of the turn came after its answer", turn.interrupted, *list_lines(turn)[1:], late[0])
    try:
        check_interrupted_turn(conversation)
    except Failed as failed:
        raise NotTested(f"{failed}; see CANCEL-001") from failed


# Capabilities


@requirement("LOAD-001", "capability", "session/load succeeds.", scenarios.loading, capability="loadSession")
def loads(conversation: Conversation) -> None:
    get_result(conversation, "session/load", cast("Any", AGENT_METHODS["session/load"].result))


@requirement(
    "LOAD-002",
    "capability",
    "session/load replays the conversation before its answer, not after it.",
    scenarios.loading,
    capability="loadSession",
)
def replays(conversation: Conversation) -> str:
    load = get_success(conversation, "session/load", see="LOAD-001")
    turn = get_request(conversation, "session/prompt")
    session = load.params["sessionId"]
    if late := filter_turn_updates(conversation.updates(session, cast("WireLine", load.answer))):
        raise Failed("an update of the conversation came after the answer", *list_lines(load), late[0])
    shown_before = filter_turn_updates(conversation.updates(session, turn.sent, turn.answer))
    shown_again = filter_turn_updates(conversation.updates(session, load.sent, load.answer))
    if shown_before and not shown_again:
        raise Failed(f"nothing was shown of a turn of {len(shown_before)} updates", shown_before[0], *list_lines(load))
    return f"{len(shown_again)} updates"


@requirement(
    "LOAD-003", "advisory", "The result of session/load is an object.", scenarios.loading, capability="loadSession"
)
def answers_load_with_an_object(conversation: Conversation) -> None:
    load = get_success(conversation, "session/load", see="LOAD-001")
    if not isinstance(load.result, dict):
        raise Failed(f"it is {to_short_json(load.result)}", *list_lines(load))


@requirement(
    "LOAD-004",
    "capability",
    "session/load succeeds in a new process of the agent, too.",
    scenarios.reloading,
    capability="loadSession",
)
def loads_in_another_process(conversation: Conversation) -> None:
    get_result(conversation, "session/load", cast("Any", AGENT_METHODS["session/load"].result))


@requirement(
    "RESUME-001",
    "capability",
    "session/resume succeeds, also without `mcpServers`.",
    scenarios.resuming,
    capability="sessionCapabilities.resume",
)
def resumes(conversation: Conversation) -> None:
    get_result(conversation, "session/resume", cast("Any", AGENT_METHODS["session/resume"].result))


@requirement(
    "RESUME-002",
    "capability",
    "session/resume does not replay the conversation.",
    scenarios.resuming,
    capability="sessionCapabilities.resume",
)
def resumes_silently(conversation: Conversation) -> None:
    resume = get_success(conversation, "session/resume", see="RESUME-001")
    updates = conversation.updates(resume.params["sessionId"], resume.sent, resume.answer)
    if history := [line for line in updates if update_kind(line) in HISTORY_UPDATES]:
        raise Failed("it shows the conversation", resume.sent, history[0])


@requirement(
    "LIST-001", "capability", "session/list succeeds.", scenarios.listing, capability="sessionCapabilities.list"
)
def lists(conversation: Conversation) -> str:
    found = get_result(conversation, "session/list", ListSessionsResponse, 0)
    return f"{len(found.sessions)} sessions" + (", and more" if found.next_cursor else "")


@requirement(
    "LIST-002",
    "capability",
    "session/list of a folder without sessions is an empty list.",
    scenarios.listing,
    capability="sessionCapabilities.list",
)
def lists_by_folder(conversation: Conversation) -> None:
    request = get_request(conversation, "session/list", 1)
    if found := get_result(conversation, "session/list", ListSessionsResponse, 1).sessions:
        raise Failed(f"it lists {len(found)} sessions", *list_lines(request))


@requirement(
    "DELETE-001",
    "capability",
    "session/delete succeeds, and the session is not listed any more.",
    scenarios.deleting,
    capability="sessionCapabilities.delete",
)
def deletes(conversation: Conversation) -> None:
    get_result(conversation, "session/delete", cast("Any", AGENT_METHODS["session/delete"].result))
    later = get_request(conversation, "session/list")
    gone = get_request(conversation, "session/delete").params["sessionId"]
    if gone in [get_path(found, "sessionId") for found in list_or_empty(later.member("sessions"))]:
        raise Failed(
            "the session is still listed", *list_lines(get_request(conversation, "session/delete")), *list_lines(later)
        )


@requirement(
    "DELETE-002",
    "advisory",
    "Deleting a session that does not exist succeeds.",
    scenarios.deleting_nothing,
    capability="sessionCapabilities.delete",
)
def deletes_nothing(conversation: Conversation) -> None:
    get_success(conversation, "session/delete")


@requirement(
    "CLOSE-001",
    "capability",
    "session/close succeeds.",
    scenarios.closing,
    capability="sessionCapabilities.close",
)
def closes(conversation: Conversation) -> None:
    get_result(conversation, "session/close", cast("Any", AGENT_METHODS["session/close"].result))


@requirement(
    "CLOSE-002",
    "capability",
    "session/close during a turn ends it with `cancelled`.",
    scenarios.closing_busy,
    capability="sessionCapabilities.close",
)
def closes_busy_sessions(conversation: Conversation) -> None:
    if (
        get_request(conversation, "session/prompt").interrupted
        and (close := get_request(conversation, "session/close")).error
    ):
        raise NotTested(f"session/close was refused: {describe_error(close.error or {})}")
    check_interrupted_turn(conversation)


@requirement(
    "ADDDIRS-001",
    "capability",
    "session/new takes further folders.",
    scenarios.directories,
    capability="sessionCapabilities.additionalDirectories",
)
def takes_folders(conversation: Conversation) -> None:
    get_success(conversation, "session/new")


@requirement("MODES-001", "capability", "The current mode is one of those available.", scenarios.sessions)
def has_an_available_mode(conversation: Conversation) -> str:
    modes = get_member(conversation, "modes", SessionModeState)
    ids = [mode.id for mode in modes.available_modes]
    if modes.current_mode_id not in ids:
        raise Failed(
            f"{modes.current_mode_id!r} is none of {', '.join(ids) or 'no modes'}",
            *list_lines(get_request(conversation, "session/new", 0)),
        )
    return ", ".join(ids)


@requirement(
    "MODES-002", "capability", "session/set_mode succeeds; an update names `currentModeId`.", scenarios.setting_mode
)
def sets_modes(conversation: Conversation) -> str:
    modes = get_member(conversation, "modes", SessionModeState)
    if len(modes.available_modes) < 2:
        raise Skipped("there is one mode only")
    request = get_success(conversation, "session/set_mode")
    updates = conversation.updates(request.params["sessionId"], request.sent)
    for flaw in conversation.flaws:
        if flaw.id == "SCHEMA-001" and flaw.line in updates and update_kind(flaw.line) == "current_mode_update":
            raise Failed(flaw.why, request.sent, flaw.line)
    return f"to {request.params['modeId']}"


@requirement("CONFIG-001", "capability", "An option's current value is one of its values.", scenarios.sessions)
def has_possible_values(conversation: Conversation) -> str:
    options = get_member(conversation, "configOptions", list[SessionConfigOption])
    request = get_request(conversation, "session/new", 0)
    for option, raw in zip(options, request.member("configOptions"), strict=True):
        if isinstance(option, SelectConfigOption) and option.current_value not in list_choices(raw):
            raise Failed(f"{option.id}: {option.current_value!r} is not among its options", *list_lines(request))
    return f"{len(options)} options"


@requirement(
    "CONFIG-002",
    "capability",
    "session/set_config_option gives all options, the new value among them.",
    scenarios.setting_option,
)
def sets_options(conversation: Conversation) -> str:
    options = get_member(conversation, "configOptions", list[SessionConfigOption])
    if not any(step.method == "session/set_config_option" for step in conversation.requests):
        raise Skipped("no option has another value to set")
    request = get_request(conversation, "session/set_config_option")
    now = get_result(conversation, "session/set_config_option", SetSessionConfigOptionResponse).config_options
    values = {option.id: option.current_value for option in now if isinstance(option, SelectConfigOption)}
    kept = {option.id for option in now if isinstance(option, SelectConfigOption | BooleanConfigOption)}
    before = {option.id for option in options if isinstance(option, SelectConfigOption | BooleanConfigOption)}
    if missing := before - kept:
        raise Failed(f"these options are missing: {', '.join(sorted(missing))}", *list_lines(request))
    option, value = request.params["configId"], request.params["value"]
    if values.get(option) != value:
        raise Failed(f"{option} should be {value!r} and is {values.get(option)!r}", *list_lines(request))
    return f"{option} to {value}"


@requirement(
    "CONFIG-003",
    "mandatory",
    "No option of the type `boolean` is offered to a client without that capability.",
    scenarios.sessions,
)
def offers_no_switches(conversation: Conversation) -> None:
    request = get_success(conversation, "session/new", 0, see="SESSION-001")
    if "boolean" in [get_path(option, "type") for option in list_or_empty(request.member("configOptions"))]:
        raise Failed(
            "there is one, and `clientCapabilities.session.configOptions.boolean` was not set", *list_lines(request)
        )


def prompt_capability(id: str, name: str, content: str, scenario: Scenario) -> None:
    @requirement(
        id, "capability", f"A prompt may contain {content}.", scenario, capability=f"promptCapabilities.{name}"
    )
    def accepts_content(conversation: Conversation) -> str:
        return f"stopReason {get_stop_reason(conversation)}"


prompt_capability("PROMPTCAP-001", "image", "an image", scenarios.image)
prompt_capability("PROMPTCAP-002", "audio", "a sound", scenarios.audio)
prompt_capability("PROMPTCAP-003", "embeddedContext", "a resource", scenarios.embedded)


# Capabilities that the client lacks


def describe_tool_use(conversation: Conversation) -> str:
    """Return whether the agent used tools of its own. Whether it would use a capability stays unknown."""
    get_stop_reason(conversation)
    kinds = sorted({update_kind(line) for line in conversation.lines} & {"tool_call"})
    return "it used tools of its own" if kinds else "it used no tool, so it may not have needed the client"


requirement("CLIENTCAP-001", "mandatory", "A client without `fs` is not asked for a file.", scenarios.wants_file)(
    describe_tool_use
)
requirement(
    "CLIENTCAP-002", "mandatory", "A client without `terminal` is not asked for one.", scenarios.wants_terminal
)(describe_tool_use)
requirement(
    "CLIENTCAP-003",
    "mandatory",
    "A client without `elicitation` is not sent a form or a URL.",
    scenarios.wants_answer,
)(describe_tool_use)


@requirement(
    "EXT-001", "mandatory", "A request for an unknown extension method (`_…`) is answered.", scenarios.extension
)
def answers_extensions(conversation: Conversation) -> str:
    request = get_request(conversation, scenarios.UNKNOWN_METHOD)
    if request.answer is None:
        raise Unanswered(request)
    return describe_error(request.error) if request.error else "with a result"


@requirement("META-001", "advisory", "`_meta` is accepted.", scenarios.meta)
def takes_meta(conversation: Conversation) -> str:
    return f"stopReason {get_stop_reason(conversation)}"


requirement("ERROR-001", "advisory", "An error's message is one line, and not empty.", scenarios.invalid_params)(
    check_complete
)


@requirement("SHUTDOWN-001", "advisory", "The agent ends once its input has ended.", scenarios.one_prompt)
def ends_by_itself(conversation: Conversation) -> str:
    get_success(conversation, "initialize")
    if conversation.ended_by != "itself":
        raise Failed(f"after {conversation.options.grace:g} s it had to be ended with {conversation.ended_by}")
    return "by itself"


# Informational


@requirement("STDERR-001", "informational", "The amount of output on standard error.", scenarios.one_prompt)
def measures_stderr(conversation: Conversation) -> str:
    get_success(conversation, "session/new")
    return f"{conversation.stderr_size} bytes in a conversation of one prompt"


@requirement("INFO-PARSE-001", "informational", "The reaction to a line that is not JSON.", scenarios.broken_line)
def reacts_to_invalid_json(conversation: Conversation) -> str:
    return describe_reaction(conversation)


@requirement(
    "INFO-INVALIDREQ-001", "informational", "The reaction to JSON that is not a message.", scenarios.no_message
)
def reacts_to_invalid_message(conversation: Conversation) -> str:
    return describe_reaction(conversation)


@requirement(
    "INFO-UNKNOWNSESSION-001",
    "informational",
    "The reaction to a prompt for an unknown session.",
    scenarios.unknown_session,
)
def reacts_to_unknown_session(conversation: Conversation) -> str:
    request = get_request(conversation, "session/prompt")
    if request.answer is None:
        return request.no_answer_reason
    return describe_error(request.error) if request.error else "a result"


def describe_reaction(conversation: Conversation) -> str:
    """Describe the agent's answer to a line that is not a message, and whether the next request worked."""
    get_request(conversation, "initialize")
    wrong = next((line for line in conversation.lines if line.sender == "client" and line.message is None), None)
    if wrong is None:
        raise NotTested(conversation.stopped)
    answer = next(
        (line.message for line in list_lines_after(conversation, wrong) if is_answer_without_id(line.message)),
        None,
    )
    reaction = f"answered {describe_error(answer.get('error') or {})}" if answer else "not answered"
    opened = (
        get_request(conversation, "session/new").member("sessionId")
        if conversation.requests[-1].method == "session/new"
        else None
    )
    return f"{reaction}; the next request {'worked' if opened else 'failed'}"


def is_answer_without_id(message: Message | None) -> bool:
    return message is not None and "method" not in message and message.get("id") is None


def list_lines_after(conversation: Conversation, line: WireLine) -> list[WireLine]:
    """List the lines of the agent after a line."""
    return [other for other in conversation.lines[conversation.lines.index(line) + 1 :] if other.sender == "agent"]


def list_lines_until_answer(conversation: Conversation, request: CheckRequest) -> list[WireLine]:
    """List the lines of the agent between a request and its answer."""
    lines = list_lines_after(conversation, request.sent)
    return lines[: lines.index(request.answer)] if request.answer else lines
