"""Requirements on the capabilities that an agent may advertise: stored sessions, modes, options, kinds of content."""

from typing import Any, cast

from crow_core.acp.schema import SessionModeState

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import Conversation
from crow_acp_tools.check.requirement import (
    Failed,
    NotTested,
    RequirementGroup,
    Skipped,
    get_member,
    get_request,
    get_result,
    get_stop_reason,
    get_success,
    list_lines,
)
from crow_acp_tools.check.scenarios import Scenario, list_choices
from crow_acp_tools.check.session_requirements import check_interrupted_turn
from crow_acp_tools.check.validation import get_path, list_or_empty, to_short_json
from crow_acp_tools.check.wire_lines import WireLine, describe_error, update_kind

HISTORY_UPDATES = {
    f"{who}{end}" for who in ("user_message", "agent_message", "agent_thought") for end in ("", "_chunk")
}

requirement = RequirementGroup()


@requirement("LOAD-001", "capability", "session/load succeeds.", scenarios.loading, capability="loadSession")
def loads(conversation: Conversation) -> None:
    get_result(conversation, "session/load")


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
    if late := conversation.turn_updates(session, cast("WireLine", load.answer)):
        raise Failed("an update of the conversation came after the answer", *list_lines(load), late[0])
    shown_before = conversation.turn_updates(session, turn.sent, turn.answer)
    shown_again = conversation.turn_updates(session, load.sent, load.answer)
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
    get_result(conversation, "session/load")


@requirement(
    "RESUME-001",
    "capability",
    "session/resume succeeds, also without `mcpServers`.",
    scenarios.resuming,
    capability="sessionCapabilities.resume",
)
def resumes(conversation: Conversation) -> None:
    get_result(conversation, "session/resume")


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
    found = get_result(conversation, "session/list", 0)
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
    if found := get_result(conversation, "session/list", 1).sessions:
        raise Failed(f"it lists {len(found)} sessions", *list_lines(request))


@requirement(
    "DELETE-001",
    "capability",
    "session/delete succeeds, and the session is not listed any more.",
    scenarios.deleting,
    capability="sessionCapabilities.delete",
)
def deletes(conversation: Conversation) -> None:
    get_result(conversation, "session/delete")
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
    get_result(conversation, "session/close")


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
    options = get_member(conversation, "configOptions", list[Any])
    request = get_request(conversation, "session/new", 0)
    for id, option in index_options(conversation, options).items():
        value = get_path(option, "currentValue")
        if get_path(option, "type") == "select" and value not in list_choices(option):
            raise Failed(f"{id}: {value!r} is not among its options", *list_lines(request))
    return f"{len(options)} options"


def index_options(conversation: Conversation, options: Any) -> dict[str, Any]:
    """Return the options of kinds that the protocol knows by their ids. Raises NotTested if one is malformed."""
    found = dict[str, Any]()
    for option in list_or_empty(options):
        if get_path(option, "type") in ("select", "boolean"):
            if not isinstance(id := get_path(option, conversation.version.option_id), str):
                raise NotTested(f"an option has no id; see {conversation.version.prefix}SCHEMA-001")
            found[id] = option
    return found


@requirement(
    "CONFIG-002",
    "capability",
    "session/set_config_option gives all options, the new value among them.",
    scenarios.setting_option,
)
def sets_options(conversation: Conversation) -> str:
    options = get_member(conversation, "configOptions", list[Any])
    if not any(step.method == "session/set_config_option" for step in conversation.requests):
        raise Skipped("no option has another value to set")
    request = get_request(conversation, "session/set_config_option")
    get_result(conversation, "session/set_config_option")
    now = index_options(conversation, request.member("configOptions"))
    if missing := index_options(conversation, options).keys() - now.keys():
        raise Failed(f"these options are missing: {', '.join(sorted(missing))}", *list_lines(request))
    option, value = request.params["configId"], request.params["value"]
    if (found := get_path(now, option, "currentValue")) != value:
        raise Failed(f"{option} should be {value!r} and is {found!r}", *list_lines(request))
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
