"""Requirements on what a client lacks, extensions, invalid messages and the end of the input."""

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import Conversation
from crow_acp_tools.check.requirement import (
    Failed,
    NotTested,
    RequirementGroup,
    Unanswered,
    check_complete,
    get_request,
    get_stop_reason,
    get_success,
    list_lines_after,
)
from crow_acp_tools.check.wire_lines import Message, describe_error, update_kind

requirement = RequirementGroup()

# Capabilities that the client lacks


def describe_tool_use(conversation: Conversation) -> str:
    """Return whether the agent used tools of its own. The use of capabilities stays unknown."""
    get_stop_reason(conversation)
    kinds = sorted({update_kind(line) for line in conversation.lines} & {"tool_call", "tool_call_update"})
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
