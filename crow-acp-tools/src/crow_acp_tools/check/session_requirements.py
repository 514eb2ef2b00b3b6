"""Requirements on sessions, prompts and their cancellation."""

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import Conversation
from crow_acp_tools.check.requirement import (
    Failed,
    NotTested,
    RequirementGroup,
    Unanswered,
    get_request,
    get_result,
    get_stop_reason,
    get_success,
    list_lines,
    list_lines_of_turn,
)
from crow_acp_tools.check.validation import to_short_json
from crow_acp_tools.check.wire_lines import describe_error, is_update
from crow_acp_tools.check.wire_lines import get_stop_reason as get_stop_reason_of

BUSY_HINT = "give --cancel-prompt with something that keeps the agent busy for some seconds"

requirement = RequirementGroup()


@requirement("SESSION-001", "mandatory", "session/new gives an id that is not empty.", scenarios.sessions)
def opens_a_session(conversation: Conversation) -> None:
    if not get_result(conversation, "session/new", 0).session_id:
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
        for line in list_lines_of_turn(conversation, turn)
        if line.message and line.message.get("method") == "session/update"
    ]
    for line in during:
        if not is_update(line, turn.params["sessionId"]):
            raise Failed("an update has another `sessionId` than the prompt", turn.sent, line)
    for flaw in conversation.flaws:
        if flaw.id.endswith("SCHEMA-001") and flaw.line in during:
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
    if (end := conversation.find_end(turn)) is None:
        raise Failed(conversation.stopped or "the turn did not end", *lines)
    if (reason := turn.member("stopReason") if end is turn.answer else get_stop_reason_of(end)) == "cancelled":
        return
    late = end.at - turn.interrupted.at
    if late < conversation.options.quiet:
        raise NotTested(
            f"the turn ended by itself ({to_short_json(reason)}), {late:.2f} s after it was interrupted; {BUSY_HINT}"
        )
    raise Failed(f"the turn went on for {late:.1f} s and ended with {to_short_json(reason)}", *lines, end)


@requirement("CANCEL-002", "mandatory", "No update of a cancelled turn comes after its end.", scenarios.cancelling)
def is_silent_after_cancel(conversation: Conversation) -> None:
    turn = get_request(conversation, "session/prompt")
    end = conversation.find_end(turn)
    late = conversation.turn_updates(turn.params["sessionId"], end) if end else []
    if turn.interrupted and end and late:
        raise Failed("an update of the turn came after its end", turn.interrupted, end, late[0])
    try:
        check_interrupted_turn(conversation)
    except Failed as failed:
        raise NotTested(f"{failed}; see {conversation.version.prefix}CANCEL-001") from failed
