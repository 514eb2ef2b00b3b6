"""The window: asked of the server, never larger than configured; and the notice when a server cut the prompt."""

import asyncio
from typing import Any

import pytest
from crow_core.acp.schema import ClientCapabilities, ClientSessionCapabilities, NoticeCapabilities, NoticeUpdate
from crow_core.app import Crow
from crow_core.models import window as windows
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import is_on_private_network
from crow_core.models.estimate import count_min_tokens
from crow_core.models.quirks import Quirks
from crow_core.models.window import ask_server, find_window
from crow_core.testing import Editor, Reply, ScriptedModel, ScriptedServer, connect
from crow_extensions.context_window import context_window
from crow_extensions.cut_prompts import cut_prompts
from crow_extensions.usage import usage
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ANSWER_TIMEOUT", 30.0)  # the machine may be busy


NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))


PROPS = {"default_generation_settings": {"n_ctx": 16384}}


def listing(**entry: Any) -> dict[str, Any]:
    return {"/v1/models": {"object": "list", "data": [{"id": "other", "context_length": 7}, {"id": "m", **entry}]}}


@pytest.mark.parametrize(
    ("pages", "tokens"),
    [
        ({"/props": {"default_generation_settings": {"n_ctx": 8192}, "total_slots": 1}}, 8192),
        ({"/api/ps": {"models": [{"name": "x", "context_length": 1}, {"name": "m", "context_length": 4096}]}}, 4096),
        ({"/api/ps": {"models": [{"model": "m:latest", "context_length": 4096}]}}, 4096),
        ({"/api/show": {"parameters": "top_p 0.7\nnum_ctx    16384", "model_info": {"q.context_length": 9}}}, 16384),
        ({"/api/ps": {"models": []}, "/api/show": {"model_info": {"qwen3.context_length": 40960}}}, None),
        ({"/api/v0/models": {"data": [{"id": "m", "max_context_length": 8192, "loaded_context_length": 4096}]}}, 4096),
        (listing(max_model_len=32768, root="m"), 32768),
        (listing(context_length=131072, top_provider={"context_length": 65536}), 131072),
        (listing(context_window=131072, owned_by="groq"), 131072),
        (listing(max_context_length=32768, capabilities={}), 32768),
        (listing(meta={"n_ctx_train": 131072, "n_ctx": 4096}), 4096),
        (listing(meta={"n_ctx_train": 131072}), None),
        ({"/props": {"default_generation_settings": {"n_ctx": 2048}}, **listing(max_model_len=131072)}, 2048),
        ({"/props": "<html>not here</html>", **listing(max_model_len=4096)}, 4096),
        ({}, None),
    ],
    ids=[
        "llama.cpp", "Ollama loaded", "Ollama latest", "Ollama set", "Ollama could", "LM Studio", "vLLM", "OpenRouter",
        "Groq", "Mistral", "llama.cpp listing", "trained with", "loaded beats listed", "web page", "nothing",
    ],
)  # fmt: skip
async def test_window_is_read_from_the_servers_answers(pages: dict[str, Any], tokens: int | None) -> None:
    async with ScriptedServer([], pages=pages) as server:
        assert await find_window(ChatModel(name="m", base_url=server.url)) == tokens


@pytest.mark.parametrize(
    ("pages", "size", "is_loaded"),
    [
        ({"/props": PROPS, **listing(meta={"n_params": 1_777_088_000})}, 1_777_088_000, True),
        ({"/props": PROPS, "/v1/models": {"data": [{"id": "file.gguf", "meta": {"n_params": 5_000}}]}}, 5_000, True),
        ({"/api/show": {"model_info": {"general.parameter_count": 8_190_000_000}}}, 8_190_000_000, False),
        ({"/api/ps": {"models": [{"name": "m", "context_length": 4096}]}}, None, True),
        (listing(max_model_len=32768), None, False),
    ],
    ids=["llama.cpp", "llama.cpp under another name", "Ollama", "Ollama loaded", "vLLM"],
)
async def test_size_is_read_from_the_servers_answers(pages: dict[str, Any], size: int | None, is_loaded: bool) -> None:
    async with ScriptedServer([], pages=pages) as server:
        facts = await ask_server(ChatModel(name="m", base_url=server.url))
    assert (facts.size, facts.is_loaded) == (size, is_loaded)


@pytest.mark.parametrize(
    "strange", [[], {"data": 7}, {"data": [None, "m"]}, {"models": {"m": 1}}, {"data": [{"id": 5}]}]
)
async def test_malformed_listings_give_no_window(strange: Any) -> None:
    paths = ("/props", "/api/ps", "/api/show", "/api/v0/models", "/v1/models")
    odd = {"/props": {"default_generation_settings": [1]}}
    async with ScriptedServer([], pages=dict.fromkeys(paths, strange) | odd) as server:
        assert await find_window(ChatModel(name="m", base_url=server.url)) is None


async def test_unreachable_server_gives_no_window(nowhere: str) -> None:
    assert await find_window(ChatModel(name="m", base_url=nowhere)) is None


def test_only_servers_on_private_networks_are_asked_at_their_own_paths() -> None:
    near = ["http://localhost:1/v1", "http://192.168.1.5:8080/v1", "http://box:8080/v1", "http://gpu.local/v1"]
    assert all(map(is_on_private_network, near))
    assert not any(map(is_on_private_network, ["https://api.openai.com/v1", "http://8.8.8.8/v1", "http://[::1"]))


@pytest.mark.parametrize(("configured", "used"), [(None, 8192), (4096, 4096), (100_000, 8192)])
async def test_window_is_never_larger_than_configured(configured: int | None, used: int) -> None:
    pages = {"/props": {"default_generation_settings": {"n_ctx": 8192}}}
    async with ScriptedServer(lambda request: Reply("Hi"), pages=pages) as server:
        model = ChatModel(name="m", base_url=server.url, window=configured)
        crow = Crow(model).use(context_window)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "hello")
            asking = [task for task in asyncio.all_tasks() if "window.<locals>.ask" in repr(task.get_coro())]
            await asyncio.gather(*asking)  # the requests that are not answered yet
            assert model.window == used


# The alarm.

STORY = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "


def notices(editor: Editor) -> list[str]:
    return [f"{notice.severity}: {notice.title}" for notice in editor.of(NoticeUpdate)]


async def prompted(model: Any, *prompts: str) -> list[str]:
    async with connect(Crow(model).use(cut_prompts), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        for prompt in prompts:
            await editor.prompt(session.session_id, prompt)
        return notices(editor)


async def test_server_that_cut_the_prompt_is_reported_as_an_error() -> None:
    counts = {"prompt_tokens": 2048, "completion_tokens": 5}
    async with ScriptedServer(lambda request: Reply("Hm.", usage=counts)) as server:
        model = ChatModel(name="m", base_url=server.url)
        (notice,) = await prompted(model, STORY * 400)
    assert notice.startswith("error: The server read only 2,048 of at least ")
    assert "num_ctx" in notice
    assert "about 2,048 tokens" in notice


async def test_cut_is_noticed_when_the_conversation_outgrows_the_window() -> None:
    """Ollama's count stays at its window while the conversation grows."""

    def script(request: dict[str, Any]) -> Reply:
        whole = sum(len(message["content"]) for message in request["messages"]) // 4
        return Reply("Hm.", usage={"prompt_tokens": min(whole, 4096), "completion_tokens": 1})

    assert await prompted(ScriptedModel(script), *[STORY * 40] * 4) == []
    (first, *_) = await prompted(ScriptedModel(script), *[STORY * 40] * 7)
    assert "The server read only 4,096" in first


async def test_alarm_is_shown_once_a_turn() -> None:
    counts = {"prompt_tokens": 1000, "completion_tokens": 5}
    model = ScriptedModel(lambda request: Reply("Hm.", usage=counts))
    assert len(await prompted(model, STORY * 400, "and?")) == 2


TEXTS = {
    "English, four characters a token": (STORY * 300, 4.4),
    "code": ("    for item in items:\n        result.append(item.value)\n\n" * 300, 4.5),
    "Chinese": ("这是一个黑暗而暴风雨的夜晚，大雨倾盆而下。" * 700, 1.6),
    "Chinese, densely packed": ("这是一个黑暗而暴风雨的夜晚，大雨倾盆而下。" * 700, 2.2),
    "Thai": ("มันเป็นคืนที่มืดมิดและมีพายุ" * 500, 3.5),
    "Russian": ("Была тёмная и бурная ночь, дождь лил потоками. " * 300, 4.0),
    "German compounds": ("Donaudampfschifffahrtsgesellschaftskapitän " * 400, 6.0),
    "spaces and rules": (("-" * 100 + " " * 200 + "\n") * 200, 60.0),
    "numbers": ("3.14159 2.71828 1.41421\n" * 600, 2.0),
}


@pytest.mark.parametrize(("text", "packed"), TEXTS.values(), ids=TEXTS)
async def test_complete_prompt_raises_no_alarm_in_any_language(text: str, packed: float) -> None:
    def script(request: dict[str, Any]) -> Reply:
        said = "".join(message["content"] for message in request["messages"])
        story = said.count(STORY)
        tokens = story * 21 + (len(said) - story * len(STORY)) / packed
        return Reply("Hm.", usage={"prompt_tokens": int(tokens), "completion_tokens": 5})

    assert await prompted(ScriptedModel(script), text, STORY * 200, text) == []


@pytest.mark.parametrize(
    "counts",
    [{}, {"prompt_tokens": None}, {"prompt_tokens": "many"}, {"prompt_tokens": -5}, {"prompt_tokens_details": [1]}],
)
async def test_unusable_counts_raise_no_alarm(counts: Any) -> None:
    model = ScriptedModel(lambda request: Reply("Hm.", usage=counts))
    async with connect(Crow(model).use(cut_prompts).use(usage), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, STORY * 400)
        assert notices(editor) == []


async def test_gateway_that_counts_only_new_tokens_raises_no_alarm() -> None:
    counts = {"prompt_tokens": 20, "cache_read_input_tokens": 9000, "completion_tokens": 5}
    assert await prompted(ScriptedModel(lambda request: Reply("Hm.", usage=counts)), STORY * 400) == []


async def test_reasoning_that_a_template_drops_later_raises_no_alarm() -> None:
    """With reasoning sent back, a request may have fewer tokens than the one before it."""
    counts = iter([3000, 9000, 3500])

    def script(request: dict[str, Any]) -> Reply:
        return Reply("Hm.", usage={"prompt_tokens": next(counts), "completion_tokens": 5})

    async with ScriptedServer(script) as server:
        model = ChatModel(name="m", base_url=server.url, quirks=Quirks(echo="always"))
        assert await prompted(model, STORY * 100, "and?", "and then?") == []


async def test_short_prompt_raises_no_alarm() -> None:
    model = ScriptedModel(lambda request: Reply("Hm.", usage={"prompt_tokens": 3, "completion_tokens": 5}))
    assert await prompted(model, "hello") == []


@given(st.text())
def test_least_is_no_more_than_one_token_a_character(text: str) -> None:
    assert 0 <= count_min_tokens([{"role": "user", "content": text}]) <= len(text)
