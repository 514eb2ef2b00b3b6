"""Logging in to remote MCP servers (OAuth): a person is sent to a page, and what came of it is remembered.

FastMCP and the SDK know the protocol. Imported only when such a server has to be connected, as it loads them.
"""

import asyncio
import socket
import warnings
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import keyring
from anyio import Event
from fastmcp.client.auth.oauth import ClientNotFoundError, OAuth
from fastmcp.client.oauth_callback import OAuthCallbackResult, create_oauth_callback_server
from key_value.aio.protocols import AsyncKeyValue
from key_value.aio.stores.filetree import (
    FileTreeStore,
    FileTreeV1CollectionSanitizationStrategy,
    FileTreeV1KeySanitizationStrategy,
)
from key_value.aio.stores.keyring import KeyringStore
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata

from crow_core.elicitation import check_page
from crow_core.errors import ElicitationError

Visit = Callable[[str], AbstractAsyncContextManager[Any]]
"""Sends a person to an address, and holds until what they do there is done. Raises ConnectionError where there is
nobody to send."""

HOST = "127.0.0.1"
PATIENCE = 300.0
"""Seconds a person has to log in."""


class Login(OAuth):
    """Logs in to one server. `visit` sends the person to the server's page, from where the browser comes back here."""

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
        described = client_id.startswith("https://")  # the address of a document that says who the client is
        super().__init__(
            url,
            [*scopes],
            "crow",
            store(tokens),
            callback_port=callback_port or None,
            callback_host=HOST,
            client_metadata_url=client_id if described else None,
            client_id=None if described else client_id or None,
            client_secret=client_secret or None,
        )

    async def redirect_handler(self, authorization_url: str) -> None:
        """Remember the page: the person is sent there when somebody listens for their coming back.

        Raises ConnectionError for an address that no browser should open. Raises ClientNotFoundError, which makes
        FastMCP register anew, when crow is known there with another port.
        """
        known, here, server = self.context.client_info, self.context.client_metadata, self.context.oauth_metadata
        if known and known.client_secret and self._client_secret:
            takes = (server and server.token_endpoint_auth_methods_supported) or ["client_secret_basic"]  # RFC 8414
            in_body = "client_secret_post" in takes
            known.token_endpoint_auth_method = "client_secret_post" if in_body else "client_secret_basic"
        if known and not self._client_id and addresses(known) != addresses(here):
            raise ClientNotFoundError
        try:
            check_page(authorization_url)
        except ElicitationError as error:
            raise ConnectionError(f"it sends you to a page that is not safe to open: {error}") from error
        self._page = authorization_url

    async def callback_handler(self) -> AuthorizationCodeResult:
        """Send the person there and wait for their coming back."""
        result, back = OAuthCallbackResult(), Event()
        server = create_oauth_callback_server(
            self.redirect_port, server_url=self.mcp_url, result_container=result, result_ready=back
        )
        server.config.timeout_graceful_shutdown = 1
        server.capture_signals = nullcontext  # pyright: ignore[reportAttributeAccessIssue] - else it takes ours
        with socket.create_server((HOST, self.redirect_port)) as listening:  # now nobody can come too early
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            try:
                async with self._visit(self._page), asyncio.timeout(PATIENCE):
                    await back.wait()
            except TimeoutError as error:
                raise ConnectionError(f"nobody logged in within {PATIENCE:.0f} s") from error
            finally:
                server.should_exit = True
                await serving
        if result.error or result.code is None:
            raise ConnectionError(f"the login was refused: {result.error}")
        return AuthorizationCodeResult(code=result.code, state=result.state, iss=result.iss)


class Stranger(httpx2.Auth):
    """Shows what the address and the headers hold, and says so where that is not enough."""

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response]:
        if request.url.username:
            request = next(httpx2.BasicAuth(request.url.username, request.url.password).auth_flow(request))
        response = yield request
        if response.status_code == 401:
            how = 'give it an Authorization header, or auth = "oauth", then log in: crow mcp login NAME'
            raise ConnectionError(f"it answers nobody whom it does not know (401); {how}")


def addresses(client: OAuthClientMetadata | OAuthClientInformationFull) -> list[str]:
    """Where the browser may come back to."""
    return [str(uri) for uri in client.redirect_uris or ()]


class Keyring(KeyringStore):
    """The system's keyring, asked in a thread: it may ask the person to unlock it."""

    async def _get_managed_entry(self, *, key: str, collection: str) -> Any:
        return await in_thread(super()._get_managed_entry(key=key, collection=collection))

    async def _put_managed_entry(self, *, key: str, collection: str, managed_entry: Any) -> None:
        await in_thread(super()._put_managed_entry(key=key, collection=collection, managed_entry=managed_entry))

    async def _delete_managed_entry(self, *, key: str, collection: str) -> bool:
        return await in_thread(super()._delete_managed_entry(key=key, collection=collection))


async def in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.to_thread(asyncio.run, work)


def store(folder: Path) -> AsyncKeyValue:
    """Where tokens are kept: the system's keyring if there is one, else files for their owner alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a later version may store them differently
        if keyring.get_keyring().priority >= 1:  # what only stands in for one has less
            return Keyring(service_name="crow")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return FileTreeStore(
            data_directory=folder,
            key_sanitization_strategy=FileTreeV1KeySanitizationStrategy(folder),
            collection_sanitization_strategy=FileTreeV1CollectionSanitizationStrategy(folder),
        )
