"""The request that lets a loaded model process the beginning of the prompt before the first prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_core.acp.schema import ClientCapabilities, ClientSessionCapabilities, NoticeCapabilities, NoticeUpdate
from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import find_quirks
from crow_core.testing import Raw, Reply, ScriptedServer, connect

pytestmark = pytest.mark.anyio

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
LLAMA_CPP = {
    "/props": {"default_generation_settings": {"n_ctx": 16384}},
    "/v1/models": {"data": [{"id": "m", "meta": {"n_params": 1_777_088_000}}]},
}


async def make_crow(tmp_path: Path, url: str) -> Crow:
    model = ChatModel(name="m", base_url=url, quirks=find_quirks(url, "m"))
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    return await build({"CROW_HOME": str(home), "HOME": str(tmp_path)}, models={"m": model}, mode="yolo")


async def test_prompt_of_a_loaded_model_begins_like_the_request_that_came_before_it(tmp_path: Path):
    async with ScriptedServer([Reply("."), Reply("Hello.")], pages=LLAMA_CPP) as server:
        crow = await make_crow(tmp_path, server.url)
        calls: list[Any] = []
        crow.model_call(lambda session, model_call: calls.append((model_call.purpose, model_call.ended > 0)))
        async with connect(crow) as editor:
            session = await editor.new_session(str(tmp_path))
            await server.until(lambda: len(server.requests) == 1)
            await editor.prompt(session.session_id, "Hi.")
    first, second = server.requests
    assert first["max_tokens"] == 1
    assert first["messages"][0] == second["messages"][0]
    assert first["tools"] == second["tools"]
    assert [message["role"] for message in second["messages"]] == ["system", "user"]
    assert editor.text == "Hello."
    assert ("warm-up", True) in calls


async def test_size_that_the_server_tells_chooses_the_profile_before_the_first_request(tmp_path: Path):
    async with ScriptedServer(lambda request: Reply("Hello."), pages=LLAMA_CPP) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session(str(tmp_path))
            await editor.prompt(session.session_id, "Hi.")
    names = {tool["function"]["name"] for tool in server.requests[-1]["tools"]}
    assert names == {"read", "write", "replace", "append", "list", "search", "run"}
    assert any("is a small model" in str(notice.title) for notice in editor.of(NoticeUpdate))


async def test_server_that_was_too_slow_to_tell_when_the_session_opened_is_asked_once_more(tmp_path: Path):
    answers = iter([dict[str, Any]()])
    pages = {**LLAMA_CPP, "/props": lambda: next(answers, LLAMA_CPP["/props"])}
    async with ScriptedServer([Reply("."), Reply("Hello.")], pages=pages) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(tmp_path))
            await server.until(lambda: len(server.requests) == 1)
            await editor.prompt(session.session_id, "Hi.")
    assert [request.get("max_tokens") for request in server.requests] == [1, None]


async def test_server_that_does_not_say_that_it_has_the_model_is_not_asked(tmp_path: Path):
    async with ScriptedServer([Reply("Hello.")]) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(tmp_path))
            await editor.prompt(session.session_id, "Hi.")
    assert [request.get("max_tokens") for request in server.requests] == [None]


async def test_failure_is_left_to_the_first_prompt(tmp_path: Path):
    replies = iter([Raw([b'data: {"error": {"message": "broken"}}\n\n']), Reply("Hello.")])
    async with ScriptedServer(lambda request: next(replies), pages=LLAMA_CPP) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(tmp_path))
            await server.until(lambda: len(server.requests) == 1)
            await editor.prompt(session.session_id, "Hi.")
    assert editor.text == "Hello."


async def test_session_that_closes_ends_the_request(tmp_path: Path):
    async with ScriptedServer([Reply(hang=True)], pages=LLAMA_CPP) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            await editor.new_session(str(tmp_path))
            await server.until(lambda: len(server.requests) == 1)
        await server.until(lambda: server.hangups == 1)


def to_events(*events: dict[str, Any]) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


async def test_long_prompt_is_announced_once_with_the_time_that_it_takes(tmp_path: Path):
    def progress(done: int) -> dict[str, Any]:
        counts = {"total": 2048, "cache": 48, "processed": done, "time_ms": (done - 48) * 20}
        return {"choices": [{"index": 0, "delta": {"content": None}}], "prompt_progress": counts}

    end = {"choices": [{"index": 0, "delta": {"content": "Read."}, "finish_reason": "stop"}]}
    answer = Raw([*to_events(progress(48), progress(548), progress(1048), progress(2048), end), b"data: [DONE]\n\n"])

    def answer_request(request: dict[str, Any]) -> Reply | Raw:
        return Reply(".") if request.get("max_tokens") == 1 else answer

    async with ScriptedServer(answer_request, pages=LLAMA_CPP) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session(str(tmp_path))
            await editor.prompt(session.session_id, "Read all.")
    assert server.requests[-1]["return_progress"] is True
    assert editor.text == "Read."
    told = [notice.title for notice in editor.of(NoticeUpdate) if "reads" in str(notice.title)]
    assert told == ["The model reads 2,000 tokens; about 30 s more."]
