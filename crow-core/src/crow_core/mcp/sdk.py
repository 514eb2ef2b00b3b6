"""FastMCP and the MCP SDK: their import, and everything of theirs that is private or replaced.

No other module of this package imports FastMCP. Importing this one does, which takes about a second: import it where a
server is connected (`sdk_import`). It was written against the versions in `VERSIONS`. A test checks that each
name in `RELIED_ON` still exists.
"""

# ruff: noqa: E402 - FastMCP reads its settings when it is imported, so `import_fastmcp` has to run first

import importlib
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Literal

from mcp import ClientSession
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim, advertise
from mcp.shared.dispatcher import CallOptions
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, CallToolResult, ErrorData, JSONRPCRequest, RequestId, Result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from typing_extensions import Unpack

from crow_core.mcp.server_answers import APP_TYPE, APPS_EXTENSION, SKILLS_EXTENSION, TASKS_EXTENSION

VERSIONS = {"fastmcp": "4.1.2", "mcp": "2.3.0"}
"""The versions that this module was written against."""


class SettingsFinder(MetaPathFinder):
    """Finds the module `fastmcp.settings` and calls `isolate_settings` with its class when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "fastmcp.settings" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                isolate_settings(module.Settings)

            spec.loader.exec_module = exec_module
        return spec


def isolate_settings(settings: Any) -> None:
    """Make FastMCP's settings class read no `.env` file and leave logging alone unless a variable turns it on."""
    from pydantic_settings import InitSettingsSource  # FastMCP has imported it

    def choose_sources(
        cls: Any, settings_cls: Any, init_settings: Any, env_settings: Any, **others: Any
    ) -> tuple[Any, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, {"log_enabled": False})

    settings.model_config["env_file"] = None
    settings.settings_customise_sources = classmethod(choose_sources)


def import_fastmcp() -> None:
    """Import FastMCP without the `.env` file of the working directory, which may be another project's.

    Does nothing in a program that has imported FastMCP already: its settings are that program's choice.
    """
    finder = SettingsFinder()
    sys.meta_path = [finder, *sys.meta_path]  # a new list: other threads may be iterating over the old one
    try:
        importlib.import_module("fastmcp")
    finally:
        sys.meta_path = [each for each in sys.meta_path if each is not finder]


import_fastmcp()

from fastmcp.client import Client
from fastmcp.client.auth.client_credentials import ClientCredentialsOAuthProvider as ClientCredentialsOAuthProvider
from fastmcp.client.auth.oauth import ClientNotFoundError as ClientNotFoundError
from fastmcp.client.auth.oauth import OAuth as OAuth
from fastmcp.client.oauth_callback import OAuthCallbackResult as OAuthCallbackResult
from fastmcp.client.oauth_callback import create_oauth_callback_server as create_oauth_callback_server
from fastmcp.client.transports import ClientTransport as ClientTransport
from fastmcp.client.transports import SSETransport as SSETransport
from fastmcp.client.transports import StreamableHttpTransport as StreamableHttpTransport
from fastmcp.client.transports.base import SessionKwargs as SessionKwargs
from fastmcp.client.transports.base import TransportOptions as TransportOptions
from fastmcp.skills.models import GetSkillParams as GetSkillParams
from fastmcp.skills.models import GetSkillRequest as GetSkillRequest
from fastmcp.skills.models import ListSkillsParams as ListSkillsParams
from fastmcp.skills.models import ListSkillsRequest as ListSkillsRequest

RELIED_ON: tuple[tuple[type, str], ...] = (
    (Client, "_transport_options"),
    (TransportOptions, "session_class"),
    (ClientCredentialsOAuthProvider, "_handle_token_response"),
    (ClientCredentialsOAuthProvider, "_perform_authorization"),
    (ClientSession, "validate_tool_result"),
    (JSONRPCDispatcher, "send_raw_request"),
    (JSONRPCDispatcher, "_closed"),
    (JSONRPCDispatcher, "_dispatch_request"),
    (JSONRPCDispatcher, "_handle_request"),
    (JSONRPCDispatcher, "_spawn"),
    (JSONRPCDispatcher, "_write_error"),
)
"""Each class with a name of its that is private, or that a subclass here replaces."""

FilterAnswer = Callable[[str, dict[str, Any], str], dict[str, Any]]
"""Takes a request's method, the server's answer and the version of MCP; returns the answer to use instead."""


REQUESTS_LIMIT = 100
"""Requests of a server that are handled at a time. As many more are answered with an error, and others not at all: a
server that floods may not read the answers."""


class FilteringDispatcher(JSONRPCDispatcher[TransportContext]):
    """Sends requests, and filters their answers before the SDK validates them. Limits the requests of the server."""

    def __init__(self, read_stream: Any, write_stream: Any, filter_answer: Callable[[str, Any], Any]) -> None:
        super().__init__(read_stream, write_stream)
        self.filter_answer = filter_answer
        self._unanswered = 0
        """Requests of the server that are being handled or answered."""

    async def _dispatch_request(self, req: JSONRPCRequest, *others: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._unanswered >= 2 * REQUESTS_LIMIT:
            return
        self._unanswered += 1
        if self._unanswered > REQUESTS_LIMIT:
            self._spawn(self._refuse_request, req.id, sender_ctx=None)
        else:
            await super()._dispatch_request(req, *others)

    async def _handle_request(self, *others: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            await super()._handle_request(*others)
        finally:
            self._unanswered -= 1

    async def _refuse_request(self, id: RequestId) -> None:
        try:
            await self._write_error(id, ErrorData(code=INTERNAL_ERROR, message="Too many requests at once"))
        finally:
            self._unanswered -= 1

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        *,
        _related_request_id: str | int | None = None,
    ) -> dict[str, Any]:
        answer = await super().send_raw_request(method, params, opts, _related_request_id=_related_request_id)
        return self.filter_answer(method, answer)

    @property
    def has_ended(self) -> bool:
        """True if the server has closed the connection. The SDK has no public sign of it."""
        return self._closed


class CheckedSession(ClientSession):
    """A session that filters answers, and checks a tool's result only if `can_check(tool)` is true."""

    def __init__(
        self,
        read_stream: Any,
        write_stream: Any,
        *,
        can_check: Callable[[str], bool],
        filter_answer: FilterAnswer,
        **options: Unpack[SessionKwargs],
    ) -> None:
        self.dispatcher = FilteringDispatcher(
            read_stream, write_stream, lambda method, answer: filter_answer(method, answer, self.protocol_version or "")
        )
        super().__init__(dispatcher=self.dispatcher, **options)
        self.can_check = can_check

    async def validate_tool_result(self, name: str, result: CallToolResult) -> None:
        if self.can_check(name) and result.structured_content is not None:
            await super().validate_tool_result(name, result)


FollowTask = Callable[[str, ClientSession], Awaitable[CallToolResult]]
"""Takes the id of a task; returns the result of the tool call that a server runs as this task."""


class CreatedTask(Result):
    """The answer to a tool call that the server runs as a task. The model has camelCase aliases."""

    result_type: Literal["task"]
    task_id: str


class Tasks(ClientExtension):
    """Tells servers that tool calls may run as tasks, and follows such tasks. Servers before 2026 are not told."""

    identifier = TASKS_EXTENSION

    def __init__(self, follow_task: FollowTask) -> None:
        self.follow_task = follow_task

    def claims(self) -> Sequence[ResultClaim[Any]]:
        versions = frozenset(MODERN_PROTOCOL_VERSIONS)
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=self.resolve, protocol_versions=versions)]

    async def resolve(self, created: CreatedTask, context: ClaimContext) -> CallToolResult:
        """Return the result of a tool call that was answered with a task."""
        return await self.follow_task(created.task_id, context.session)


class CheckedClient(Client[Any]):
    """FastMCP's client, with a `CheckedSession` for each connection."""

    def __init__(
        self,
        source: Any,
        *,
        can_check: Callable[[str], bool],
        filter_answer: FilterAnswer,
        follow_task: FollowTask,
        shows_apps: bool = False,
        **options: Any,
    ) -> None:
        """`source` and `options` are the arguments of FastMCP's `Client`. `shows_apps` announces MCP Apps."""
        extensions = [advertise(SKILLS_EXTENSION), Tasks(follow_task)]
        if shows_apps:
            extensions.append(advertise(APPS_EXTENSION, {"mimeTypes": [APP_TYPE]}))
        super().__init__(source, extensions=extensions, **options)
        session_class: Any = partial(CheckedSession, can_check=can_check, filter_answer=filter_answer)
        self._transport_options = TransportOptions(session_class=session_class)

    @property
    def has_ended(self) -> bool:
        """True if the client is disconnected, or the server has closed the connection."""
        return not self.is_connected() or (
            isinstance(self.session, CheckedSession) and self.session.dispatcher.has_ended
        )
