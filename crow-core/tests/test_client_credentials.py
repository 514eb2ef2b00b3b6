"""Tests of client credentials: crow gets the tokens of a real remote MCP server without a user."""

import base64
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_agent.settings.mcp_servers import to_server
from crow_agent.settings.structs import OAuthSettings, ServerSettings
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_extensions.mask_secrets import mask_secrets
from fastmcp import FastMCP
from fastmcp.server.auth import AccessToken, RemoteAuthProvider, TokenVerifier
from fastmcp.server.dependencies import get_http_headers
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytestmark = pytest.mark.anyio

SECRET = "s3cret/of+the=client"


@asynccontextmanager
async def nobody(url: str) -> AsyncGenerator[None]:
    raise ConnectionError("there is nobody here")
    yield


@dataclass
class Issuer:
    """An authorization server that issues tokens to the client `crow`, and the MCP server that accepts them."""

    url: str = ""
    mcp: str = ""
    methods: list[str] | None = None
    """The ways to send the secret that it announces; None for no announcement."""
    lifetime: int | None = 3600
    requests: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """The requests for a token, with the way in which the secret was sent."""
    live: set[str] = field(default_factory=set[str])
    """The tokens that the MCP server accepts."""
    answer: Callable[[dict[str, str]], Any] | None = None
    """Answers a request for a token in place of the usual answer."""

    def metadata(self, request: Request) -> Any:
        found: dict[str, Any] = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}authorize",
            "token_endpoint": f"{self.url}token",
            "response_types_supported": ["code"],
            "grant_types_supported": ["client_credentials"],
        }
        return JSONResponse(found | ({"token_endpoint_auth_methods_supported": self.methods} if self.methods else {}))

    async def token(self, request: Request) -> Any:
        form = {key: values[0] for key, values in parse_qs((await request.body()).decode()).items()}
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        form["how"] = "body"
        if kind == "Basic":
            form["client_id"], form["client_secret"] = map(unquote, base64.b64decode(given).decode().split(":"))
            form["how"] = "header"
        self.requests.append(form)
        if self.answer:
            return self.answer(form)
        if (form["client_id"], form.get("client_secret")) != ("crow", SECRET):
            about = f"Unknown client: {form.get('client_secret')}"
            return JSONResponse({"error": "invalid_client", "error_description": about}, 401)
        token = f"token-number-{len(self.requests)}"
        self.live.add(token)
        life = {} if self.lifetime is None else {"expires_in": self.lifetime}
        return JSONResponse({"access_token": token, "token_type": "Bearer", **life})


class Verifier(TokenVerifier):
    """Accepts the tokens that are live."""

    def __init__(self, issuer: Issuer) -> None:
        super().__init__()
        self.issuer = issuer

    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(token=token, client_id="crow", scopes=[]) if token in self.issuer.live else None


@pytest.fixture
async def issuer(listening: Any) -> AsyncIterator[Issuer]:
    issuer = Issuer()

    def authorization(url: str) -> Any:
        issuer.url = f"{url}/"
        return Starlette(
            routes=[
                Route("/.well-known/oauth-authorization-server", issuer.metadata),
                Route("/token", issuer.token, methods=["POST"]),
            ]
        )

    def vault(url: str) -> Any:
        issuer.mcp = f"{url}/mcp"
        auth = RemoteAuthProvider(Verifier(issuer), [AnyHttpUrl(issuer.url)], url)
        server = FastMCP("vault", auth=auth)
        server.tool(lambda: get_http_headers(include={"authorization"})["authorization"], name="open")
        return server.http_app()

    async with listening(authorization), listening(vault):
        yield issuer


def make_server(issuer: Issuer, tokens: Path, /, **oauth: Any) -> Server:
    given = {"client_id": "crow", "client_secret": SECRET, "issuer": issuer.url, **oauth}
    settings = ServerSettings(url=issuer.mcp, auth="client_credentials", oauth=OAuthSettings(**given))
    return to_server("vault", settings, "/", tokens=tokens, visit=nobody)


async def list_tools(server: Server) -> tuple[list[str], str]:
    """Return the names of the tools of a server and its error."""
    try:
        return [tool["name"] for tool in await server.list()], server.error
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("methods", "how"),
    [
        (None, "header"),
        (["client_secret_basic"], "header"),
        (["client_secret_post"], "body"),
        (["private_key_jwt", "client_secret_post"], "body"),
    ],
)
async def test_server_is_used_without_a_user(methods: list[str] | None, how: str, issuer: Issuer, tmp_path: Path):
    issuer.methods = methods
    given = issuer.url.rstrip("/") if methods else issuer.url
    server = make_server(issuer, tmp_path, scopes=["read", "write"], issuer=given)
    assert await list_tools(server) == (["open"], "")
    (request,) = issuer.requests
    assert (request["grant_type"], request["scope"], request["how"]) == ("client_credentials", "read write", how)
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240 - neither the secret nor a token is stored


async def test_secret_in_a_file_is_read_when_the_server_starts(issuer: Issuer, tmp_path: Path):
    path = tmp_path / "secret"
    path.write_text("out of date\n")
    server = make_server(issuer, tmp_path, client_secret="", client_secret_file=str(path))
    path.write_text(f"{SECRET}\n")
    assert await list_tools(server) == (["open"], "")
    assert SECRET in server.secrets


async def test_settings_are_read_from_the_configuration_file(issuer: Issuer, tmp_path: Path):
    (tmp_path / "config.toml").write_text(
        f'[mcp.servers.vault]\nurl = "{issuer.mcp}"\nauth = "client_credentials"\n'
        f'oauth = {{ client_id = "crow", client_secret = "${{VAULT_SECRET}}", issuer = "{issuer.url}" }}\n'
    )
    config = load_config(Home(tmp_path, tmp_path), {"VAULT_SECRET": SECRET})
    server = to_server("vault", config.mcp.servers["vault"], "/", tokens=tmp_path / "tokens", visit=nobody)
    assert await list_tools(server) == (["open"], "")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"client_secret": "wrong-secret-1234"},
            "refuses the client credentials (401 invalid_client: Unknown client: ",
        ),
        ({"client_id": "raven"}, "check oauth.client_id and oauth.client_secret."),
        ({"issuer": ""}, 'auth = "client_credentials" needs oauth.issuer. Set it for this server.'),
        (
            {"client_id": "", "client_secret": ""},
            "needs oauth.client_id and oauth.client_secret (or client_secret_file).",
        ),
        ({"issuer": "auth.example.org"}, "oauth.issuer is no web address."),
        ({"issuer": "https://other.example.org"}, "check oauth.issuer."),
        ({"client_secret_file": "/a"}, "both oauth.client_secret and oauth.client_secret_file. Remove one of them."),
        ({"client_secret": "", "client_secret_file": "/nonexistent/a"}, "/nonexistent/a cannot be read: No such file"),
        ({"client_secret": "", "client_secret_file": "a"}, "'a' is no absolute path. Begin it with / or ~."),
        ({"client_secret": "", "client_secret_file": "/dev/null"}, "/dev/null is empty."),
    ],
)
async def test_unusable_credentials_are_a_sentence_with_server_and_setting(
    given: dict[str, str], sentence: str, issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL, "mcp")  # as the command crow does
    found, error = await list_tools(make_server(issuer, tmp_path, **given))
    assert found == []
    assert error.startswith("MCP server 'vault' did not start: ")
    assert sentence in error
    assert "\n" not in error
    assert SECRET not in error
    assert given.get("client_secret") not in error.split() or not given.get("client_secret")
    assert "wrong-secret-1234" not in error + caplog.text
    assert not caplog.records


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda form: JSONResponse({"error": "invalid_scope"}, 400), "(400 invalid_scope); check oauth.scopes."),
        (lambda form: JSONResponse(["no"], 500), "(500); check oauth.client_id"),
        (lambda form: JSONResponse({"token": "x"}), "answers with no valid token; check oauth.issuer."),
        (lambda form: JSONResponse({"access_token": "of-nobody-else", "token_type": 7}), "no valid token"),
        (lambda form: JSONResponse({"access_token": ["of-nobody-else"], "token_type": "Bearer"}), "no valid token"),
        (lambda form: JSONResponse({"error": {"a": 1}, "error_description": "\x1b[31m" * 1000}, 403), "(403 {'a': 1}"),
        (lambda form: JSONResponse({"access_token": "x", "token_type": "Bearer"}), "a new token of"),
    ],
)
async def test_odd_answers_of_the_issuer_are_a_sentence(answer: Any, sentence: str, issuer: Issuer, tmp_path: Path):
    issuer.answer = answer
    found, error = await list_tools(make_server(issuer, tmp_path))
    assert found == []
    assert sentence in error
    assert "of-nobody-else" not in error
    assert error.isprintable()
    assert len(error) < 1000


async def test_secret_is_sent_to_no_other_issuer_than_the_configured_one(issuer: Issuer, tmp_path: Path):
    found, error = await list_tools(make_server(issuer, tmp_path, issuer="https://auth.example.org"))
    assert (found, issuer.requests) == ([], [])
    assert "https://auth.example.org" in error


@pytest.mark.parametrize("end", ["expired", "revoked"])
async def test_token_that_is_no_longer_valid_is_replaced(end: str, issuer: Issuer, tmp_path: Path):
    issuer.lifetime = 0 if end == "expired" else None
    server = make_server(issuer, tmp_path)
    use = {"name": "vault_open", "arguments": {}}
    model = ScriptedModel([Reply(tool_calls=[use]), Reply("One."), Reply(tool_calls=[use]), Reply("Two.")])
    crow = Crow(model).use(mask_secrets)
    crow.mcp_servers(lambda session: [server])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        before = len(issuer.requests)
        issuer.live.clear()
        await editor.prompt(session.session_id, "again")
        log = repr(crow.sessions[session.session_id].log)
    assert len(issuer.requests) > before
    answers = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert answers == ["Bearer [secret]"] * 2
    shown = repr(editor.updates) + log + json.dumps(model.requests)
    assert SECRET not in shown
    assert not any(token in shown for token in issuer.live)


async def test_refused_renewal_is_an_error_of_the_tool_call_until_it_is_accepted_again(issuer: Issuer, tmp_path: Path):
    server = make_server(issuer, tmp_path)
    use = {"name": "vault_open", "arguments": {}}
    model = ScriptedModel(
        [Reply(tool_calls=[use]), Reply(tool_calls=[use]), Reply("1"), Reply(tool_calls=[use]), Reply("2")]
    )
    crow = Crow(model).use(mask_secrets)
    crow.mcp_servers(lambda session: [server])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        assert (await server.list())[0]["name"] == "open"
        issuer.live.clear()
        issuer.answer = lambda form: JSONResponse({"error": "invalid_client"}, 401)
        await editor.prompt(session.session_id, "go")
        issuer.answer = None
        await editor.prompt(session.session_id, "again")
    broken, refused, answered = [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert "failed" in broken
    assert "refuses the client credentials (401 invalid_client)" in refused
    assert answered == "Bearer [secret]"
