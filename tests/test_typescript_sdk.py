"""Test `crow acp` with the official TypeScript SDK's client."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from conftest import Node

pytestmark = pytest.mark.anyio


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


def states(turn: dict[str, Any]) -> list[str]:
    """Return the states of a turn's tool call."""
    return [update["status"] for update in turn["updates"] if update["sessionUpdate"].startswith("tool_call")]


def text(turn: dict[str, Any]) -> str:
    """Return the agent's text in a turn."""
    chunks = [update for update in turn["updates"] if update["sessionUpdate"] == "agent_message_chunk"]
    return "".join(chunk["content"]["text"] for chunk in chunks)


async def test_session_runs_a_permitted_command_and_cancels_another(node: "Node") -> None:
    lines = ["echo $((6 * 7)) | tee answer", "sleep 600; touch late"]
    replies = [
        Reply("I look.", tool_calls=[command(lines[0])]),
        Reply("It is 42."),
        Reply(tool_calls=[command(lines[1])]),
    ]
    async with ScriptedServer(replies) as server:
        done = await node.run(server.url, "client.mjs", *node.crow)

    assert (done.code, done.err) == (0, "")
    output = json.loads(done.out)
    assert output["greeting"]["protocolVersion"] == 1
    assert [question["toolCall"]["rawInput"]["command"] for question in output["questions"]] == lines
    assert output["finished"]["response"]["stopReason"] == "end_turn"
    assert text(output["finished"]) == "I look.It is 42."
    assert states(output["finished"]) == ["pending", "in_progress", "completed"]
    assert (node.project / "answer").read_text() == "42\n"
    assert server.requests[1]["messages"][-1]["content"].strip() == "42"
    assert output["cancelled"]["response"]["stopReason"] == "cancelled"
    assert states(output["cancelled"]) == ["pending", "in_progress", "failed"]
    assert output["exit"] == 0  # the agent exits by itself at the end of its input


async def test_client_of_the_second_version_runs_a_command_cancels_a_call_and_resumes(node: "Node") -> None:
    lines = ["echo $((6 * 7)) | tee answer", "sleep 600; touch late"]
    replies = [
        Reply("I look.", tool_calls=[command(lines[0])]),
        Reply("It is 42."),
        Reply(tool_calls=[command(lines[1])]),
        Reply("Never mind."),
    ]
    async with ScriptedServer(replies) as server:
        done = await node.run(server.url, "client_v2.mjs", *node.crow)

    assert (done.code, done.err) == (0, "")
    output = json.loads(done.out)
    assert output["greeting"]["protocolVersion"] == 2
    assert [question["subject"]["command"] for question in output["questions"]] == lines
    assert [update.get("stopReason") for update in (output["finished"][-1], output["cancelled"][-1])] == [
        "end_turn"
    ] * 2
    messages = [update for update in output["finished"] if update["sessionUpdate"] == "user_message"]
    assert [message["messageId"] for message in messages] == [output["first"]["messageId"]]
    ends = [update["status"] for update in output["cancelled"] if update["sessionUpdate"] == "tool_call_update"]
    assert ends == ["pending", "in_progress", "cancelled"]
    replayed = [update["sessionUpdate"] for update in output["replayed"]]
    assert [kind for kind in replayed if kind.endswith("_message")] == [
        *("user_message", "agent_message", "agent_message"),
        *("user_message", "agent_message"),
    ]
    assert output["exit"] == 0
