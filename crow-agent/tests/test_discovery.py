"""The choice of a model by the settings, the environment and the servers on this machine."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest
from crow_agent.settings import discovery
from crow_agent.settings.discovery import NO_MODEL_MESSAGE, find_models, search_models
from crow_agent.settings.structs import Config, ModelSettings
from crow_core.errors import ConfigError, ModelError
from crow_core.models.chat_model import ChatModel
from crow_core.models.listing import list_models
from crow_core.models.model_call import Model, ModelCall
from crow_core.testing import Reply, ScriptedServer
from crow_testing.listening import listen

pytestmark = pytest.mark.anyio

A, B = ModelSettings(base_url="http://a/v1", model="big-a"), ModelSettings(base_url="http://b/v1", model="big-b")
CONFIG = Config(models={"a": A, "b": B})


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, nowhere: str) -> None:
    """Let no server listen at the local servers' default addresses."""
    monkeypatch.setattr(discovery, "LOCAL_SERVERS", {"Ollama": nowhere})
    monkeypatch.setattr(discovery, "LISTING_TIMEOUT", 30.0)  # the machine may be busy


@asynccontextmanager
async def listing(body: bytes, status: bytes = b"200 OK") -> AsyncGenerator[tuple[str, list[bytes]]]:
    """Serve one body for every request; yield the URL and the heads of the requests."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    async with listen(serve) as port:
        yield f"http://127.0.0.1:{port}/v1", heads


def describe(models: dict[str, Model]) -> list[tuple[str, str, str, str]]:
    """List each model's name, its name at the endpoint, its URL and its key."""
    found = [(name, model) for name, model in models.items() if isinstance(model, ChatModel)]
    assert len(found) == len(models)
    return [(name, model.name, model.base_url, model.api_key) for name, model in found]


IN_A, IN_B = ("a", "big-a", "http://a/v1", ""), ("b", "big-b", "http://b/v1", "")
OPENAI = "https://api.openai.com/v1"


@pytest.mark.parametrize(
    ("config", "env", "wanted", "found"),
    [
        (CONFIG, {}, "", [IN_A, IN_B]),
        (Config(models={"a": A, "b": B}, model="b"), {}, "", [IN_B, IN_A]),
        (CONFIG, {"CROW_MODEL": "b"}, "", [IN_B, IN_A]),
        (Config(models={"a": A, "b": B}, model="b"), {"CROW_MODEL": "b"}, "a", [IN_A, IN_B]),
        (CONFIG, {"OPENAI_BASE_URL": "http://x/v1", "OPENAI_API_KEY": "k", "CROW_MODEL": "b"}, "", [IN_B, IN_A]),
        (
            CONFIG,
            {"OPENAI_BASE_URL": "http://x/v1", "CROW_MODEL": "m"},
            "",
            [("m", "m", "http://x/v1", ""), IN_A, IN_B],
        ),
        (Config(), {"OPENAI_BASE_URL": "http://x/v1", "CROW_MODEL": "m"}, "", [("m", "m", "http://x/v1", "")]),
        (Config(), {"OPENAI_BASE_URL": "http://x/v1", "OPENAI_API_KEY": "k"}, "m", [("m", "m", "http://x/v1", "k")]),
        (Config(), {"OPENAI_API_KEY": "k", "CROW_MODEL": "m"}, "", [("m", "m", OPENAI, "k")]),
        (CONFIG, {"OPENAI_API_KEY": "k", "CROW_MODEL": "m"}, "", [("m", "m", OPENAI, "k"), IN_A, IN_B]),
        (CONFIG, {"OPENAI_API_KEY": "k"}, "", [IN_A, IN_B]),
    ],
)
async def test_default_comes_from_the_command_line_then_the_environment_then_the_settings(
    config: Config, env: dict[str, str], wanted: str, found: list[tuple[str, str, str, str]]
) -> None:
    assert describe(await find_models(config, env, wanted)) == found


async def test_settings_reach_the_model() -> None:
    settings = ModelSettings(
        base_url="https://example.org/v1",
        model="m",
        api_key="k",
        headers={"X": "1"},
        parameters={"temperature": 0},
        window=8192,
        idle_timeout=5,
    )
    (model,) = (await find_models(Config(models={"x": settings}), {})).values()
    assert model == ChatModel(
        name="m",
        base_url="https://example.org/v1",
        api_key="k",
        headers={"X": "1"},
        parameters={"temperature": 0},
        window=8192,
        idle_timeout=5,
    )


async def test_unknown_name_among_configured_models_is_an_error_that_lists_them() -> None:
    with pytest.raises(ModelError, match=r"^There is no model 'c'\. Configured are: a, b\.$"):
        await find_models(CONFIG, {}, "c")


async def test_key_without_a_model_says_to_name_one() -> None:
    with pytest.raises(
        ModelError,
        match=r"^OPENAI_API_KEY is set, but no model is named\. Set CROW_MODEL, pass -m, or run `crow setup`\.$",
    ):
        await find_models(Config(), {"OPENAI_API_KEY": "k"})


async def test_endpoint_without_a_name_is_asked_for_its_first_model() -> None:
    async with listing(b'{"data": [{"id": "one", "object": "model"}, {"id": "two"}]}') as (url, heads):
        found = await find_models(Config(), {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k"})
    assert describe(found) == [("one", "one", url, "k")]
    assert heads[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"authorization: bearer k\r\n" in heads[0].lower()


@pytest.mark.parametrize("tail", ["/", "/chat/completions"])
async def test_models_are_listed_for_any_end_of_the_base_url(tail: str) -> None:
    async with ScriptedServer([]) as server:
        assert await list_models(server.url + tail) == ["scripted"]


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"data": []}', b'{"error": {"message": "no"}}', b'{"data": [{"id": "\xff"}]}']
)
async def test_endpoint_that_lists_nothing_says_to_name_a_model(body: bytes) -> None:
    async with listing(body) as (url, _):
        with pytest.raises(ModelError) as caught:
            await find_models(Config(), {"OPENAI_BASE_URL": url})
    assert str(caught.value) == f"No model is named, and {url} does not list any. Set CROW_MODEL, or pass -m."


@pytest.mark.parametrize("url", ["nonsense", "http://[::1/v1", ""])
async def test_invalid_url_lists_nothing(url: str) -> None:
    assert await list_models(url) == []


async def test_key_that_no_header_can_hold_lists_nothing(nowhere: str) -> None:
    assert await list_models(nowhere, key="sk-…") == []


async def test_server_that_does_not_answer_in_time_lists_nothing() -> None:
    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listen(be_silent) as port:
        assert await list_models(f"http://127.0.0.1:{port}/v1", timeout=0.05) == []


Local = Callable[[str], None]


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, nowhere: str) -> Local:
    """Return a function that makes an address the second of the local servers' addresses."""

    def put(url: str) -> None:
        monkeypatch.setattr(discovery, "LOCAL_SERVERS", {"Ollama": nowhere, "llama.cpp": url})

    return put


async def test_local_server_is_found_and_can_be_used(second: Local) -> None:
    async with ScriptedServer([Reply("Hi")]) as server:
        second(server.url)
        found = await find_models(Config(), {})
        call = ModelCall(found["scripted"], {"messages": [{"role": "user", "content": "Hi"}]})
        await call.run()
        for model in found.values():
            assert isinstance(model, ChatModel)
            await model.close()
    assert describe(found) == [("scripted", "scripted", server.url, "")]
    assert call.reply.get("content") == "Hi"


async def test_named_model_of_a_local_server_comes_first(second: Local) -> None:
    async with listing(b'{"data": [{"id": "one"}, {"id": "two"}]}') as (url, _):
        second(url)
        found = await find_models(Config(), {"CROW_MODEL": "two"})
    assert describe(found) == [("two", "two", url, ""), ("one", "one", url, "")]


async def test_unknown_name_is_an_error_that_lists_the_local_models(second: Local) -> None:
    async with listing(b'{"data": [{"id": "one"}, {"id": "two"}]}') as (url, _):
        second(url)
        with pytest.raises(ModelError) as caught:
            await find_models(Config(), {"CROW_MODEL": "three"})
    assert str(caught.value) == "No server on this machine offers the model 'three'. They offer: one, two."


async def test_proxy_is_not_used_for_local_servers(
    second: Local, monkeypatch: pytest.MonkeyPatch, nowhere: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", nowhere)
    monkeypatch.setenv("ALL_PROXY", nowhere)
    async with ScriptedServer([]) as server:
        second(server.url)
        assert list(await find_models(Config(), {})) == ["scripted"]


async def test_missing_model_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        await find_models(Config(), {})
    assert str(caught.value) == NO_MODEL_MESSAGE
    assert len(NO_MODEL_MESSAGE.splitlines()) == 2
    assert all(word in NO_MODEL_MESSAGE for word in ("Ollama", "crow setup", "OPENAI_API_KEY", "crow demo"))


async def test_error_about_a_missing_model_begins_with_its_name() -> None:
    with pytest.raises(ModelError) as caught:
        await find_models(Config(), {"CROW_MODEL": "m"})
    assert str(caught.value) == f"There is no model 'm' to ask. {NO_MODEL_MESSAGE}"


@pytest.mark.parametrize("env", [{"CROW_MODEL": "scripted"}, {}])
async def test_a_model_that_a_local_server_offers_is_not_asked_for_at_openai(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    async with ScriptedServer([]) as server:
        monkeypatch.setattr(discovery, "LOCAL_SERVERS", {"Ollama": server.url})
        found = await search_models(Config(), {"OPENAI_API_KEY": "k", **env}, "" if env else "scripted")
    assert describe(found.models) == [("scripted", "scripted", server.url, "")]
    assert "although OPENAI_API_KEY is set" in found.describe_guess()


@pytest.mark.parametrize(
    ("config", "env", "wanted", "reason"),
    [
        (CONFIG, {}, "", "the first of [models] in config.toml"),
        (Config(models={"a": A, "b": B}, model="b"), {}, "", "model in config.toml names it"),
        (CONFIG, {"CROW_MODEL": "b"}, "", "CROW_MODEL names it"),
        (CONFIG, {"CROW_MODEL": "b"}, "a", "-m names it"),
        (Config(), {"OPENAI_API_KEY": "k"}, "m", "-m names it, OPENAI_API_KEY makes OpenAI the endpoint"),
    ],
)
async def test_the_reason_names_the_setting(config: Config, env: dict[str, str], wanted: str, reason: str) -> None:
    found = await search_models(config, env, wanted)
    assert (found.reason, found.describe_guess()) == (reason, "")


async def test_a_model_that_no_setting_names_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedServer([]) as server:
        monkeypatch.setattr(discovery, "LOCAL_SERVERS", {"Ollama": server.url})
        for env in ({}, {"OPENAI_BASE_URL": server.url}):
            found = await search_models(Config(), env)
            assert found.describe_guess().startswith("Using the model scripted: the first one ")


async def test_a_key_in_a_keyring_that_cannot_be_read_says_what_to_do() -> None:
    stored = ModelSettings(base_url="http://a/v1", model="big-a", api_key="keyring:a")
    with pytest.raises(ConfigError, match=r"\[models\.a\].*keyring.*crow setup"):
        await find_models(Config(models={"a": stored}), {})
