"""`Agent`: crow in this process, or any other ACP agent."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from crow_core.acp.agent_process import START_TIMEOUT
from crow_core.acp.schema import (
    AuthenticateRequest,
    LoadSessionRequest,
    NewSessionRequest,
    ResumeSessionRequest,
    SessionUpdate,
)
from crow_core.errors import ConfigError
from msgspec import UNSET

from crow_agent.agent_client import Elicit, Permissions, ProgramClient
from crow_agent.budget import Budget, limit_spending
from crow_agent.chosen_tools import Tool, choose_tools, refuse_edits
from crow_agent.connections import AgentConnection, connect_address, connect_app, connect_command
from crow_agent.content import PromptContent
from crow_agent.durable import PLACE, outside_workflows
from crow_agent.errors import AgentClosed, AgentError
from crow_agent.prompt_stream import PromptStream
from crow_agent.result import Result
from crow_agent.session import AgentSession
from crow_agent.time_limit import TimeLimit
from crow_agent.tools import McpServer, get_name, get_options, make_function_server, to_given_servers
from crow_agent.typed_results import OutputType
from crow_agent.unclosed import close, close_when_dropped

if TYPE_CHECKING:
    from crow_core.app import Crow
    from crow_core.models.model_call import Model
    from crow_core.session.prompts import Prompt

    from crow_agent.app import Mode

T = TypeVar("T")


class Agent:
    """crow in this process, with its models, tools and extensions; or, with `Agent.connect`, any other ACP agent.

    It starts with the first use, or with `async with`, which closes it at the end. All methods raise AgentError.
    """

    model: "str | Model" = ""
    """The model as it was given; empty for the configured one, and for another agent."""

    def __init__(
        self,
        model: "str | Model" = "",
        *,
        tools: Sequence[Tool] | None = None,
        mcp_servers: Mapping[str, McpServer] | None = None,
        extensions: "Iterable[Callable[[Crow], None]]" = (),
        permissions: Permissions = "deny",
        mode: "Mode | None" = None,
        elicit: Elicit | None = None,
        budget: Budget | None = None,
        system: "str | Prompt | None" = None,
        cwd: str | Path = ".",
        store: bool | str = True,
        max_requests: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Set up an agent; nothing is read or started yet.

        `model`: its name in the configuration or at the endpoint; by default the configured one, or that of
        OPENAI_BASE_URL and CROW_MODEL.
        `tools`: Python functions, and crow's own by group (`builtin`, `builtin:read`, `builtin:edit`,
        `builtin:terminal`, `builtin:web`) or name; by default all of crow's own and the configured MCP servers.
        `mcp_servers`: further MCP servers by name, each a command, a URL, a dict with the settings of
        `[mcp.servers.NAME]`, or a FastMCP object; sessions and equal agents share their connections.
        `extensions`: functions that take the app, in the order of their hooks, after the configured ones.
        `permissions` answers each question about a tool call. "allow" and "deny" always answer so; a function returns
        True, False, the id of an option, or any other text. Such a text rejects the call and tells the model why. The
        rules of the configuration hold in any case.
        `mode`: which tool calls need a permission, by default that of the configuration.
        `elicit`: answers forms of tools and MCP servers: a function that returns the values, or None to decline.
        `system`: a Jinja2 template in place of crow's system prompt.
        `store`: whether sessions are stored in the configured database, or the URL of another one.
        `max_requests`: the most model calls of one turn.
        `env`: the environment in place of `os.environ`; its CROW_HOME names the folder of the configuration.
        Raises TypeError for a function that cannot be a tool. Raises ValueError for an unknown group of tools, for two
        tools of one name, and for an MCP server that cannot be used.
        """
        self._tools = choose_tools(tools)
        self._function_server = make_function_server(functions) if (functions := self._tools.functions) else None
        self._given_servers = to_given_servers(mcp_servers) if mcp_servers else {}
        self._extensions = list(extensions)
        self.model = model
        self._system = system
        self._store = store
        self._max_requests = max_requests
        self._mode: Mode | None = mode
        self._set_up(permissions, elicit, budget, cwd, env, lambda: connect_app(self._build))
        self._counts_itself = budget is not None

    @classmethod
    def connect(
        cls,
        target: str | Sequence[str],
        *,
        permissions: Permissions = "deny",
        elicit: Elicit | None = None,
        budget: Budget | None = None,
        cwd: str | Path = ".",
        env: Mapping[str, str] | None = None,
        token: str = "",
        workspace: bool | None = None,
        version: Literal[1, 2] = 1,
    ) -> "Agent":
        """Use another agent: the command of an ACP agent, or an address with its token: `wss://…` for
        WebSocket, `https://…` for streamable HTTP; `ws://` and `http://` without encryption.

        `env` is added to the environment of the command.
        `workspace`: True if the agent may read and write files below `cwd` and run commands through this program, as
        through an editor. `permissions` decides each write and command that the agent has not asked about; "deny"
        offers reading alone. By default yes for a command, no for an address.
        `version`: with 2, version 2 of ACP is spoken with an agent that offers it. It is a draft; its agents use no
        files and commands of the client.
        """
        agent = cls.__new__(cls)
        is_address = isinstance(target, str) and target.startswith(("ws://", "wss://", "http://", "https://"))
        if isinstance(target, str) and "://" in target.split(" ")[0] and not is_address:
            raise ValueError(f"{target!r} is not the address of an agent. Give one with ws://, wss:// or https://.")
        offered = (env or {}) if (not is_address if workspace is None else workspace) else None
        if isinstance(target, str) and is_address:
            agent._set_up(permissions, elicit, budget, cwd, env, lambda: connect_address(target, token, offered))
        else:
            agent._set_up(
                permissions, elicit, budget, cwd, env, lambda: connect_command(target, env, agent._cwd, offered)
            )
        agent._version = version
        return agent

    def _set_up(
        self,
        permissions: Permissions,
        elicit: Elicit | None,
        budget: Budget | None,
        cwd: str | Path,
        env: Mapping[str, str] | None,
        connect: Callable[[], AbstractAsyncContextManager[AgentConnection]],
    ) -> None:
        if permissions not in ("allow", "deny") and not callable(permissions):
            raise ValueError(f"permissions is 'allow', 'deny' or a function, not {permissions!r}.")
        self.budget = budget
        self._permissions: Permissions = permissions
        self._elicit = elicit
        self._cwd = to_absolute(cwd)
        self._env = os.environ if env is None else env
        self._connect = connect
        self._version = 1
        """The version of ACP to offer."""
        self._counts_itself = False
        """True if the agent counts what it spends; else its updates are counted here."""
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._client: ProgramClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def _build(self) -> "Crow":
        """Make the app in this process."""
        from crow_core.mcp.shared_servers import share_server
        from crow_core.session.prompts import Prompt
        from crow_extensions.ask_user import ask_user
        from crow_extensions.other_agents import other_agents
        from crow_extensions.plan import plan
        from crow_persistence.extension import persistence

        from crow_agent.app import build
        from crow_agent.builtin_tools import TOOL_SERVER
        from crow_agent.session_servers import configured_servers, given_servers, project_servers

        left_out = [] if self._store else [persistence]
        left_out += [] if self._elicit else [ask_user]
        left_out += [] if self._tools.builtin is None else [plan, configured_servers, project_servers, other_agents]
        crow = await build(
            self._env,
            model=self.model if isinstance(self.model, str) else "",
            models=None if isinstance(self.model, str) else {self.model.name: self.model},
            mode=self._mode,
            max_requests=self._max_requests,
            without=left_out,
            attended=False,
            tools=self._tools.builtin,
            allow=[get_name(function) for function in self._tools.functions if not get_options(function).ask],
            database=self._store if isinstance(self._store, str) else "",
            system=Prompt("system", self._system) if isinstance(self._system, str) else self._system,
        )
        if self._tools.builtin is not None:  # extensions may have added servers with tools of their own
            crow.servers = [server for server in crow.servers if server.name == TOOL_SERVER]
        crow.servers += self._tools.servers
        if server := self._function_server:
            definition = tuple((id(function), get_options(function)) for function in self._tools.functions)
            crow.servers.append(share_server(definition, lambda: server))
        if self._given_servers:
            crow.use(given_servers, given=self._given_servers, env=self._env)
        if self._tools.only_views:
            crow.use(refuse_edits)
        if self.budget is not None:
            self.budget.check_prices(next(iter(crow.models.values())))
        limits = [] if self.budget is None else [partial(limit_spending, budget=self.budget)]
        for extension in [*self._extensions, *limits]:
            try:
                crow.use(extension)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"The extension {extension!r} cannot be used: {error}.") from error
        return crow

    @contextmanager
    def override(
        self,
        *,
        model: "str | Model",
        env: Mapping[str, str],
        cwd: str | Path,
        extensions: "Iterable[Callable[[Crow], None]]" = (),
    ) -> Generator[None]:
        """Use another model, environment and folder in the block, and more extensions, as tests do.

        The agent starts anew in the block, with nothing of its budget spent, and is afterwards what it was before.
        Close it at the end of the block. It does not use a database of its own. Raises TypeError for an agent of
        `Agent.connect`.
        """
        before = vars(self).copy()
        if "_extensions" not in before:
            raise TypeError("This agent is another program: its model cannot be replaced. Use an Agent of crow's own.")
        self._set_up(self._permissions, self._elicit, self.budget, cwd, env, self._connect)
        self._counts_itself = before["_counts_itself"]
        self.model, self._store = model, bool(self._store)
        self._extensions = [*self._extensions, *extensions]
        if self.budget is not None:
            self.budget = replace(self.budget, spent={})
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(before)

    async def __aenter__(self) -> "Agent":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> "ProgramClient":
        """Start or connect the agent, if that is not done."""
        async with self._opening:
            if self._closed:
                raise AgentClosed("This agent is closed. Make another one.")
            loop = asyncio.get_running_loop()
            if self._loop not in (None, loop):
                raise AgentError("This agent was started in another event loop. Make one agent for each event loop.")
            if self._client is None:
                self._loop = loop
                with outside_workflows():  # the tasks that start here work for the whole program
                    self._client = await self._start()
            return self._client

    async def _start(self) -> "ProgramClient":
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(self._connect())
            client = ProgramClient(connection, self._permissions, self._elicit)
            if client.workspace is not None:
                stack.push_async_callback(client.workspace.terminals.release_all)
            await stack.enter_async_context(client.serving())
            await client.start(self._version)
            self._stack = stack.pop_all()
            close_when_dropped(self, self._stack)
            return client
        raise AssertionError  # unreachable: the block returns or raises

    async def close(self) -> None:
        """Close its sessions and end it. It may be called again."""
        self._closed = True
        async with self._opening:
            stack, client, self._stack, self._client = self._stack, self._client, None, None
        if client is not None:
            client.closed = True
        if stack is not None:
            await close(stack)

    async def session(self, id: str = "", *, create: bool = False, cwd: str | Path = "") -> "AgentSession":
        """Open a new session, or the stored one with this id. Raises SessionNotFound.

        With `create`, a session that does not exist yet is made, with this id of up to 64 letters, digits, `.`, `_` and
        `-`. It is stored at once and belongs to this process until it is closed, or the process ends. Inside a durable
        workflow, a session without an id gets one that is the same when the workflow goes on in another process.
        """
        if not id and (place := PLACE.get()) is not None:
            return await place.open_session(self, str(cwd))
        folder = to_absolute(cwd) if cwd else self._cwd
        client, counts = await self.open(), self._counts_itself
        if create and not client.takes_keys:
            raise AgentError(f"{client.connected.name} gives its sessions ids of its own. Leave out create=True.")
        if create or not id:
            return await self.make_session(id, folder)
        if id in client.sessions:
            raise make_open_error(id)
        capabilities = client.initialized.agent_capabilities
        if capabilities.session_capabilities.resume:
            method, params = "session/resume", ResumeSessionRequest(session_id=id, cwd=folder)
        elif capabilities.load_session:
            method, params = "session/load", LoadSessionRequest(session_id=id, cwd=folder, mcp_servers=[])
        else:
            why = (
                "it offers neither resume nor load" if getattr(self, "_store", True) else "it stores none (store=False)"
            )
            raise AgentError(f"{client.connected.name} cannot open a stored session: {why}.")
        session = AgentSession(client, id, folder, self.budget, counts=counts)
        try:
            session.take_options(await client.ask(method, params, timeout=START_TIMEOUT))
        except BaseException:
            client.sessions.pop(id, None)
            raise
        return session

    async def make_session(
        self, id: str, cwd: str | Path = "", origin: Mapping[str, Any] | None = None
    ) -> "AgentSession":
        """Make a session, or open the stored one with this id; without an id, it is a new one.

        `origin` says which session a new one continues: that of `load_or_open`, in `in_process.py`.
        """
        client, folder = await self.open(), to_absolute(cwd) if cwd else self._cwd
        if id in client.sessions:
            raise make_open_error(id)
        notes = {"sessionId": id, **({"origin": origin} if origin else {})}
        params = NewSessionRequest(cwd=folder, mcp_servers=[], meta={"crow": notes} if id else UNSET)
        response = await client.ask("session/new", params, timeout=START_TIMEOUT)
        session = AgentSession(client, response.session_id, folder, self.budget, counts=self._counts_itself)
        session.take_options(response)
        return session

    async def login(self, method: str = "") -> None:
        """Log in with one of the methods that the agent offers; by default with its only one. Raises AgentError."""
        client = await self.open()
        offered = [one.id for one in client.initialized.auth_methods]
        if not method and len(offered) == 1:
            method = offered[0]
        if method not in offered:
            known = f"It offers: {', '.join(offered)}." if offered else "It offers none; log in with its own command."
            raise AgentError(f"{client.connected.name} has no log-in method {method!r}. {known}")
        await client.ask("authenticate", AuthenticateRequest(method_id=method))

    async def request(self, method: str, params: Any) -> Any:
        """Send any request of ACP, and return its result."""
        return await (await self.open()).ask(method, params)

    @overload
    async def prompt(self, prompt: PromptContent, *, timeout: float | None = None) -> Result[str]: ...

    @overload
    async def prompt(
        self, prompt: PromptContent, *, output: type[T], retries: int = 2, timeout: float | None = None
    ) -> Result[T]: ...

    @overload
    async def prompt(
        self, prompt: PromptContent, *, output: Any, retries: int = 2, timeout: float | None = None
    ) -> Result[Any]: ...

    async def prompt(
        self, prompt: PromptContent, *, output: Any = None, retries: int = 2, timeout: float | None = None
    ) -> Result[Any]:
        """Send a prompt to a new session, wait for the end of the turn, and close the session.

        `prompt` is a text, a file (a `pathlib.Path`), the bytes of an image, or a list of them. `output` is the type of
        the answer, in `result.output`; one that does not fit is asked for again, `retries` times. `timeout` is in
        seconds, the start of the agent included. `session(result.session_id)` continues the session. Raises as
        `AgentSession.prompt` does.
        """
        return await self._prompt_once(TimeLimit(timeout), prompt, output=output, retries=retries)

    async def _prompt_once(self, limit: TimeLimit, prompt: PromptContent, **options: Any) -> Result[Any]:
        """Open a session, prompt it with the options of `AgentSession.prompt_within`, and close it."""
        async with limit.holding():
            session = await self.session()
        try:
            return await session.prompt_within(limit, prompt, **options)
        finally:
            await session.close()

    @overload
    def stream(self, prompt: PromptContent, *, timeout: float | None = None) -> PromptStream[str]: ...

    @overload
    def stream(
        self, prompt: PromptContent, *, output: type[T], retries: int = 2, timeout: float | None = None
    ) -> PromptStream[T]: ...

    @overload
    def stream(
        self, prompt: PromptContent, *, output: Any, retries: int = 2, timeout: float | None = None
    ) -> PromptStream[Any]: ...

    def stream(
        self, prompt: PromptContent, *, output: Any = None, retries: int = 2, timeout: float | None = None
    ) -> PromptStream[Any]:
        """Send a prompt to a new session; iterate over the result to get the updates of its turn, or await it.

        `async for text in agent.stream(…).text()` gets the agent's text. The arguments are those of `prompt`. A
        notebook shows the turn while it runs.
        """

        def send(limit: TimeLimit, on_update: Callable[[SessionUpdate], None]) -> Awaitable[Result[Any]]:
            return self._prompt_once(limit, prompt, output=output, retries=retries, on_update=on_update)

        return PromptStream[Any](send, timeout)

    @overload
    async def map(
        self, prompts: Iterable[PromptContent], *, at_once: int = 10, timeout: float | None = None
    ) -> list[Result[str]]: ...

    @overload
    async def map(
        self,
        prompts: Iterable[PromptContent],
        *,
        at_once: int = 10,
        output: type[T],
        retries: int = 2,
        timeout: float | None = None,
    ) -> list[Result[T]]: ...

    @overload
    async def map(
        self,
        prompts: Iterable[PromptContent],
        *,
        at_once: int = 10,
        output: Any,
        retries: int = 2,
        timeout: float | None = None,
    ) -> list[Result[Any]]: ...

    async def map(
        self,
        prompts: Iterable[PromptContent],
        *,
        at_once: int = 10,
        output: Any = None,
        retries: int = 2,
        timeout: float | None = None,
    ) -> list[Result[Any]]:
        """Send each prompt to a session of its own, some `at_once`, and return the results in order.

        The other arguments are those of `prompt`. An error stays with its item, in `Result.error`.
        """
        if isinstance(prompts, (str, bytes)):
            raise TypeError("map takes a list of prompts. For one prompt, use prompt().")
        if output is not None:
            OutputType[Any](output)  # raises an error that concerns all items
        place = PLACE.get()
        branches = [(prompt, place.branch() if place else nullcontext()) for prompt in prompts]
        waiting = iter(list(enumerate(branches)))
        results: dict[int, Result[Any]] = {}

        async def work() -> None:
            for index, (prompt, branch) in waiting:
                try:
                    with branch:
                        results[index] = await self.prompt(prompt, output=output, retries=retries, timeout=timeout)
                except Exception as error:  # of a function of the program, too: it stays with its item
                    so_far = error.result if isinstance(error, AgentError) else None
                    results[index] = replace(so_far or Result(""), error=error)

        async with TimeLimit(timeout).holding():
            await self.open()
        async with asyncio.TaskGroup() as group:
            for _ in range(max(at_once, 1)):
                group.create_task(work())
        return [results[index] for index in sorted(results)]


def make_open_error(id: str) -> AgentError:
    """Make the error for a session that this agent has open."""
    return AgentError(f"Session {id} is open in this agent. Use the session that is open, or fork it.")


def to_absolute(folder: str | Path) -> str:
    """Convert the path of a folder to an absolute one."""
    return str(Path(folder).expanduser().absolute())
