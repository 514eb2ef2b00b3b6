"""Tests of logging in to a real remote MCP server that requires OAuth."""

import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import keyring
import pytest
from crow_agent.settings.mcp_servers import to_server
from crow_agent.settings.structs import OAuthSettings, ServerSettings
from crow_core.app import Crow
from crow_core.mcp.oauth import open_token_store
from crow_core.testing import Reply, ScriptedModel, connect
from crow_extensions.mask_secrets import mask_secrets
from fastmcp import FastMCP
from fastmcp.server.auth.auth import ClientRegistrationOptions
from fastmcp.server.auth.providers.in_memory import InMemoryOAuthProvider
from fastmcp.server.dependencies import get_http_headers
from keyring.backend import KeyringBackend
from keyring.backends import fail
from mcp.shared.auth import OAuthClientInformationFull
from pydantic import AnyUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

pytestmark = pytest.mark.anyio

Serve = Callable[[Any], "Guarded"]


class Guarded:
    """A server behind a URL, with its OAuth provider."""

    def __init__(self, url: str, provider: InMemoryOAuthProvider) -> None:
        self.url = url
        self.provider = provider


@pytest.fixture(autouse=True)
def no_keyring() -> Iterator[None]:
    before = keyring.get_keyring()
    keyring.set_keyring(fail.Keyring())
    yield
    keyring.set_keyring(before)


@pytest.fixture
async def guarded(listening: Any) -> AsyncIterator[Guarded]:
    doors: list[InMemoryOAuthProvider] = []

    def app(url: str) -> Any:
        doors.append(
            InMemoryOAuthProvider(base_url=url, client_registration_options=ClientRegistrationOptions(enabled=True))
        )
        server = FastMCP("vault", auth=doors[0])
        server.tool(lambda: get_http_headers(include={"authorization"})["authorization"], name="open")
        return server.http_app()

    async with listening(app) as url:
        yield Guarded(f"{url}/mcp", doors[0])


DOCUMENT = "https://crow.example/client.json"


class DocumentProvider(InMemoryOAuthProvider):
    """Says in its metadata that it knows a client by the URL of the document that describes it."""

    def get_routes(self, mcp_path: str | None = None) -> list[Route]:
        return [
            Route(route.path, self.describe) if "oauth-authorization-server" in route.path else route
            for route in super().get_routes(mcp_path)
        ]

    async def describe(self, request: Request) -> Response:
        """Answer with the metadata of the authorization server."""
        base = str(self.base_url).rstrip("/")
        return JSONResponse(
            {
                "issuer": str(self.base_url),
                "authorization_endpoint": f"{base}/authorize",
                "token_endpoint": f"{base}/token",
                "registration_endpoint": f"{base}/register",
                "response_types_supported": ["code"],
                "code_challenge_methods_supported": ["S256"],
                "token_endpoint_auth_methods_supported": ["none"],
                "client_id_metadata_document_supported": True,
            }
        )


class User:
    """A user who logs in on every page."""

    def __init__(self) -> None:
        self.visited: list[str] = []

    @asynccontextmanager
    async def visit(self, url: str) -> AsyncGenerator[None]:
        self.visited.append(url)
        await follow(url)
        yield


async def follow(url: str) -> None:
    """Open a URL and follow redirects, as a browser does."""
    async with httpx2.AsyncClient(follow_redirects=True) as browser:
        (await browser.get(url)).raise_for_status()


@asynccontextmanager
async def nobody(url: str) -> AsyncGenerator[None]:
    raise ConnectionError("there is nobody here")
    yield


async def tools(
    url: str, tokens: Path, visit: Any, oauth: OAuthSettings | None = None, document: str = ""
) -> tuple[list[str], str]:
    """Return the names of the tools of a server and its error."""
    settings = ServerSettings(url=url, auth="oauth", oauth=oauth)
    server = to_server("vault", settings, "/", tokens=tokens, visit=visit, document=document)
    try:
        return [tool["name"] for tool in await server.list()], server.error
    finally:
        await server.close()


async def test_user_logs_in_once(guarded: Guarded, tmp_path: Path):
    user, tokens = User(), tmp_path / "oauth"
    assert await tools(guarded.url, tokens, user.visit) == (["open"], "")
    assert await tools(guarded.url, tokens, nobody) == (["open"], "")
    assert len(user.visited) == 1
    files = [path for path in tokens.rglob("*") if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert tokens.stat().st_mode & 0o777 == 0o700


async def test_tokens_are_secret(guarded: Guarded, tmp_path: Path):
    settings = ServerSettings(url=guarded.url, auth="oauth")
    server = to_server("vault", settings, "/", tokens=tmp_path, visit=User().visit)
    model = ScriptedModel([Reply(tool_calls=[{"name": "vault_open", "arguments": {}}]), Reply("Done.")])
    crow = Crow(model).use(mask_secrets)
    crow.mcp_servers(lambda session: [server])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[-1]["messages"][-1]["content"] == "Bearer [secret]"
    (token,) = guarded.provider.access_tokens
    assert token not in repr(editor.updates)


async def test_user_logs_in_again_after_the_server_forgot_the_login(guarded: Guarded, tmp_path: Path):
    user = User()
    await tools(guarded.url, tmp_path, user.visit)
    for store in (guarded.provider.access_tokens, guarded.provider.refresh_tokens, guarded.provider.clients):
        store.clear()
    assert await tools(guarded.url, tmp_path, user.visit) == (["open"], "")
    assert len(user.visited) == 2


async def test_expired_token_is_refreshed_without_the_user(guarded: Guarded, tmp_path: Path):
    await tools(guarded.url, tmp_path, User().visit)
    at = {"key": f"{guarded.url}/token_expiry", "collection": "mcp-oauth-token-expiry"}
    await open_token_store(tmp_path).put(value={"expires_at": 1.0}, **at)
    guarded.provider.access_tokens.clear()
    assert await tools(guarded.url, tmp_path, nobody) == (["open"], "")


@pytest.mark.parametrize("of_server", [True, False])
async def test_client_with_a_document_does_not_register(of_server: bool, tmp_path: Path, listening: Any):
    """The document is named by the settings of the server, or by `client_document` for all servers."""
    reserved = socket.socket()  # as below
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    providers: list[DocumentProvider] = []

    def app(url: str) -> Any:
        providers.append(
            DocumentProvider(base_url=url, client_registration_options=ClientRegistrationOptions(enabled=True))
        )
        providers[0].clients[DOCUMENT] = OAuthClientInformationFull(  # as the document says
            client_id=DOCUMENT,
            redirect_uris=[AnyUrl(f"http://127.0.0.1:{reserved.getsockname()[1]}/callback")],
            token_endpoint_auth_method="none",
        )
        server = FastMCP("vault", auth=providers[0])
        server.tool(lambda: "x", name="open")
        return server.http_app()

    user = User()
    settings = OAuthSettings(client_id=DOCUMENT if of_server else "", callback_port=reserved.getsockname()[1])
    document = "" if of_server else DOCUMENT
    with reserved:
        async with listening(app) as url:
            assert await tools(f"{url}/mcp", tmp_path, user.visit, settings, document) == (["open"], "")
    assert [*providers[0].clients] == [DOCUMENT]
    assert "client_id=https%3A%2F%2Fcrow.example%2Fclient.json" in user.visited[0]


async def test_client_with_a_document_registers_where_documents_are_not_taken(guarded: Guarded, tmp_path: Path):
    assert await tools(guarded.url, tmp_path, User().visit, document=DOCUMENT) == (["open"], "")
    (client,) = guarded.provider.clients
    assert client != DOCUMENT


async def test_configured_client_does_not_register(guarded: Guarded, tmp_path: Path):
    reserved = socket.socket()  # bound: nobody else is given its port, and a listener may still ask for it
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    await guarded.provider.register_client(
        OAuthClientInformationFull(
            client_id="crow",
            client_secret="s3cret",
            redirect_uris=[AnyUrl(f"http://127.0.0.1:{port}/callback")],
            token_endpoint_auth_method="client_secret_post",
        )
    )
    settings = OAuthSettings(client_id="crow", client_secret="s3cret", callback_port=port)
    with reserved:
        assert await tools(guarded.url, tmp_path, User().visit, settings) == (["open"], "")
    assert [*guarded.provider.clients] == ["crow"]


async def test_login_without_a_user_fails_with_a_sentence_and_is_logged_by_the_sdk_alone(
    guarded: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.CRITICAL, "mcp")  # as the command crow does
    expected = "MCP server 'vault' did not start: there is nobody here."
    assert await tools(guarded.url, tmp_path, nobody) == ([], expected)
    assert not caplog.records


@pytest.mark.parametrize("page", ["http://evil.example/login", "http://127.0.0.1.evil.example/"])
async def test_unsafe_login_page_is_not_opened(page: str, tmp_path: Path, listening: Any):
    def app(url: str) -> Any:
        metadata = {
            "issuer": url,
            "authorization_endpoint": page,
            "token_endpoint": f"{url}/token",
            "registration_endpoint": f"{url}/register",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
        }

        async def refuse(request: Any) -> Response:
            return Response(status_code=401)

        async def describe(request: Any) -> Response:
            return JSONResponse(metadata)

        async def register(request: Any) -> Response:
            return JSONResponse({**await request.json(), "client_id": "x"}, 201)

        return Starlette(
            routes=[
                Route("/mcp", refuse, methods=["GET", "POST"]),
                Route("/.well-known/oauth-authorization-server", describe),
                Route("/register", register, methods=["POST"]),
            ]
        )

    user = User()
    async with listening(app) as url:
        found, error = await tools(f"{url}/mcp", tmp_path, user.visit)
    assert found == []
    assert error.startswith("MCP server 'vault' did not start: ")
    assert user.visited == []


@pytest.mark.parametrize("name", ["me:s3cret@", ""])
async def test_credentials_in_the_url_are_sent(name: str, tmp_path: Path, listening: Any):
    def app(url: str) -> Any:
        server = FastMCP("vault")
        server.tool(lambda: "gold", name="open")
        inner = server.http_app()

        async def provider(scope: Any, receive: Any, send: Any) -> None:
            known = (b"authorization", b"Basic bWU6czNjcmV0") in scope.get("headers", [])
            answer = inner if known or scope["type"] == "lifespan" else Response(status_code=401)
            await answer(scope, receive, send)

        return provider

    async with listening(app) as url:
        settings = ServerSettings(url=f"{url.replace('//', f'//{name}')}/mcp")
        server = to_server("vault", settings, "/", tokens=tmp_path, visit=nobody)
        found = await server.list()
        await server.close()
    assert bool(found) == bool(name)
    assert ("it requires authentication (401)" in server.error) == (not name)


class MemoryKeyring(KeyringBackend):
    """A keyring in memory."""

    priority = 5  # type: ignore[assignment]

    def __init__(self) -> None:
        self.passwords: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.passwords.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.passwords[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        self.passwords.pop((service, username))


async def test_tokens_are_stored_in_the_storedif_there_is_one(guarded: Guarded, tmp_path: Path):
    keyring.set_keyring(stored := MemoryKeyring())
    assert await tools(guarded.url, tmp_path / "oauth", User().visit) == (["open"], "")
    assert await tools(guarded.url, tmp_path / "oauth", nobody) == (["open"], "")
    assert not (tmp_path / "oauth").exists()
    assert {service for service, _ in stored.passwords} == {"crow"}
