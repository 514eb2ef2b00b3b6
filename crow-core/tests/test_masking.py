"""Secrets of settings and the environment are masked everywhere; other texts stay unchanged."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crow_agent.settings.structs import Config, McpSettings, ModelSettings, ServerSettings
from crow_core.acp.schema import (
    DiffContent,
    EnvVariable,
    HttpHeader,
    McpServer,
    RequestPermissionRequest,
    ToolCallUpdate,
)
from crow_core.app import Crow
from crow_core.masking import MASK, find_secrets, mask
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.truncate import truncate
from crow_permissions.extension import permissions
from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import EmbeddedResource, TextContent, TextResourceContents

CANARIES = [f"canary-{n:02}-7f3a{n:02}c2e" for n in range(12)]
(KEY, TOKEN, PROXY, API_KEY, BEARER, HEADER, BASE_URL, MCP_ENV, MCP_HEADER, MCP_QUERY, CLIENT_ENV, CLIENT_ARG) = (
    CANARIES
)

ENV = {
    "OPENAI_API_KEY": KEY,
    "GITHUB_TOKEN": TOKEN,
    "https_proxy": f"http://me:{PROXY}@proxy.example.com:3128",
    "HOME": "/home/jane",
    "SSH_AUTH_SOCK": "/tmp/ssh-x7Yz12/agent.3",
    "GIT_AUTHOR_NAME": "Jane Doe",
}
CONFIG = Config(
    models={
        "one": ModelSettings(
            base_url=f"https://me:{BASE_URL}@models.example.com/v1",
            model="gpt-4o-2024-08-06",
            api_key=API_KEY,
            headers={"Authorization": f"Bearer {BEARER}", "X-Route": HEADER, "X-Title": "My project"},
        )
    },
    mcp=McpSettings(
        servers={
            "local": ServerSettings(command="npx", args=["-y", "birds"], env={"BIRDS": MCP_ENV, "LOG_LEVEL": "debug"}),
            "web": ServerSettings(
                url=f"https://mcp.example.com/birds?api_key={MCP_QUERY}&project=birds", headers={"X-Bird": MCP_HEADER}
            ),
        }
    ),
)
CLIENTS = McpServer(
    name="clients", command="birds", args=["--token", CLIENT_ARG], env=[EnvVariable(name="BIRD", value=CLIENT_ENV)]
)


def leaks(*seen: Any) -> list[str]:
    """Return the canaries in values."""
    text = json.dumps([msgspec.to_builtins(one) for one in seen])
    return [canary for canary in CANARIES if canary in text]


def test_each_secret_is_found_and_nothing_else():
    assert find_secrets(CONFIG, ENV) | find_secrets(CLIENTS) == set(CANARIES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOG_LEVEL", "production"),
        ("HOST", "localhost:8080"),
        ("REGION", "eu-central-1"),
        ("BIN", "/usr/bin/python3.11"),
        ("FOLDERS", "/home/jane/a1b2c3d4:/srv/x9y8z7w6"),
        ("HOME", "~/projects/a1b2c3d4e5"),
        ("WIN", r"C:\Users\jane\a1b2c3d4"),
        ("PORT", "1234567890"),
        ("SINCE", "2026-11-21T19:36:00Z"),
        ("MODEL", "gpt-4o-mini"),
        ("MAIL", "jane.doe@example.com"),
        ("URL", "https://api.example.com/v2/birds?page=2"),
        ("ACCEPT", "application/json, text/event-stream"),
        ("API_KEY", "ollama"),
        ("API_KEY", "lm-studio"),
        ("API_KEY", "not-needed"),
        ("DB", "postgres://postgres:postgres@localhost/postgres"),
        ("EMPTY", ""),
    ],
)
def test_ordinary_values_are_no_secrets(name: str, value: str):
    assert not find_secrets({"env": {name: value}})


@pytest.mark.parametrize(
    "name", ["KEYBOARD", "MAX_TOKENS", "SSH_AUTH_SOCK", "GIT_AUTHOR_EMAIL", "KEYMAP", "TOKENIZERS_PARALLELISM", "PATH"]
)
def test_variables_with_ordinary_names_are_no_secrets(name: str):
    ordinary = {"MAX_TOKENS": "320000000", "GIT_AUTHOR_EMAIL": "jane7x2@example.com", "PATH": "a1b2c3d4e5f6"}
    assert not find_secrets({name: ordinary.get(name, "/run/user/1000/x9y8z7")})


@pytest.mark.parametrize(
    ("settings", "secret"),
    [
        ({"DB_PASSWORD": "correcthorsebattery"}, "correcthorsebattery"),
        ({"AWS_SECRET_ACCESS_KEY": "/wJalrXUtnFEMI/K7MDENG"}, "/wJalrXUtnFEMI/K7MDENG"),
        ({"APP_CREDENTIALS": "q7w8e9r0t1"}, "q7w8e9r0t1"),
        ({"env": {"WHATEVER": "ghp_16C7e42F292c6912E7"}}, "ghp_16C7e42F292c6912E7"),
        ({"env": {"ID": "550e8400-e29b-41d4-a716-446655440000"}}, "550e8400-e29b-41d4-a716-446655440000"),
        ({"args": ["--port", "80", "--api-key=9f8e7d6c5b"]}, "9f8e7d6c5b"),
        ({"url": "https://mcp.example.com/s/Zm9vYmFyMTIzNDU2Nzg5/mcp"}, "Zm9vYmFyMTIzNDU2Nzg5"),
        ({"url": "https://ghp_16C7e42F292c6912E7@github.com/x/y"}, "ghp_16C7e42F292c6912E7"),
    ],
)
def test_secret_is_recognized_by_its_name_or_its_table(settings: dict[str, Any], secret: str):
    assert find_secrets(settings) == {secret}


def test_password_in_a_url_is_a_secret_with_and_without_escapes():
    assert find_secrets({"url": "postgresql://me:p%40ss-w0rd@db/x"}) == {"p%40ss-w0rd", "p@ss-w0rd"}


def test_each_line_of_a_private_key_is_a_secret():
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nq83vZGE12aZw\n-----END PRIVATE KEY-----"
    assert find_secrets({"DEPLOY_KEY": key}) == {key, "MIIEvQIBADANBgkqhkiG9w0BAQ", "q83vZGE12aZw"}


def test_variables_called_name_and_value_hide_no_others():
    assert find_secrets({"name": "jane", "value": "1", "API_TOKEN": KEY}) == {KEY}


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON)
def test_value_without_a_secret_is_unchanged(value: Any):
    assert mask(value, [KEY]) == value
    assert mask(value, []) == value


@given(st.text(min_size=6).map("~{}~".format), st.text())
def test_a_secret_is_found_in_text_and_in_text_that_is_json(secret: str, around: str):
    text = f"{around}{secret}{around}"
    nested = {"arguments": json.dumps({"a": text}), "b": [text, msgspec.json.encode([secret]).decode("utf-8")]}
    found = mask({**nested, secret: 1}, [secret])
    assert secret not in found["b"][0]
    assert secret not in json.loads(found["b"][1])[0]
    assert secret not in json.loads(found["arguments"])["a"]
    assert secret not in found


@pytest.mark.parametrize("spelling", ["a+b/c=d0é", "a%2Bb%2Fc%3Dd0%C3%A9", "a+b\\/c=d0é", "a+b/c=d0\\u00e9"])
def test_a_secret_is_found_in_the_spellings_of_urls_and_json(spelling: str):
    assert mask(f"<{spelling}>", ["a+b/c=d0é"]) == "<[secret]>"


def test_the_longer_of_two_secrets_is_masked_whole():
    assert mask("x abcdefgh-1234 abcdefgh", ["abcdefgh", "abcdefgh-1234"]) == f"x {MASK} {MASK}"


def leaky(results: list[ToolResult]) -> Server:
    """Make a built-in server with a tool that returns the given results."""
    server = FastMCP("leaky")

    @server.tool(name="leak", meta={"crow/kind": "edit"})
    def leak() -> ToolResult:
        return results.pop(0)

    return Server("leaky", lambda: server, built_in=True, shared=True)


def everything() -> ToolResult:
    """Make a result with all canaries, in all of its parts."""
    printed = "\n".join(CANARIES)
    resource = TextResourceContents(uri="file:///secrets.txt", text=printed)
    content = [
        TextContent(type="text", text=printed),
        TextContent(type="text", text=json.dumps({canary: [canary] for canary in CANARIES})),
        EmbeddedResource(type="resource", resource=resource),
    ]
    change = {"path": "/p/.env", "old": "", "new": printed, "before": "b" * 64, "after": "a" * 64}
    return ToolResult(content, meta={"crow/changes": [change], "crow/locations": [{"path": "/p/.env", "line": 1}]})


@pytest.mark.anyio
async def test_secrets_in_prompts_and_tool_results_are_neither_stored_nor_shown(tmp_path: Path):
    model = ScriptedModel([Reply(tool_calls=[Use(name="leak", arguments={})]), Reply("Done.")])
    crow = Crow(model, servers=[leaky([everything(), everything()])])
    crow.use(mask_secrets, known=find_secrets(CONFIG, ENV)).use(truncate, limit=100).use(permissions)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path), [CLIENTS])
        await editor.prompt(session.session_id, "Use these: " + " ".join(CANARIES))
        (kept,) = crow.sessions.values()
        assert leaks(*kept.log) == []
        (whole,) = (file.read_text() for file in kept.folders.scratch().iterdir())  # the text that was truncated
        assert whole.count(MASK) == 12 + 24 + 12
        assert leaks(whole) == []
    assert leaks(*model.requests) == []
    assert leaks(*editor.updates, *editor.questions) == []
    assert f"Use these: {MASK} {MASK}" in json.dumps(model.requests)
    (question,) = editor.questions
    assert isinstance(question, RequestPermissionRequest)
    diff = DiffContent(path="/p/.env", old_text="", new_text="\n".join([MASK] * 12))
    assert question.tool_call.content == [diff]
    assert [update.content for update in editor.of(ToolCallUpdate) if update.content] == [[diff]]


@pytest.mark.anyio
async def test_text_that_is_no_known_secret_is_unchanged(tmp_path: Path):
    others = "AKIAIOSFODNN7EXAMPLE ghp_16C7e42F292c6912E7 [secret] password=hunter2"
    model = ScriptedModel([Reply("Seen.")])
    async with connect(Crow(model).use(mask_secrets, known=find_secrets(CONFIG, ENV))) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, others)
    assert model.requests[0]["messages"][-1]["content"] == others


STDERR = "import os, sys; sys.exit('cannot log in with ' + 'x' * 280 + os.environ['BIRD'])"


@pytest.mark.anyio
async def test_error_output_of_a_clients_server_is_masked(tmp_path: Path):
    server = McpServer(
        name="birds", command=sys.executable, args=["-c", STDERR], env=[EnvVariable(name="BIRD", value=CLIENT_ENV)]
    )
    model = ScriptedModel([Reply("Hello.")])
    crow = Crow(model).use(mask_secrets)
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path), [server])
        await editor.prompt(session.session_id, "hi")
        (kept,) = crow.sessions.values()
        assert set(kept.secrets) == {CLIENT_ENV}
    assert "cannot log in with xxx" in editor.thoughts
    assert CLIENT_ENV[:8] not in editor.thoughts


@pytest.mark.anyio
async def test_each_session_masks_the_secrets_of_its_own_servers(tmp_path: Path):
    def server(secret: str) -> McpServer:
        headers = [HttpHeader(name="Authorization", value=f"Bearer {secret}")]
        return McpServer(name="web", type="http", url="http://127.0.0.1:9/mcp", headers=headers)

    model = ScriptedModel(lambda request: Reply("Seen."))
    async with connect(Crow(model).use(mask_secrets)) as editor:
        for own in (KEY, TOKEN):
            session = await editor.new_session(str(tmp_path), [server(own)])
            await editor.prompt(session.session_id, f"{KEY} {TOKEN}")
    said = [request["messages"][-1]["content"] for request in model.requests]
    assert said == [f"{MASK} {TOKEN}", f"{KEY} {MASK}"]
