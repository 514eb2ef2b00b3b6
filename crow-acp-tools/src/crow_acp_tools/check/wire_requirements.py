"""Requirements on the wire, the initialization and the login."""

from crow_core.acp.schema import AUTH_REQUIRED, METHOD_NOT_FOUND

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import Conversation
from crow_acp_tools.check.requirement import (
    Failed,
    NotTested,
    RequirementGroup,
    Skipped,
    Unanswered,
    check_complete,
    get_login_ids,
    get_request,
    get_result,
    get_success,
    list_lines,
    list_lines_after,
)
from crow_acp_tools.check.scenarios import FUTURE_VERSION
from crow_acp_tools.check.validation import list_or_empty, to_short_json
from crow_acp_tools.check.wire_lines import describe_error

requirement = RequirementGroup()

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
    if conversation.is_own_version(request):
        get_result(conversation, "initialize")


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
    info = get_result(conversation, "initialize", see="INIT-001").agent_info
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
    ids = get_login_ids(conversation)
    if len(ids) != len(set(ids)):
        raise Failed(f"the ids are {', '.join(ids)}", *list_lines(get_request(conversation, "initialize")))


@requirement(
    "AUTH-002",
    "mandatory",
    "No method of the type `terminal` is offered to a client without that capability.",
    scenarios.initializing,
)
def offers_no_terminal_login(conversation: Conversation) -> None:
    methods = list_or_empty(get_result(conversation, "initialize", see="INIT-001").auth_methods)
    if "terminal" in [method.type for method in methods]:
        why = "there is one, and the client has no such capability"
        raise Failed(why, *list_lines(get_request(conversation, "initialize")))


@requirement("AUTH-003", "capability", "After a login, session/new needs no other.", scenarios.logging_in)
def accepts_sessions_after_login(conversation: Conversation) -> None:
    offered = get_login_ids(conversation)
    if not offered:
        raise Skipped("there are no methods")
    if not conversation.options.auth_method:
        raise NotTested(f"give --auth-method with one of: {', '.join(offered)}")
    login = get_request(conversation, conversation.version.login)
    if login.answer is None or login.error:
        raise NotTested(conversation.stopped or login.no_answer_reason)
    request = get_request(conversation, "session/new")
    if request.error and request.error.get("code") == AUTH_REQUIRED:
        raise Failed("session/new still wants a login", *list_lines(login), *list_lines(request))
    get_success(conversation, "session/new")


@requirement("AUTH-004", "capability", "logout succeeds.", scenarios.logging_out, capability="auth.logout")
def logs_out(conversation: Conversation) -> None:
    if not get_login_ids(conversation) and conversation.version.number > 1:
        raise Skipped("there are no methods")
    if not conversation.options.allow_logout:
        raise NotTested("you may have to log in again; --allow-logout allows it")
    get_result(conversation, conversation.version.logout)


@requirement("AUTH-005", "advisory", "An agent without authentication methods needs no login.", scenarios.sessions)
def needs_no_login_without_methods(conversation: Conversation) -> None:
    if get_request(conversation, "initialize").member("authMethods"):
        raise Skipped("there are methods")
    request = get_request(conversation, "session/new", 0)
    if request.error and request.error.get("code") == AUTH_REQUIRED:
        raise Failed("session/new wants a login, and no method is offered", *list_lines(request))
