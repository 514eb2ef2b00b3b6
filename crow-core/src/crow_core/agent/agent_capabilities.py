"""The answer to `initialize`: what the agent can do, and how to log in."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from crow_core.acp.schema import (
    PROTOCOL_VERSION,
    AgentAuthCapabilities,
    AgentCapabilities,
    AuthMethod,
    AuthStatusCapabilities,
    ClientCapabilities,
    Implementation,
    InitializeResponse,
    LogoutCapabilities,
    McpCapabilities,
    PromptCapabilities,
    ProvidersCapabilities,
    SessionAdditionalDirectoriesCapabilities,
    SessionArchiveCapabilities,
    SessionCapabilities,
    SessionCloseCapabilities,
    SessionDeleteCapabilities,
    SessionForkCapabilities,
    SessionListCapabilities,
    SessionResumeCapabilities,
    SessionStatusCapabilities,
    SessionSystemPromptCapabilities,
    SessionSystemPromptModeCapabilities,
    SessionSystemPromptOverrideCapabilities,
    SessionTitleCapabilities,
)
from crow_core.acp.shared_methods import to_meta
from crow_core.agent.app_source import Announced
from crow_core.version import __version__

TERMINAL_LOGIN = "setup"
"""The id of the method of authentication that runs a command on a terminal."""


def make_initialize_response(
    announced: Announced, capabilities: ClientCapabilities, own: Mapping[str, Any], *, unstable: bool
) -> InitializeResponse:
    """Make the answer to a client with these capabilities.

    `own` are the abilities beyond ACP. `unstable` adds parts of ACP that may still change.
    """
    return InitializeResponse(
        protocol_version=PROTOCOL_VERSION,
        agent_info=Implementation(name="crow", title="Crow", version=__version__),
        agent_capabilities=AgentCapabilities(
            load_session=announced.stored,
            prompt_capabilities=PromptCapabilities(image=True, audio=announced.audio, embedded_context=True),
            mcp_capabilities=McpCapabilities(http=True, sse=True),
            session_capabilities=SessionCapabilities(
                **stored_session_capabilities() if announced.stored else {},
                **managed_session_capabilities() if announced.stored and unstable else {},
                close=SessionCloseCapabilities(),
                additional_directories=SessionAdditionalDirectoriesCapabilities(),
                **system_prompt_capabilities() if unstable else {},
            ),
            providers=ProvidersCapabilities() if unstable else UNSET,
            auth=AgentAuthCapabilities(
                logout=LogoutCapabilities(), status=AuthStatusCapabilities() if unstable else UNSET
            ),
            meta={"crow": own} if own else UNSET,
        ),
        auth_methods=[
            AuthMethod(
                id="configured",
                name="The configured model",
                description="Uses crow's configuration file, or OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL",
            ),
            *make_terminal_logins(announced.login, capabilities),
        ],
        meta=to_meta(announced.methods) or UNSET,
    )


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
    return {
        "list": SessionListCapabilities(),
        "delete": SessionDeleteCapabilities(),
        "resume": SessionResumeCapabilities(),
        "fork": SessionForkCapabilities(),  # not in the stable schema yet; clients and other agents use it already
    }


def managed_session_capabilities() -> dict[str, Any]:
    """Make the capabilities of an agent that archives stored sessions, and sets their titles."""
    return {
        "archive": SessionArchiveCapabilities(),
        "title": SessionTitleCapabilities(),
        "status": SessionStatusCapabilities(),
    }


def system_prompt_capabilities() -> dict[str, Any]:
    """Make the capabilities for system prompts of the client."""
    modes = SessionSystemPromptModeCapabilities(override=SessionSystemPromptOverrideCapabilities())
    return {"system_prompt": SessionSystemPromptCapabilities(mode=modes)}


def list_own_abilities(announced: Announced) -> dict[str, Any]:
    """List the abilities beyond ACP, for `agentCapabilities._meta.crow`."""
    methods = {"methods": [*announced.methods]} if announced.methods else {}
    methods |= {"permissionAnswers": ["reason", "command"]} if announced.permission_answers else {}
    return methods | ({"outputSchema": True} if announced.output_schema else {})
