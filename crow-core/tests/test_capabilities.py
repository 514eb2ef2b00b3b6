"""Whatever a client can do and cannot: it hears nothing that it did not say it understands, and misses nothing else.

Which test proves which row of the protocol stands at the end.
"""

import asyncio
import re
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from crow_core.acp import schema
from crow_core.acp.client import AcpClient
from crow_core.acp.schema import AGENT_METHODS, CLIENT_METHODS, PROTOCOL_METHODS
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.messages.message import Message
from crow_core.session.options import ON_OFF, Option
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.ask_user import ask_user
from crow_extensions.commands import commands
from crow_extensions.plan import plan
from crow_extensions.titles import titles
from crow_extensions.usage import usage
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio

ABLE = ("notices", "boolean", "compaction", "form", "url", "fs", "terminal", "login")


def capabilities(able: set[str]) -> dict[str, Any]:
    """Return the capabilities of a client that can do this."""
    here: dict[str, Any] = {name: {} for name in ("notices", "compaction") if name in able}
    if "boolean" in able:
        here["configOptions"] = {"boolean": {}}
    return {
        "fs": {"readTextFile": "fs" in able, "writeTextFile": "fs" in able},
        "terminal": "terminal" in able,
        "auth": {"terminal": "login" in able},
        "elicitation": {name: {} for name in ("form", "url") if name in able},
        "session": here,
    }


def everything() -> Crow:
    """Make an app that uses every capability of a client."""
    uses = [
        Use(name="plan", arguments={"entries": [{"content": "Ask", "status": "in_progress"}]}),
        Use(name="ask_user", arguments={"question": "Which?", "choices": ["red", "blue"]}),
        Use(name="nothing", arguments={}),
    ]
    crow = Crow(ScriptedModel([Reply("Well.", reasoning="Hm.", tool_calls=uses), Reply("Done.")]))
    crow.use(permissions).use(commands).use(usage).use(titles).use(plan).use(ask_user)

    @crow.options
    def verbose(session: Session) -> Option:
        return Option("verbose", "Verbose", "model_config", ON_OFF, lambda: "off", lambda value: None, is_switch=True)

    @crow.before_prompt
    async def warn(message: Message, session: Session) -> None:
        await session.notice("It is late.", "warning")

    return crow


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "able", [{n for n, can in zip(ABLE, c, strict=True) if can} for c in product((0, 1), repeat=8)]
)
async def test_a_client_receives_only_what_it_supports(able: set[str]):
    heard: list[tuple[str, Any]] = []

    async def hear(params: Any) -> None:
        heard.append((params.update.__struct_config__.tag, params.update))

    async def permit(params: Any) -> Any:
        heard.append(("session/request_permission", params))
        return {"outcome": {"outcome": "selected", "optionId": params.options[0].option_id}}

    def unwanted(method: str) -> Any:
        async def answer(params: Any) -> Any:
            heard.append((method, params))
            return {"action": "accept", "content": {"answer": "red"}}

        return answer

    ours, theirs = memory_pair()
    crow = everything()
    serving = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    others = CLIENT_METHODS.keys() - {"session/update", "session/request_permission"}
    handlers = {"session/update": hear, "session/request_permission": permit, **{m: unwanted(m) for m in others}}
    client = AcpClient(ours, handlers)
    async with client.serving():
        told = await client.request("initialize", {"protocolVersion": 1, "clientCapabilities": capabilities(able)})
        session = await client.new_session("/")
        answer = await client.prompt(session.session_id, "go")
    await serving
    await crow.shut_down()

    kinds = [kind for kind, _ in heard]
    assert answer.stop_reason == "end_turn"
    assert {method.type for method in told.auth_methods} == {schema.UNSET}
    assert type((session.config_options or [None])[-1]).__name__ == (
        "BooleanConfigOption" if "boolean" in able else "SelectConfigOption"
    )
    assert kinds.count("elicitation/create") == ("form" in able)
    assert kinds.count("session/request_permission") == ("form" not in able)
    assert kinds.count("notice") == ("notices" in able)
    assert set(kinds) - {"elicitation/create", "session/request_permission", "notice"} == {
        "agent_thought_chunk",
        "agent_message_chunk",
        "available_commands_update",
        "plan",
        "session_info_update",
        "tool_call",
        "tool_call_update",
        "usage_update",
    }
    chunks = [update for kind, update in heard if kind.endswith("_chunk")]
    assert all(update.message_id for update in chunks)
    ids = {update.tool_call_id for kind, update in heard if kind == "tool_call"}
    ends = [update.tool_call_id for kind, update in heard if kind == "tool_call_update" and update.status != "pending"]
    assert set(ends) == ids
    assert len(ids) == 3


PROOF = {
    "initialize": "test_initialize_returns_the_supported_protocol_version",
    "authenticate": "test_a_client_can_log_in_first",
    "logout": "test_sessions_and_prompts_are_refused_after_logout_until_the_next_login",
    "session/new": "test_the_response_to_session_new_is_sent_before_updates_of_the_session",
    "session/load": "test_loaded_session_replays_its_updates",
    "session/resume": "test_resumed_session_replays_nothing",
    "session/list": "test_client_receives_the_list_in_pages",
    "session/delete": "test_deleted_session_is_gone_and_may_be_deleted_again",
    "session/close": "test_closing_a_session_cancels_its_turns",
    "session/prompt": "test_all_updates_of_a_turn_are_sent_before_its_response",
    "session/cancel": "test_each_prompt_has_one_answer_in_any_order_of_prompts_and_cancels",
    "session/set_mode": "test_a_mode_set_with_set_mode_is_announced_as_a_config_option",
    "session/set_config_option": "test_the_list_of_options_can_depend_on_another_option",
    "session/fork": "test_fork_is_independent_of_its_origin",
    "providers/list": "test_the_client_can_set_an_endpoint_if_none_is_configured",
    "providers/set": "test_an_endpoint_of_the_client_is_used_from_the_next_session_until_it_is_disabled",
    "providers/disable": "test_an_endpoint_of_the_client_is_used_from_the_next_session_until_it_is_disabled",
    "$/cancel_request": "test_cancelling_the_prompt_request_cancels_the_turn",
    "session/archive": "test_archived_session_is_listed_only_if_it_is_asked_for",
    "session/unarchive": "test_session_stays_archived_while_it_goes_on_until_it_is_unarchived",
    "session/set_title": "test_title_of_the_client_is_stored_before_the_answer_and_stays",
    "session/status": "test_status_says_whether_a_session_is_open_and_changes_nothing",
    "auth/status": "test_auth_status_tells_whether_a_login_is_needed",
    "_vendor": "test_an_extension_can_add_a_method",
    "session/request_permission": "test_each_answer_has_the_effect_that_it_names",
    "elicitation/create": "test_answers_are_checked_against_every_kind_of_field",
    "elicitation/complete": "test_the_user_is_sent_to_a_page_and_the_client_learns_when_it_is_done",
    "session/update": "test_a_client_receives_only_what_it_supports",
    "user_message_chunk": "test_loaded_session_replays_its_updates",
    "agent_message_chunk": "test_text_is_streamed_under_one_id_and_appended_to_the_log",
    "agent_thought_chunk": "test_a_notice_is_sent_in_a_form_that_the_client_supports",
    "tool_call": "test_a_tool_call_is_shown_with_name_kind_location_and_arguments",
    "tool_call_update": "test_an_edit_is_shown_as_the_diff_of_its_changes",
    "plan": "test_a_loaded_session_shows_its_plans_again",
    "available_commands_update": "test_the_client_receives_the_list_of_commands",
    "current_mode_update": "test_a_mode_set_as_a_config_option_is_announced_as_a_mode",
    "config_option_update": "test_a_mode_set_by_a_slash_command_is_announced_in_both_ways",
    "session_info_update": "test_a_session_is_named_once_after_its_first_prompt",
    "usage_update": "test_usage_is_reported_after_each_reply_and_adds_up",
    "notice": "test_a_notice_is_sent_in_a_form_that_the_client_supports",
    "content blocks": "test_attachments_of_a_prompt_are_shown_again_unchanged",
    "audio": "test_audio_is_announced_if_a_model_takes_it_and_sent_to_such_a_model_only",
    "boolean options": "test_a_client_with_boolean_options_receives_one",
    "auth methods": "test_all_authentication_methods_are_agent_methods_without_a_command_to_log_in",
    "compaction_update": "test_client_with_the_capability_gets_updates_and_others_get_notices",
    "MCP servers": "test_a_server_that_does_not_start_is_reported_and_the_others_work",
    "additional directories": "test_tools_work_in_the_working_directory_and_in_additional_folders",
    "stop reason refusal": "test_a_refused_prompt_is_not_sent_to_the_model_again",
    "stop reason max_turn_requests": "test_a_turn_ends_at_the_limit_of_requests",
    "errors": "test_error_that_a_handler_raises_is_sent_with_its_details_in_the_message",
    "_meta": "test_every_server_gets_the_trace_and_only_built_in_ones_get_more",
    "framing": "test_standard_output_carries_json_lines_only",
}
"""The rows of the protocol, each with a test that proves it."""
NOT_SENT = {"compaction_summary_chunk"}
"""A summary is shown when it is complete and has replaced the entries (docs/decisions/0015-compaction.md)."""
ELSEWHERE = {method for method in CLIENT_METHODS if method.startswith(("fs/", "terminal/"))}
"""The tests of the client's files and terminals prove these."""


def test_every_row_of_the_protocol_names_a_test_that_exists():
    kinds = {update.__struct_config__.tag for update in get_args(schema.SessionUpdate)}
    rows = {*AGENT_METHODS, *CLIENT_METHODS, *PROTOCOL_METHODS, *kinds} - NOT_SENT - ELSEWHERE
    assert rows <= PROOF.keys()
    files = Path(__file__).parents[2].glob("*/tests/**/test_*.py")
    tests = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))}
    assert set(PROOF.values()) <= tests
