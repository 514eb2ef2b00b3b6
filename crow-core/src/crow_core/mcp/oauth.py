"""Log in to remote MCP servers with OAuth: send the user to a page, and store the tokens.

FastMCP and the SDK implement the protocol. Importing this module imports FastMCP.
"""

import asyncio
import json
import socket
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, Literal

import httpx2
import keyring
from anyio import Event
from crow_system.files import make_private_folder
from key_value.aio.protocols import AsyncKeyValue
from key_value.aio.stores.filetree import (
    FileTreeStore,
    FileTreeV1CollectionSanitizationStrategy,
    FileTreeV1KeySanitizationStrategy,
)
from key_value.aio.stores.keyring import KeyringStore
from mcp.client.auth import OAuthFlowError
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthMetadata

from crow_core.errors import ElicitationError
from crow_core.mcp.elicitation import check_page
from crow_core.mcp.sdk import (
    ClientCredentialsOAuthProvider,
    ClientNotFoundError,
    OAuth,
    OAuthCallbackResult,
    create_oauth_callback_server,
)
from crow_core.text import to_line

Visit = Callable[[str], AbstractAsyncContextManager[Any]]
"""Returns a context manager that opens a URL for the user; its block runs while they are there.

Entering it raises ConnectionError if there is nobody to send."""

HOST = "127.0.0.1"
LOGIN_LIMIT = 300.0
"""Seconds the user has to log in."""


class Login(OAuth):
    """Logs in to one server. `visit` opens its login page, which sends the browser back to a port of this machine."""

    def __init__(
        self,
        url: str,
        tokens: Path,
        visit: Visit,
        *,
        client_id: str = "",
        client_secret: str = "",
        scopes: Sequence[str] = (),
        callback_port: int = 0,
    ) -> None:
        self._visit = visit
        self._page = ""
        described = client_id.startswith("https://")  # the URL of a document that describes the client
        self._fixed_id = "" if described else client_id
        self._fixed_secret = client_secret
        super().__init__(
            url,
            [*scopes],
            "crow",
            open_token_store(tokens),
            callback_port=callback_port or None,
            callback_host=HOST,
            client_metadata_url=client_id if described else None,
            client_id=self._fixed_id or None,
            client_secret=client_secret or None,
        )

    async def redirect_handler(self, authorization_url: str) -> None:
        """Remember the login page. `callback_handler` opens it once it listens for the browser's return.

        Raises ConnectionError for a URL that no browser should open. Raises ClientNotFoundError, which makes FastMCP
        register crow again, if the server knows crow with another port.
        """
        known, here, server = self.context.client_info, self.context.client_metadata, self.context.oauth_metadata
        if known and known.client_secret and self._fixed_secret:
            known.token_endpoint_auth_method = choose_auth_method(server)
        if known and not self._fixed_id and redirect_addresses(known) != redirect_addresses(here):
            raise ClientNotFoundError
        try:
            check_page(authorization_url)
        except ElicitationError as error:
            raise ConnectionError(f"it sends you to a page that is not safe to open: {error}") from error
        self._page = authorization_url

    async def callback_handler(self) -> AuthorizationCodeResult:
        """Open the login page and wait until the browser returns. Raises ConnectionError if there is no login."""
        result, back = OAuthCallbackResult(), Event()
        server = create_oauth_callback_server(
            self.redirect_port, server_url=self.mcp_url, result_container=result, result_ready=back
        )
        server.config.timeout_graceful_shutdown = 1
        server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue] - it would replace our signal handlers
        with socket.create_server((HOST, self.redirect_port)) as listening:  # before the browser can return
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            try:
                async with self._visit(self._page), asyncio.timeout(LOGIN_LIMIT):
                    await back.wait()
            except TimeoutError as error:
                raise ConnectionError(f"nobody logged in within {LOGIN_LIMIT:.0f} s") from error
            finally:
                server.should_exit = True
                await serving
        if result.error or result.code is None:
            raise ConnectionError(f"the login was refused: {result.error}")
        return AuthorizationCodeResult(code=result.code, state=result.state, iss=result.iss)


class ClientCredentials(ClientCredentialsOAuthProvider):
    """Gets tokens with a client's own secret, without a user (RFC 6749, section 4.4), and keeps them in memory.

    A token that has expired, or that the server refuses, is replaced by a new one. The secret is sent only to the
    authorization server `issuer`, whichever the MCP server names.
    """

    def __init__(self, url: str, client_id: str, client_secret: str, scopes: Sequence[str], issuer: str) -> None:
        self.issuer = issuer
        super().__init__(url, client_id=client_id, client_secret=client_secret, scopes=[*scopes] or None, issuer=issuer)

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request with a token. Raises ConnectionError if none is issued, or if the server refuses a new one."""
        response: httpx2.Response | None = None
        async with aclosing(super().async_auth_flow(request)) as flow:
            try:
                sent = await anext(flow)
                while True:
                    response = yield sent
                    sent = await flow.asend(response)
            except StopAsyncIteration:
                pass
            except OAuthFlowError as error:
                raise ConnectionError(f"no token of {self.issuer}: {error}; check oauth.issuer") from error
        if response is not None and response.status_code == 401:
            raise ConnectionError(f"it refuses a new token of {self.issuer} (401); check oauth.issuer and oauth.scopes")

    async def _perform_authorization(self) -> httpx2.Request:
        if client := self.context.client_info:
            client.token_endpoint_auth_method = choose_auth_method(self.context.oauth_metadata)
        return await super()._perform_authorization()

    async def _handle_token_response(self, response: httpx2.Response) -> None:
        """Take the token out of a response. Raises ConnectionError if there is none."""
        if not response.is_success:
            error, why = parse_token_error(await response.aread())
            settings = "oauth.scopes" if error == "invalid_scope" else "oauth.client_id and oauth.client_secret"
            reason = " ".join(filter(None, [str(response.status_code), error]))
            raise ConnectionError(
                f"{self.issuer} refuses the client credentials ({reason}{why and f': {why}'}); check {settings}"
            )
        try:
            await super()._handle_token_response(response)
        except OAuthFlowError:  # its text may quote the token
            raise ConnectionError(f"{self.issuer} answers with no valid token; check oauth.issuer") from None


def parse_token_error(body: bytes) -> tuple[str, str]:
    """Parse the answer to a refused request for a token (RFC 6749, section 5.2): its code and its description."""
    try:
        found: Any = json.loads(body)
        return to_line(str(found["error"])[:100]), to_line(str(found.get("error_description", ""))[:200])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", ""


def choose_auth_method(server: OAuthMetadata | None) -> Literal["client_secret_post", "client_secret_basic"]:
    """Choose how to send the secret, in the body or in a header, by what the authorization server supports."""
    takes = (server and server.token_endpoint_auth_methods_supported) or ["client_secret_basic"]  # RFC 8414
    return "client_secret_post" if "client_secret_post" in takes else "client_secret_basic"


class NoLogin(httpx2.Auth):
    """Sends the credentials in the URL, and raises ConnectionError if the server wants a login."""

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response]:
        if request.url.username:
            request = next(httpx2.BasicAuth(request.url.username, request.url.password).auth_flow(request))
        response = yield request
        if response.status_code == 401:
            how = 'give it an Authorization header, or auth = "oauth", then log in: crow mcp login NAME'
            raise ConnectionError(f"it requires authentication (401); {how}")


def redirect_addresses(client: OAuthClientMetadata | OAuthClientInformationFull) -> list[str]:
    """Return the URLs to which the server may send the browser back."""
    return [str(uri) for uri in client.redirect_uris or ()]


class ThreadedKeyringStore(KeyringStore):
    """The system's keyring. It is used in a thread, because it may wait for the user to unlock it."""

    async def _get_managed_entry(self, *, key: str, collection: str) -> Any:
        return await await_in_thread(super()._get_managed_entry(key=key, collection=collection))

    async def _put_managed_entry(self, *, key: str, collection: str, managed_entry: Any) -> None:
        await await_in_thread(super()._put_managed_entry(key=key, collection=collection, managed_entry=managed_entry))

    async def _delete_managed_entry(self, *, key: str, collection: str) -> bool:
        return await await_in_thread(super()._delete_managed_entry(key=key, collection=collection))


async def await_in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in an event loop of its own, in a thread."""
    return await asyncio.to_thread(asyncio.run, work)


def open_token_store(folder: Path) -> AsyncKeyValue:
    """Return the store for tokens: the system's keyring if there is one, else files in `folder` that only their owner
    can read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that a later version may change its format
        if keyring.get_keyring().priority >= 1:  # a placeholder has a lower priority
            return ThreadedKeyringStore(service_name="crow")
        make_private_folder(folder)
        return FileTreeStore(
            data_directory=folder,
            key_sanitization_strategy=FileTreeV1KeySanitizationStrategy(folder),
            collection_sanitization_strategy=FileTreeV1CollectionSanitizationStrategy(folder),
        )
