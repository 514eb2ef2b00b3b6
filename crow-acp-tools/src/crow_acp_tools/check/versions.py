"""The versions of ACP that an agent is checked against: their methods, their names, and the first request of each."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from crow_core.acp import schema, schema_v2
from crow_core.acp.schema import Method

CLIENT_INFO = {"name": "crow-check", "version": "1"}
CHUNKS = {"agent_message_chunk", "agent_thought_chunk", "user_message_chunk"}


@dataclass(frozen=True, eq=False)
class ProtocolVersion:
    """One version of ACP, as far as a checker has to know it."""

    number: int
    prefix: str
    """The beginning of the ids of its requirements."""
    agent_methods: Mapping[str, Method]
    """The methods that an agent answers."""
    agent_calls: Mapping[str, Method]
    """The methods that an agent may call."""
    initialize: Mapping[str, Any]
    """The params of `initialize` for a client without capabilities."""
    capabilities: str
    """The member of the answer to `initialize` that has the agent's capabilities."""
    info: str
    """The member of the answer to `initialize` that has the agent's name."""
    login: str
    logout: str
    login_id: str
    """The member of a method of authentication that has its id."""
    option_id: str
    """The member of an option that has its id."""
    turn_updates: Set[str]
    """The updates that belong to a turn. All others may come at any time."""


VERSION_1 = ProtocolVersion(
    number=schema.PROTOCOL_VERSION,
    prefix="",
    agent_methods=schema.AGENT_METHODS,
    agent_calls={**schema.CLIENT_METHODS, **schema.PROTOCOL_METHODS},
    initialize={
        "protocolVersion": schema.PROTOCOL_VERSION,
        "clientCapabilities": {},
        "clientInfo": CLIENT_INFO,
    },
    capabilities="agentCapabilities",
    info="agentInfo",
    login="authenticate",
    logout="logout",
    login_id="id",
    option_id="id",
    turn_updates={*CHUNKS, "tool_call", "tool_call_update", "plan"},
)
VERSION_2 = ProtocolVersion(
    number=schema_v2.PROTOCOL_VERSION,
    prefix="V2-",
    agent_methods=schema_v2.AGENT_METHODS,
    agent_calls={**schema_v2.CLIENT_METHODS, **schema.PROTOCOL_METHODS},
    initialize={
        "protocolVersion": schema_v2.PROTOCOL_VERSION,
        "capabilities": {},
        "info": CLIENT_INFO,
        "clientCapabilities": {},  # for an agent of version 1, which has to answer as well
        "clientInfo": CLIENT_INFO,
    },
    capabilities="capabilities",
    info="info",
    login="auth/login",
    logout="auth/logout",
    login_id="methodId",
    option_id="configId",
    turn_updates={
        *CHUNKS,
        *("user_message", "agent_message", "agent_thought"),
        *("tool_call_update", "tool_call_content_chunk", "plan_update"),
    },
)
VERSIONS = (VERSION_1, VERSION_2)


def answers_in_version(answer: Any) -> int:
    """Return the version of ACP that an answer to `initialize` is in; 0 if none can be made out.

    Some agents of version 1 repeat any number that they are sent. Their capabilities have version 1's name.
    """
    match answer:
        case {"protocolVersion": 2, "agentCapabilities": _}:
            return 1
        case {"protocolVersion": int(version)} if not isinstance(version, bool):
            return version
        case _:
            return 0
