"""Requirements on an agent of version 2 of ACP, a draft, that version 1 does not have."""

from typing import Any

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import Conversation
from crow_acp_tools.check.requirement import (
    Failed,
    NotTested,
    RequirementGroup,
    get_request,
    get_result,
    get_success,
    list_lines,
    list_lines_of_turn,
)
from crow_acp_tools.check.scenarios import Scenario, scenario
from crow_acp_tools.check.validation import get_path, list_or_empty, to_short_json
from crow_acp_tools.check.versions import VERSION_2
from crow_acp_tools.check.wire_lines import WireLine, get_stop_reason, update_kind

LONG_COMMAND = "Run the command `sleep 60` and say what it printed."
FINAL = ("completed", "failed", "cancelled")
MESSAGES = ("user_message", "agent_message", "agent_thought")

requirement = RequirementGroup(VERSION_2)


@requirement("INIT-002", "mandatory", "Asked for version 2, the agent answers 2.", scenarios.initializing)
def speaks_version_2(conversation: Conversation) -> None:
    request = get_success(conversation, "initialize", see="INIT-001")
    if (version := request.member("protocolVersion")) != VERSION_2.number:
        raise Failed(f"it answers {to_short_json(version)}", *list_lines(request))


# Turns


@requirement(
    "PROMPT-001",
    "mandatory",
    "A prompt is acknowledged with the id of its message, and `idle` with a stop reason ends its turn.",
    scenarios.one_prompt,
)
def acknowledges_prompts(conversation: Conversation) -> str:
    turn = get_request(conversation, "session/prompt")
    if not get_result(conversation, "session/prompt").message_id:
        raise Failed("`messageId` is empty", *list_lines(turn))
    if (end := conversation.find_end(turn)) is None:
        raise Failed(conversation.stopped or "the turn did not end", *list_lines(turn))
    return f"stopReason {get_stop_reason(end)}"


@requirement("PROMPT-004", "mandatory", "The prompt is shown with the id of its acknowledgement.", scenarios.one_prompt)
def shows_prompts(conversation: Conversation) -> None:
    turn = get_success(conversation, "session/prompt", see="PROMPT-001")
    shown = [line for line in updates_of(conversation) if update_kind(line).startswith("user_message")]
    ids = {get_member(line, "messageId") for line in shown}
    if turn.member("messageId") not in ids:
        why = f"it has the id {to_short_json(turn.member('messageId'))}; shown are {to_short_json([*ids])}"
        raise Failed(why, *list_lines(turn), *shown[:1])


@requirement("STATE-001", "mandatory", "`running` is told before a turn's own output.", scenarios.one_prompt)
def tells_that_it_runs(conversation: Conversation) -> None:
    turn = get_success(conversation, "session/prompt", see="PROMPT-001")
    lines = list_lines_of_turn(conversation, turn)
    states = [line for line in lines if get_member(line, "state") == "running"]
    output = [line for line in lines if is_output(line)]
    if not states:
        raise Failed("no `running` was told", *list_lines(turn), *output[:1])
    if output and lines.index(output[0]) < lines.index(states[0]):
        raise Failed("there was output before `running`", output[0], states[0])


@requirement(
    "STATE-002",
    "advisory",
    "While a turn waits for permission, its state is `requires_action`.",
    scenarios.wants_terminal,
)
def tells_that_it_waits(conversation: Conversation) -> None:
    get_success(conversation, "session/prompt", see="PROMPT-001")
    state = ""
    for line in conversation.lines:
        state = get_member(line, "state") or state
        if get_path(line.message, "method") == "session/request_permission":
            if state != "requires_action":
                raise Failed(f"the state was {to_short_json(state)}", line)
            return
    raise NotTested("the agent asked for no permission")


# Tool calls and terminals


@requirement("CALL-001", "mandatory", "Every tool call of a turn ends in a final state.", scenarios.wants_terminal)
def ends_tool_calls(conversation: Conversation) -> str:
    get_success(conversation, "session/prompt", see="PROMPT-001")
    background = list_background(conversation)
    calls = merge_updates(conversation, "tool_call_update", "toolCallId")
    for id, (call, line) in calls.items():
        if call.get("status") not in FINAL and id not in background:
            raise Failed(f"tool call {to_short_json(id)} is left as {to_short_json(call.get('status'))}", line)
    return f"{len(calls)} tool calls" if calls else "it used no tool"


@requirement("TERMINAL-001", "mandatory", "A terminal in a tool call has been described.", scenarios.wants_terminal)
def describes_terminals(conversation: Conversation) -> str:
    get_success(conversation, "session/prompt", see="PROMPT-001")
    known = merge_updates(conversation, "terminal_update", "terminalId")
    for line in updates_of(conversation):
        for part in list_or_empty(get_member(line, "content")):
            id = get_path(part, "terminalId")
            if get_path(part, "type") == "terminal" and id not in known:
                raise Failed(f"no `terminal_update` has the id {to_short_json(id)}", line)
    return f"{len(known)} terminals"


@scenario("prompt")
async def cancelling_a_call(conversation: Conversation) -> None:
    """Cancel the first tool call that says that it can be cancelled, and let the turn go on."""
    session = await conversation.open_session()
    turn = conversation.begin_prompt(session, LONG_COMMAND)
    await conversation.wait_until(
        lambda: conversation.has_ended(turn) or find_cancellable(conversation), conversation.options.timeout / 2
    )
    if (id := find_cancellable(conversation)) and not conversation.has_ended(turn):
        await conversation.ask("tool_call/cancel", {"sessionId": session, "toolCallId": id})
    await conversation.finish_turn(turn)


@requirement(
    "CALL-002", "capability", "tool_call/cancel ends a tool call that offers it, and no other.", cancelling_a_call
)
def cancels_tool_calls(conversation: Conversation) -> str:
    if not any(step.method == "tool_call/cancel" for step in conversation.requests):
        get_request(conversation, "session/prompt")
        raise NotTested("no tool call offered to be cancelled while it ran")
    get_result(conversation, "tool_call/cancel")
    request = get_request(conversation, "tool_call/cancel")
    call, line = merge_updates(conversation, "tool_call_update", "toolCallId")[request.params["toolCallId"]]
    if call.get("status") not in FINAL:
        raise Failed(f"the call is left as {to_short_json(call.get('status'))}", *list_lines(request), line)
    return str(call["status"])


def find_cancellable(conversation: Conversation) -> str:
    """Return the id of a tool call that runs and can be cancelled; the empty text if there is none."""
    for id, (call, _) in merge_updates(conversation, "tool_call_update", "toolCallId").items():
        if call.get("status") == "in_progress" and isinstance(get_path(call, "capabilities", "cancel"), dict):
            return id
    return ""


# Replays


def resuming_from_the_start(*, restart: bool) -> Scenario:
    """Return a scenario that resumes a session with a replay, in the same process or in another."""

    @scenario("prompt")
    async def resume(conversation: Conversation) -> None:
        session = await conversation.open_session()
        await conversation.prompt(session, scenarios.HELLO_PROMPT)
        if restart:
            await conversation.restart()
        params = {"sessionId": session, "cwd": str(conversation.folder), "replayFrom": {"type": "start"}}
        await conversation.ask("session/resume", params)

    return resume


replaying, replaying_elsewhere = resuming_from_the_start(restart=False), resuming_from_the_start(restart=True)


@requirement(
    "RESUME-003",
    "capability",
    "With `replayFrom`, session/resume shows all messages before its answer.",
    replaying,
    capability="session",
)
def replays(conversation: Conversation) -> str:
    resume = get_success(conversation, "session/resume", see="RESUME-001")
    turn = get_request(conversation, "session/prompt")
    session = turn.params["sessionId"]
    live = list_message_ids(conversation.updates(session, turn.sent, resume.sent))
    again = list_message_ids(conversation.updates(session, resume.sent, resume.answer))
    if missing := [id for id in live if id not in again]:
        raise Failed(f"the messages {to_short_json(missing)} are not shown", *list_lines(resume))
    if again != live:
        raise Failed(f"shown are {to_short_json(again)} in place of {to_short_json(live)}", *list_lines(resume))
    return f"{len(again)} messages"


@requirement(
    "RESUME-004",
    "advisory",
    "session/resume with a replay succeeds in a new process of the agent, too.",
    replaying_elsewhere,
    capability="session",
)
def replays_in_another_process(conversation: Conversation) -> None:
    get_result(conversation, "session/resume")
    replays(conversation)


# What the updates of a conversation say


def updates_of(conversation: Conversation) -> list[WireLine]:
    return [line for line in conversation.lines if line.sender == "agent" and update_kind(line)]


def get_member(line: WireLine, name: str) -> Any:
    """Return a member of the update in a line; None if there is none."""
    return get_path(line.message, "params", "update", name)


def is_output(line: WireLine) -> bool:
    """Tell whether a line is output of a turn, and not the prompt that began it."""
    kind = update_kind(line)
    return kind in VERSION_2.turn_updates and not kind.startswith("user_message")


def list_message_ids(lines: list[WireLine]) -> list[str]:
    """List the ids of the messages that updates show, each once."""
    shown = [line for line in lines if update_kind(line).removesuffix("_chunk") in MESSAGES]
    return list(dict.fromkeys(str(get_member(line, "messageId")) for line in shown))


def list_background(conversation: Conversation) -> set[str]:
    """List the tool calls that the last state counts as work in the background."""
    told = [get_member(line, "background") for line in updates_of(conversation) if get_member(line, "background")]
    return {str(get_path(work, "toolCallId")) for work in list_or_empty(told[-1] if told else None)}


def merge_updates(conversation: Conversation, kind: str, key: str) -> dict[str, tuple[dict[str, Any], WireLine]]:
    """Return the objects that updates of a kind describe, as they are at the end, each with its last line."""
    found = dict[str, tuple[dict[str, Any], WireLine]]()
    for line in updates_of(conversation):
        id, update = get_member(line, key), get_path(line.message, "params", "update")
        if update_kind(line) == kind and isinstance(id, str):
            before, _ = found.get(id, ({}, line))
            found[id] = ({**before, **update}, line)
    return found
