"""The server of crow's own tools in this process, and the workspace of their calls."""

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import crow_mcp_server
from crow_core.agent.client_files import ClientWorkspace
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.mcp.shared_servers import share_server
from crow_core.messages.message import Message, list_edits
from crow_core.messages.notes import EditNotes
from crow_core.messages.passes import drop_rewound
from crow_core.session.background_work import waiting
from crow_core.session.folders import find_shell
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_mcp_server.workspace import Launch, LaunchError, Workspace, local_workspace
from crow_permissions.review import find_launch, find_opener

TOOL_SERVER = "crow"
"""The name of the server of the built-in tools."""
REPLACED_TOOLS = ("plan", "ask_user")
"""Tools of crow-mcp-server that are left out: extensions offer them under the same names through the client."""
AT_END = StateKey("at_end", list[Callable[[], Awaitable[None]]])
SESSIONS: WeakValueDictionary[str, Session] = WeakValueDictionary()
"""The open sessions of all apps of this process, by id."""


def make_tool_server(
    crow: Crow,
    hidden_env: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    allow_hosts: Sequence[str] = (),
    *,
    only: Collection[str] | None = None,
) -> Server:
    """Return the server of the built-in tools, or of `only` those, in this process; equal apps share it. A file
    describes the tools, so that their code is loaded only when one is called."""
    tools = [
        tool
        for tool in crow_mcp_server.tools(env)
        if tool["name"] not in REPLACED_TOOLS and (only is None or tool["name"] in only)
    ]

    def source() -> Any:
        return crow_mcp_server.create_server(
            make_workspace, hidden_env, allow_hosts=allow_hosts, stay_on_host=True, env=env
        )

    @crow.session_start
    def note(session: Session) -> None:
        SESSIONS[session.id] = session

    crow.session_end(end_terminals)
    definition = (*(tool["name"] for tool in tools), *hidden_env, *allow_hosts, *env.items())
    make = partial(Server, TOOL_SERVER, source, definitions=tools, built_in=True, shared=True)
    return share_server(definition, make)


def make_workspace(meta: dict[str, Any]) -> Workspace:
    """Make the workspace of a tool call, with the files and terminals of its session's client where it offers them."""
    here = local_workspace(meta)
    if (session := SESSIONS.get(here.session)) is None:
        return here
    editor = ClientWorkspace(session, here.call)
    return replace(
        here,
        launch=to_launch(find_launch(session, here.call)),
        opened_by=find_opener(session, here.call),
        files=editor,
        terminals=editor if editor.runs else None,
        watch=editor.show_output,
        waits=partial(waiting, session, here.call),
        changes=lambda: list_changes(session.log),
        shell=lambda: find_shell(session.log),
        at_end=session.state[AT_END].append,
    )


def to_launch(launch: Launch | None) -> Launch | None:
    """Return how a command starts in the sandbox, with the errors that the tool knows; None outside of it."""

    def start(*arguments: Any) -> tuple[list[str], dict[str, str]]:
        from crow_sandbox.policy import SandboxError  # imported here: a session may run no command

        assert launch
        try:
            return launch(*arguments)
        except SandboxError as error:
            raise LaunchError(str(error)) from error

    return start if launch else None


def list_changes(log: Sequence[Message]) -> list[EditNotes]:
    """List what the edits of a session changed, except for edits that were undone with their turns."""
    return [change for entry in drop_rewound(log) for change in list_edits(entry)]


async def end_terminals(session: Session) -> None:
    """End the processes that a session's commands left running."""
    for end in session.state.pop(AT_END):
        await end()
