"""The ACP agent: turns the requests of one client into calls of the app, and errors into ACP's."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Protocol, TypeAlias

from crow_system.shortening import shorten_line
from msgspec import UNSET, Struct, UnsetType

from crow_core.acp.connection import Connection, ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AGENT_METHODS,
    AUTH_REQUIRED,
    CLIENT_METHODS,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    NOT_FOUND,
    PROTOCOL_VERSION,
    AgentAuthCapabilities,
    AgentCapabilities,
    ArchiveSessionRequest,
    ArchiveSessionResponse,
    AudioBlock,
    AuthenticateRequest,
    AuthenticateResponse,
    AuthMethod,
    AuthStatusCapabilities,
    AuthStatusRequest,
    AuthStatusResponse,
    CancelNotification,
    ClientCapabilities,
    CloseSessionRequest,
    CloseSessionResponse,
    ContentBlock,
    CurrentModeUpdate,
    DeleteSessionRequest,
    DeleteSessionResponse,
    DisableProviderRequest,
    DisableProviderResponse,
    ForkSessionRequest,
    ForkSessionResponse,
    ImageBlock,
    Implementation,
    InitializeRequest,
    InitializeResponse,
    ListProvidersRequest,
    ListProvidersResponse,
    ListSessionsRequest,
    ListSessionsResponse,
    LoadSessionRequest,
    LoadSessionResponse,
    LogoutCapabilities,
    LogoutRequest,
    LogoutResponse,
    McpCapabilities,
    NewSessionRequest,
    NewSessionResponse,
    PromptCapabilities,
    PromptRequest,
    PromptResponse,
    ProviderCurrentConfig,
    ProviderInfo,
    ProvidersCapabilities,
    ResourceBlock,
    ResumeSessionRequest,
    ResumeSessionResponse,
    SessionAdditionalDirectoriesCapabilities,
    SessionArchiveCapabilities,
    SessionCapabilities,
    SessionCloseCapabilities,
    SessionDeleteCapabilities,
    SessionForkCapabilities,
    SessionInfo,
    SessionInfoUpdate,
    SessionListCapabilities,
    SessionResumeCapabilities,
    SessionStatusCapabilities,
    SessionStatusRequest,
    SessionStatusResponse,
    SessionSystemPromptCapabilities,
    SessionSystemPromptModeCapabilities,
    SessionSystemPromptOverrideCapabilities,
    SessionTitleCapabilities,
    SetProviderRequest,
    SetProviderResponse,
    SetSessionConfigOptionRequest,
    SetSessionConfigOptionResponse,
    SetSessionModeRequest,
    SetSessionModeResponse,
    SetSessionTitleRequest,
    SetSessionTitleResponse,
    TextBlock,
    UnarchiveSessionRequest,
    UnarchiveSessionResponse,
    Unknown,
    Usage,
)
from crow_core.acp.transports import Transport
from crow_core.agent.providers import PROTOCOL, PROVIDER_ID, ClientProvider, is_shareable_url
from crow_core.app import Crow
from crow_core.content import find_image_type, replay, to_user_message
from crow_core.errors import ConfigError, ModelError, PromptError, SessionBusy, StoreError
from crow_core.hooks import call_function
from crow_core.mcp.server_source import from_acp
from crow_core.messages.message import Message
from crow_core.messages.notes import OutputNotes
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model
from crow_core.models.token_usage import TURN_TOTALS, TokenTotals
from crow_core.session.options import Option
from crow_core.session.output import TURN_NOTES, check_schema
from crow_core.session.session import Session
from crow_core.session.store import ArchiveFilter, Page, SessionChange, Summary
from crow_core.text import clean_json, to_line
from crow_core.trace import TRACE, extract_trace
from crow_core.version import __version__

PAGE_SIZE = 50
"""Sessions in one answer to `session/list`."""

OUTPUT_RETRIES = 2
"""Times that a result which does not fit is asked for again, unless the client says otherwise."""

TERMINAL_LOGIN = "setup"
"""The id of the method of authentication that runs a command on a terminal."""

SESSION_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{,63}")
"""Matches an id that a client in this process may choose for a session; it is also part of names of files."""

MAX_TITLE = 200
"""Characters of a title that a client sets; a longer one is shortened."""


OpenRequest: TypeAlias = NewSessionRequest | LoadSessionRequest | ResumeSessionRequest | ForkSessionRequest


@dataclass(frozen=True)
class Announced:
    """Abilities of an app that depend on its models and extensions, as `initialize` announces them."""

    stored: bool = False
    """Whether sessions are stored."""
    methods: Sequence[str] = ()
    """The methods beyond ACP that it answers."""
    audio: bool = False
    """Whether one of its models takes audio."""
    output_schema: bool = False
    """Whether a turn can end with a result that fits a JSON schema."""
    login: Sequence[str] = ()
    """The command line that logs the user in on a terminal; its last item is what the client has to add to the command
    line with which it starts the agent. Empty for none."""
    permission_answers: bool = False
    """Whether an answer to a permission question may hold a reason, or another command."""


class AppSource(Protocol):
    """Gives an agent its app, perhaps not before the first session needs it."""

    made: Crow | None
    """The app; None until it is made."""
    announced: Announced
    """The abilities to announce. `stored` must be right from the start, the rest once `prepare` has returned."""

    async def prepare(self) -> None:
        """Make `announced` exact; called before `initialize` is answered, so it should be quick."""
        ...

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        """Return the app, made if need be, with these models in place of the configured ones.

        Raises ModelError if there is no model, ConfigError for a setting that cannot be used.
        """
        ...

    async def reload(self) -> None:
        """Use models that were configured since the app was made, in the sessions that are opened from now on.

        Raises what `get` raises.
        """
        ...


class MadeApp:
    """The source of an app that exists already."""

    def __init__(self, crow: Crow) -> None:
        self.made: Crow | None = crow
        self.announced = announce(crow)
        self._crow = crow

    async def prepare(self) -> None: ...

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        return self._crow

    async def reload(self) -> None: ...


class LazyApp:
    """The source of an app that is made when the first session needs it.

    `make` takes `models`, with models in place of the configured ones.
    """

    def __init__(self, make: Callable[..., Awaitable[Crow]], announced: Announced | None = None) -> None:
        self.made: Crow | None = None
        self.announced = announced or Announced()
        self._make = make

    async def prepare(self) -> None: ...

    async def get(self, models: Mapping[str, Model] | None = None) -> Crow:
        if self.made is None:
            self.made = await (self._make() if models is None else self._make(models=models))
        return self.made

    async def reload(self) -> None: ...


def announce(crow: Crow) -> Announced:
    """Find out what an app has to announce."""
    audio = any(isinstance(model, ChatModel) and model.quirks.audio for model in crow.models.values())
    return Announced(
        crow.store is not None,
        list(crow.methods),
        audio,
        crow.takes_output_schema,
        permission_answers=crow.takes_permission_answers,
    )


class AcpAgent:
    """The agent's side of one ACP connection, and the client of the sessions that are opened through it."""

    max_sessions: int | None = 500
    """Sessions that one client may have open at once; None for any number."""

    def __init__(self, transport: Transport, crow: Crow | AppSource, *, unstable: bool = False) -> None:
        self.source: AppSource = MadeApp(crow) if isinstance(crow, Crow) else crow
        self.probe: Callable[[], Awaitable[bool]] | None = getattr(transport, "probe", None)
        """Tells whether the client still answers, for a transport that can ask (`WebSocketTransport`)."""
        self.unstable = unstable
        """Whether to use parts of ACP that may still change: tokens of a turn, the client's system prompts and
        endpoints, archived sessions, titles that the client sets, and the states of sessions and of the login."""
        self.capabilities = ClientCapabilities()
        self.logged_out = False
        """Whether the client has called `logout`, and not `authenticate` since."""
        self.sessions: dict[str, Session] = {}
        self.provider: ClientProvider | None = None
        """The client's own endpoint, for the sessions that it opens from now on."""
        self.providers: list[ClientProvider] = []
        """Every endpoint that the client has set."""
        storing = {
            "session/load": self.load_session,
            "session/resume": self.resume_session,
            "session/fork": self.fork_session,
            "session/list": self.list_sessions,
            "session/delete": self.delete_session,
        }
        managing = {
            "session/archive": self.archive_session,
            "session/unarchive": self.unarchive_session,
            "session/set_title": self.set_session_title,
            "session/status": self.get_session_status,
        }
        trying = {
            "auth/status": self.get_auth_status,
            "providers/list": self.list_providers,
            "providers/set": self.set_provider,
            "providers/disable": self.disable_provider,
        }
        self.connection = Connection(
            transport,
            AGENT_METHODS,
            CLIENT_METHODS,
            {
                "initialize": self.initialize,
                "authenticate": self.authenticate,
                "logout": self.logout,
                "session/new": self.new_session,
                "session/prompt": self.prompt,
                "session/cancel": self.cancel,
                "session/close": self.close_session,
                "session/set_mode": self.set_mode,
                "session/set_config_option": self.set_config_option,
                **(storing if self.source.announced.stored else {}),
                **(managing if unstable and self.source.announced.stored else {}),
                **(trying if unstable else {}),
            },
            fallback=self.call_method,
            clean=clean_json,
        )
        self._opening = 0
        """The number of sessions that are being opened."""
        self._making = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer requests until the client disconnects, then close its sessions."""
        try:
            await self.connection.serve()
        finally:
            if crow := self.source.made:
                await asyncio.gather(*(crow.close(session) for session in self.sessions.values()))
            await asyncio.gather(*(provider.close() for provider in self.providers))

    async def request(self, method: str, params: Struct) -> Any:
        return await self.connection.request(method, params)

    async def notify(self, method: str, params: Struct) -> None:
        try:
            await self.connection.notify(method, params)
        except ConnectionClosed:
            if not self.connection.is_closing:  # else everything is being closed already
                raise

    async def crow(self) -> Crow:
        """Return the app.

        Raises RpcError; without a model, and after `logout`, its code asks the client to authenticate.
        """
        if self.logged_out:
            raise RpcError(AUTH_REQUIRED, "Logged out", details="You have logged out of crow. Log in to go on.")
        async with self._making:
            try:
                return await self.source.get()
            except ModelError as error:
                if self.provider is None:
                    raise to_model_rpc_error(error) from error
                return await self.source.get(models={})
            except ConfigError as error:
                raise to_config_rpc_error(error) from error

    async def initialize(self, params: InitializeRequest) -> InitializeResponse:
        self.capabilities = params.client_capabilities or ClientCapabilities()
        async with self._making:
            await self.source.prepare()
        announced = self.source.announced
        return InitializeResponse(
            protocol_version=PROTOCOL_VERSION,
            agent_info=Implementation(name="crow", title="Crow", version=__version__),
            agent_capabilities=AgentCapabilities(
                load_session=announced.stored,
                prompt_capabilities=PromptCapabilities(image=True, audio=announced.audio, embedded_context=True),
                mcp_capabilities=McpCapabilities(http=True, sse=True),
                session_capabilities=SessionCapabilities(
                    **stored_session_capabilities() if announced.stored else {},
                    **managed_session_capabilities() if announced.stored and self.unstable else {},
                    close=SessionCloseCapabilities(),
                    additional_directories=SessionAdditionalDirectoriesCapabilities(),
                    **system_prompt_capabilities() if self.unstable else {},
                ),
                providers=ProvidersCapabilities() if self.unstable else UNSET,
                auth=AgentAuthCapabilities(
                    logout=LogoutCapabilities(), status=AuthStatusCapabilities() if self.unstable else UNSET
                ),
                meta={"crow": own} if (own := self.list_own_abilities(announced)) else UNSET,
            ),
            auth_methods=[
                AuthMethod(
                    id="configured",
                    name="The configured model",
                    description="Uses crow's configuration file, or OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL",
                ),
                *make_terminal_logins(announced.login, self.capabilities),
            ],
        )

    def list_own_abilities(self, announced: Announced) -> dict[str, Any]:
        """List the abilities beyond ACP, for `agentCapabilities._meta.crow`."""
        methods = {"methods": [*announced.methods]} if announced.methods else {}
        methods |= {"permissionAnswers": ["reason", "command"]} if announced.permission_answers else {}
        return methods | ({"outputSchema": True} if announced.output_schema else {})

    async def authenticate(self, params: AuthenticateRequest) -> AuthenticateResponse:
        """Log in with the configured models, as the settings are now. The terminal's method only asks for them to be
        read again, since its command has done the rest."""
        if params.method_id not in ("configured", TERMINAL_LOGIN):
            raise RpcError(INVALID_PARAMS, "Unknown authentication method", details="The only method is 'configured'.")
        self.logged_out = False
        await self.crow()
        await self.reload()
        return AuthenticateResponse()

    async def reload(self) -> None:
        """Use the models that are configured now. Raises RpcError."""
        async with self._making:
            try:
                await self.source.reload()
            except ModelError as error:
                raise to_model_rpc_error(error) from error
            except ConfigError as error:
                raise to_config_rpc_error(error) from error

    async def logout(self, params: LogoutRequest) -> LogoutResponse:
        """Cancel all turns, and refuse new prompts until `authenticate`; sessions stay open."""
        self.logged_out = True
        if crow := self.source.made:
            await asyncio.gather(*(crow.cancel(session) for session in self.sessions.values()))
        return LogoutResponse()

    async def get_auth_status(self, params: AuthStatusRequest) -> AuthStatusResponse:
        """Tell whether a session can be started without a login: by the default model, or the client's endpoint."""
        try:
            crow = await self.crow()
        except RpcError as error:
            return AuthStatusResponse(state="unauthenticated" if error.code == AUTH_REQUIRED else "unknown")
        if self.provider is not None:
            return AuthStatusResponse(state="authenticated" if self.provider.headers else "not_required")
        match next(iter(crow.models.values()), None):
            case ChatModel(secrets=secrets):
                return AuthStatusResponse(state="authenticated" if secrets else "not_required")
            case None:
                return AuthStatusResponse(state="unauthenticated")
            case _:
                return AuthStatusResponse(state="unknown")

    async def new_session(self, params: NewSessionRequest) -> NewSessionResponse:
        crow, cwd = await self.crow(), check_folder(params.cwd)
        session = await self.open_new_session(params, crow, cwd)
        return NewSessionResponse(
            session_id=session.id,
            modes=session.options.to_modes() or UNSET,
            config_options=[*session.options.to_config_options(self.capabilities)],
        )

    async def open_new_session(self, params: NewSessionRequest, crow: Crow, cwd: str) -> Session:
        """Open a new session for this client."""
        return await self.open_session(crow.open, self, cwd, params=params)

    async def open_session(
        self, opener: Callable[..., Awaitable[Session | None]], *args: Any, params: OpenRequest, id: str = ""
    ) -> Session:
        """Open a session through `opener`, a method of the app, for this client. `id` is the id that was asked for."""
        instructions = parse_instructions(params) if self.unstable else None
        most = self.max_sessions
        if most is not None and len(self.sessions) + self._opening >= most:
            raise RpcError(INVALID_REQUEST, "Too many sessions", details=f"{most} are open. Close one first.")
        self._opening += 1
        try:
            session = await opener(*args, **parse_folders_and_servers(params), models=await self.models())
        except ConfigError as error:  # in the settings of a trusted project
            raise to_config_rpc_error(error) from error
        except ModelError as error:
            raise to_model_rpc_error(error) from error
        except StoreError as error:
            raise to_store_rpc_error(error, id) from error
        finally:
            self._opening -= 1
        if session is None:
            raise make_unknown_session_error(id)
        if instructions:
            session.prompts.set_instructions(instructions[1], alone=instructions[0] == "override")
        self.sessions[session.id] = session
        # The client knows the session's id only when it has the response; Connection says in which order they are sent.
        asyncio.get_running_loop().call_soon(self.start_announcing, session)
        return session

    async def load_session(self, params: LoadSessionRequest) -> LoadSessionResponse:
        session = await self.reopen_session(params)
        for update in replay([*session.log, *session.journal.make_answers()], session.cwd):
            await session.update(update)
        return LoadSessionResponse(
            modes=session.options.to_modes() or UNSET,
            config_options=[*session.options.to_config_options(self.capabilities)],
        )

    async def resume_session(self, params: ResumeSessionRequest) -> ResumeSessionResponse:
        session = await self.reopen_session(params)
        return ResumeSessionResponse(
            modes=session.options.to_modes() or UNSET,
            config_options=[*session.options.to_config_options(self.capabilities)],
        )

    async def reopen_session(self, params: LoadSessionRequest | ResumeSessionRequest) -> Session:
        """Open a stored session. If this client has it open, or one that has disconnected or does not answer any more,
        it is closed first."""
        crow, id = await self.crow(), params.session_id
        cwd, _ = check_folder(params.cwd), parse_folders_and_servers(params)
        before = crow.sessions.get(id)
        if before and self.is_used_elsewhere(before) and isinstance(before.client, AcpAgent):
            await before.client.close_if_silent()
            before = crow.sessions.get(id)
        if before and not self.is_used_elsewhere(before):
            self.sessions.pop(id, None)
            await crow.close(before)
        return await self.open_session(crow.load, self, id, cwd, params=params, id=id)

    async def close_if_silent(self) -> None:
        """Close the connection if the client cannot be reached any more, as after its network has failed."""
        if self.probe and not await self.probe():
            await self.connection.close()

    def is_used_elsewhere(self, session: Session) -> bool:
        """Whether an open session belongs to another client that is still connected."""
        client = session.client
        return client is not self and not (isinstance(client, AcpAgent) and client.connection.is_closing)

    async def fork_session(self, params: ForkSessionRequest) -> ForkSessionResponse:
        crow, id = await self.crow(), params.session_id
        session = await self.open_session(crow.fork, self, id, check_folder(params.cwd), params=params, id=id)
        return ForkSessionResponse(
            session_id=session.id,
            modes=session.options.to_modes() or UNSET,
            config_options=[*session.options.to_config_options(self.capabilities)],
        )

    async def list_sessions(self, params: ListSessionsRequest) -> ListSessionsResponse:
        store = (await self.crow()).store
        archived = parse_archive_filter(params.archived or "exclude") if self.unstable else "exclude"
        try:
            page = Page(())
            if store is not None:
                page = await store.list_sessions(params.cwd or "", params.cursor or "", PAGE_SIZE, archived)
        except ValueError as error:
            raise RpcError(INVALID_PARAMS, "Unknown cursor", details="Ask for the list from its start.") from error
        except StoreError as error:
            raise to_store_rpc_error(error) from error
        sessions = [to_session_info(found, archived=self.unstable) for found in page.sessions]
        return ListSessionsResponse(sessions=sessions, next_cursor=page.cursor or UNSET)

    async def delete_session(self, params: DeleteSessionRequest) -> DeleteSessionResponse:
        crow, id = await self.crow(), params.session_id
        try:
            self.release_session(crow, id, "delete it")
            await crow.delete(id)
        except StoreError as error:
            raise to_store_rpc_error(error, id) from error
        return DeleteSessionResponse()

    def release_session(self, crow: Crow, id: str, purpose: str) -> None:
        """Forget a session of this client that is about to be closed. Raises SessionBusy if it is another client's."""
        if (found := crow.sessions.get(id)) and self.is_used_elsewhere(found):
            raise SessionBusy(f"Session {id} is open in another connection. Close it there, then {purpose}.")
        self.sessions.pop(id, None)

    async def archive_session(self, params: ArchiveSessionRequest) -> ArchiveSessionResponse:
        """Close a session and take it out of the list. One without a message was never stored, so it is unknown."""
        crow, id = await self.crow(), params.session_id

        async def archive() -> bool:
            self.release_session(crow, id, "archive it")
            return await crow.archive(id)

        await find_stored(id, archive())
        return ArchiveSessionResponse()

    async def unarchive_session(self, params: UnarchiveSessionRequest) -> UnarchiveSessionResponse:
        crow, id = await self.crow(), params.session_id
        await find_stored(id, crow.change(id, SessionChange(archived=False)))
        return UnarchiveSessionResponse()

    async def set_session_title(self, params: SetSessionTitleRequest) -> SetSessionTitleResponse:
        """Give a session a title of one line, whoever has it open."""
        crow, title = await self.crow(), to_line(" ".join(params.title.split()))
        if not title:
            raise RpcError(INVALID_PARAMS, "Unusable title", details="The title is empty.")
        title = shorten_line(title, MAX_TITLE)
        await find_stored(params.session_id, crow.set_title(params.session_id, title))
        return SetSessionTitleResponse(title=title)

    async def get_session_status(self, params: SessionStatusRequest) -> SessionStatusResponse:
        """Tell whether a session is open in this process, or stored."""
        crow, id = await self.crow(), params.session_id
        if id in crow.sessions:
            return SessionStatusResponse(status="open")
        await find_stored(id, crow.find(id))
        return SessionStatusResponse(status="saved")

    def start_announcing(self, session: Session) -> None:
        task = asyncio.ensure_future(self.announce(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def announce(self, session: Session) -> None:
        """Tell the client the commands and the title of a session, what could not be restored, and its mode."""
        session.turns.id_known.set()
        with suppress(ConnectionClosed):
            await session.announce_commands()
            if session.log.title:
                await session.update(SessionInfoUpdate(title=session.log.title))
            if session.log.damage:
                await session.notice(session.log.damage, "warning")
            for remark in session.options.remarks:
                await session.notice(remark)

    async def prompt(self, params: PromptRequest) -> PromptResponse:
        session, crow = self.session(params.session_id), await self.crow()
        message = self.read_prompt(params, crow)
        TURN_NOTES.set(notes := dict[str, Any]())
        TURN_TOTALS.set(spent := TokenTotals())
        TRACE.set(extract_trace(params.meta or {}))
        try:
            stop_reason = await crow.prompt(session, message)
            usage = to_usage(spent) if self.unstable else UNSET
            return PromptResponse(stop_reason=stop_reason, usage=usage, meta={"crow": notes} if notes else UNSET)
        except asyncio.CancelledError:
            return PromptResponse(stop_reason="cancelled")
        except ModelError as error:
            may_pass = {"retry": True} if error.may_pass else UNSET
            raise RpcError(INTERNAL_ERROR, "The model did not answer", may_pass, details=str(error)) from error
        except StoreError as error:
            kind = {"lost": True} if error.is_lost else {"retry": True}
            raise RpcError(INTERNAL_ERROR, "The session cannot be stored", kind, details=str(error)) from error
        except PromptError as error:
            raise RpcError(INTERNAL_ERROR, "The prompt cannot be used", details=str(error)) from error
        except ConfigError as error:  # an extension's function gave a hook what it does not take
            raise to_config_rpc_error(error) from error

    def read_prompt(self, params: PromptRequest, crow: Crow) -> Message:
        """Convert a prompt to the user's message. Raises RpcError if crow cannot take a part of it."""
        check_prompt(params.prompt, audio=self.source.announced.audio)
        message = to_user_message(params.prompt)
        if output := parse_output(params.meta or {}, possible=crow.takes_output_schema):
            message.setdefault("crow", {})["output"] = output
        return message

    async def cancel(self, params: CancelNotification) -> None:
        if (session := self.sessions.get(params.session_id)) and (crow := self.source.made):
            await crow.cancel(session)

    async def close_session(self, params: CloseSessionRequest) -> CloseSessionResponse:
        session = self.session(params.session_id)
        del self.sessions[session.id]
        if crow := self.source.made:
            await crow.close(session)
        return CloseSessionResponse()

    async def set_mode(self, params: SetSessionModeRequest) -> SetSessionModeResponse:
        session = self.session(params.session_id)
        option = next((option for option in session.options if option.category == "mode"), None)
        await choose_option(session, option, params.mode_id)
        await session.announce_options()
        return SetSessionModeResponse()

    async def set_config_option(self, params: SetSessionConfigOptionRequest) -> SetSessionConfigOptionResponse:
        session = self.session(params.session_id)
        before = session.options.to_modes()
        await choose_option(session, session.options.find(params.config_id), params.value)
        if (modes := session.options.to_modes()) and modes != before:
            await session.update(CurrentModeUpdate(current_mode_id=modes.current_mode_id))
        return SetSessionConfigOptionResponse(config_options=[*session.options.to_config_options(self.capabilities)])

    async def list_providers(self, params: ListProvidersRequest) -> ListProvidersResponse:
        provider = self.provider
        current = ProviderCurrentConfig(api_type=PROTOCOL, base_url=provider.base_url) if provider else UNSET
        info = ProviderInfo(provider_id=PROVIDER_ID, supported=[PROTOCOL], required=False, current=current)
        return ListProvidersResponse(providers=[info])

    async def set_provider(self, params: SetProviderRequest) -> SetProviderResponse:
        if params.provider_id != PROVIDER_ID:
            raise RpcError(INVALID_PARAMS, "Unknown provider", details=f"The only provider is {PROVIDER_ID!r}.")
        if params.api_type != PROTOCOL:
            raise RpcError(INVALID_PARAMS, "Unknown protocol", details=f"crow speaks {PROTOCOL!r} with models.")
        if not is_shareable_url(params.base_url):
            why = "It takes an http or https address without a password or a query: a key belongs into the headers."
            raise RpcError(INVALID_PARAMS, "Unusable base URL", details=why)
        self.provider = ClientProvider(params.base_url, dict(params.headers or {}))
        self.providers.append(self.provider)
        return SetProviderResponse()

    async def disable_provider(self, params: DisableProviderRequest) -> DisableProviderResponse:
        """Use the configured models again; does nothing if no provider was set."""
        if params.provider_id == PROVIDER_ID:
            self.provider = None
        return DisableProviderResponse()

    async def call_method(self, method: str, params: dict[str, Any]) -> Any:
        """Call a method that an extension has added, for one of this client's sessions."""
        crow = self.source.made
        function = crow.methods.get(method) if crow else None
        if function is None:
            raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method}")
        if not isinstance(id := params.get("sessionId"), str):
            raise RpcError(INVALID_PARAMS, "Invalid params: sessionId: a session has to be named")
        return await call_function(function, self.session(id), params)

    async def models(self) -> Mapping[str, Model] | None:
        """Return the models of the client's own endpoint; None if it has set none. Raises ModelError."""
        configured = crow.models.values() if (crow := self.source.made) else ()
        return self.provider and await self.provider.load_models([model.name for model in configured])

    def session(self, id: str) -> Session:
        try:
            return self.sessions[id]
        except KeyError:
            raise make_unknown_session_error(id) from None


def make_terminal_logins(command: Sequence[str], capabilities: ClientCapabilities) -> list[AuthMethod]:
    """Make the method that logs in on a terminal of the client's, for a client that offers one.

    ACP has clients add `args` to the agent's command line. Clients from before that was settled run the command in
    `_meta`, if they say that they know it.
    """
    if not command:
        return []
    method = AuthMethod(
        id=TERMINAL_LOGIN,
        name="Set up a model",
        description="Finds local models, or asks for a provider and its key, and stores what you choose",
    )
    known = capabilities.meta if isinstance(capabilities.meta, dict) else {}
    program, *args = command
    if known.get("terminal-auth") is True:
        method.meta = {"terminal-auth": {"label": "crow setup", "command": program, "args": args, "env": {}}}
    if capabilities.auth.terminal:
        method.type, method.args = "terminal", [command[-1]]
    return [method] if capabilities.auth.terminal or method.meta else []


def stored_session_capabilities() -> dict[str, Any]:
    """Make the capabilities of an agent that stores sessions."""
    return {
        "list": SessionListCapabilities(),
        "delete": SessionDeleteCapabilities(),
        "resume": SessionResumeCapabilities(),
        "fork": SessionForkCapabilities(),  # not in the stable schema yet; clients and other agents use it already
    }


async def find_stored(id: str, finding: Awaitable[object]) -> None:
    """Await what finds or changes a stored session. Raises RpcError if that fails, or if there is no such session."""
    try:
        found = await finding
    except StoreError as error:
        raise to_store_rpc_error(error, id) from error
    if not found:
        raise make_unknown_session_error(id)


def managed_session_capabilities() -> dict[str, Any]:
    """Make the capabilities of an agent that archives stored sessions, and sets their titles."""
    return {
        "archive": SessionArchiveCapabilities(),
        "title": SessionTitleCapabilities(),
        "status": SessionStatusCapabilities(),
    }


def parse_archive_filter(text: str) -> ArchiveFilter:
    """Parse the client's wish for archived sessions. Raises RpcError."""
    if text in ("exclude", "include", "only"):
        return text
    raise RpcError(INVALID_PARAMS, "Unknown archive filter", details="It is one of: exclude, include, only.")


def to_session_info(found: Summary, *, archived: bool) -> SessionInfo:
    """Convert a stored session to an item of ACP's list; `archived` says whether to tell if it is archived."""
    return SessionInfo(
        session_id=found.id,
        cwd=found.cwd,
        additional_directories=list(found.roots[1:]) or UNSET,
        title=found.title or UNSET,
        updated_at=datetime.fromtimestamp(found.updated / 1000, UTC).isoformat(timespec="milliseconds"),
        archived=found.archived if archived else UNSET,
    )


def system_prompt_capabilities() -> dict[str, Any]:
    """Make the capabilities for system prompts of the client."""
    modes = SessionSystemPromptModeCapabilities(override=SessionSystemPromptOverrideCapabilities())
    return {"system_prompt": SessionSystemPromptCapabilities(mode=modes)}


def parse_instructions(params: OpenRequest) -> tuple[str, str] | None:
    """Parse the client's system prompt: its mode and its text; None if there is none."""
    if not (prompt := params.system_prompt):
        return None
    if prompt.mode not in ("append", "override"):
        raise RpcError(INVALID_PARAMS, "Unknown system prompt mode", details="It is one of: append, override.")
    texts = [block.text for block in prompt.content if isinstance(block, TextBlock)]
    if not texts or len(texts) < len(prompt.content):
        raise RpcError(INVALID_PARAMS, "Unusable system prompt", details="It takes text blocks, at least one.")
    return prompt.mode, "\n\n".join(texts)


def to_usage(spent: TokenTotals) -> Usage | UnsetType:
    """Convert the tokens of a turn to ACP's usage; UNSET if the model was not asked, or no tokens were counted."""
    if not spent.calls:
        return UNSET
    return Usage(
        input_tokens=spent.prompt,
        output_tokens=spent.completion,
        total_tokens=spent.prompt + spent.completion,
        cached_read_tokens=spent.cached or UNSET,
        thought_tokens=spent.thought or UNSET,
    )


def parse_folders_and_servers(params: OpenRequest) -> dict[str, Any]:
    """Parse the additional folders and the MCP servers that a client wants in a session."""
    return {
        "roots": [check_folder(root) for root in params.additional_directories or []],
        "servers": [from_acp(server, params.cwd) for server in params.mcp_servers or []],
    }


def make_unknown_session_error(id: str) -> RpcError:
    """Make the error for an id that no session has."""
    return RpcError(NOT_FOUND, "Unknown session", {"sessionId": id, "details": f"No session {id!r}."})


def to_store_rpc_error(error: StoreError, id: str = "") -> RpcError:
    """Convert an error of the store, or of a session that is open elsewhere."""
    data: dict[str, Any] = {"details": str(error), "retry": True}
    if id:
        data["sessionId"] = id
    if isinstance(error, SessionBusy):
        return RpcError(INVALID_REQUEST, "The session is open elsewhere", {**data, "canFork": True})
    return RpcError(INTERNAL_ERROR, "The stored sessions cannot be used", data)


def to_model_rpc_error(error: ModelError) -> RpcError:
    """Convert the error for a missing model."""
    return RpcError(AUTH_REQUIRED, "No model is configured", details=str(error))


def to_config_rpc_error(error: ConfigError) -> RpcError:
    """Convert the error for a setting that cannot be used."""
    return RpcError(INTERNAL_ERROR, "The configuration cannot be used", details=str(error))


async def choose_option(session: Session, option: Option | None, value: str | bool) -> None:
    """Set an option to one of its choices. Raises RpcError."""
    if option is None:
        raise RpcError(INVALID_PARAMS, "Unknown option", details="No such option in this session.")
    if option.is_switch and isinstance(value, bool):
        value = "on" if value else "off"
    values = [choice.value for choice in option.choices]
    if value not in values:
        raise RpcError(INVALID_PARAMS, "Unknown value", details=f"{option.id} takes one of: {', '.join(values)}.")
    await session.options.choose(option, str(value))


def check_prompt(blocks: Sequence[ContentBlock], *, audio: bool) -> None:
    """Check that a prompt is not empty, and has only content that `initialize` has announced. Raises RpcError."""
    details = ""
    if not any(block.text.strip() if isinstance(block, TextBlock) else True for block in blocks):
        details = "The prompt is empty."
    for index, block in enumerate(blocks):
        if isinstance(block, Unknown):
            details = f"prompt[{index}] has the unknown type {to_line(str(block.raw.get('type'))[:100])!r}."
        elif isinstance(block, AudioBlock) and not audio:
            details = f"prompt[{index}] is audio, which was not announced in promptCapabilities."
        elif (data := find_image_data(block)) is not None:
            try:
                find_image_type(data)
            except ValueError as error:
                details = f"The image in prompt[{index}] {error}."
    if details:
        raise RpcError(INVALID_PARAMS, "Unusable prompt", details=details)


def find_image_data(block: ContentBlock) -> str | None:
    """Find the base64 data of an image, also of an embedded one; None for other content."""
    match block:
        case ImageBlock(data=data):
            return data
        case ResourceBlock(resource=resource) if str(resource.mime_type or "").startswith("image/") and resource.blob:
            return str(resource.blob)
        case _:
            return None


def parse_output(meta: Mapping[str, Any], *, possible: bool) -> OutputNotes | None:
    """Parse `_meta.crow` of a prompt: the JSON schema of the result, and how often one that does not fit is asked for
    again. Raises RpcError."""
    match meta:
        case {"crow": {"outputSchema": given, **others}}:
            schema, retries = given, others.get("outputRetries", OUTPUT_RETRIES)
        case _:
            return None
    details = "" if possible else "The extension structured_output is off: [extensions] structured_output."
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        details = details or "outputRetries is not a number of attempts."
    try:
        check_schema(schema)
    except ValueError as error:
        details = details or f"The schema of the result cannot be used: {error}."
    if details:
        raise RpcError(INVALID_PARAMS, "Unusable output schema", details=details)
    return {"schema": schema, "retries": retries}


def check_id(id: str) -> str:
    """Return the id of a session if a store can hold it. Raises RpcError."""
    if not SESSION_ID.fullmatch(id):
        details = f"{id[:80]!r} is not an id. Give up to 64 letters, digits, '.', '_' or '-'; the first is no sign."
        raise RpcError(INVALID_PARAMS, "Unusable session id", details=details)
    return id


def check_folder(path: str) -> str:
    """Return the path if it is absolute and a folder. Raises RpcError.

    On Windows, a path without a drive, as "/", is on that of this process.
    """
    if not PurePath(path).root:
        raise RpcError(INVALID_PARAMS, "Not an absolute path", details=f"{path!r} is not an absolute path.")
    if not os.path.isdir(path):
        raise RpcError(INVALID_PARAMS, "No such folder", details=f"The folder {path!r} does not exist.")
    return path if PurePath(path).is_absolute() else os.path.abspath(path)
