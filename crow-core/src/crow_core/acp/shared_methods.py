"""Methods beyond ACP that other agents have, too: words for a running turn, and going back to an earlier message.

`_session/steering` is that of claude-agent-acp and codex-acp; `_session/rewind_points` and `_session/rewind` are those
proposed for claude-agent-acp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from crow_core.acp.schema import AgentCapabilities, ContentBlock

STEERING_METHOD = "_session/steering"
REWIND_POINTS_METHOD = "_session/rewind_points"
REWIND_METHOD = "_session/rewind"
APP_METHOD = "_crow/app"
"""The page of an MCP app, for a tool call. This method is crow's own."""
APP_REQUEST_METHOD = "_crow/app_request"
"""A request of that page: `tools/call` or `resources/read`. This method is crow's own."""
BACKGROUND_METHOD = "_crow/background"
"""The commands and sub-agents in the background: send, list, stop. This method is crow's own."""
REWIND_MODES = ("files", "conversation", "both")
META: Mapping[str, dict[str, Any]] = {
    STEERING_METHOD: {"steering": {"supported": True}},
    REWIND_METHOD: {"rewindSession": {"modes": [*REWIND_MODES]}},
}
"""The `_meta` of the answer to `initialize` by which clients find a method."""


def to_meta(methods: Sequence[str]) -> dict[str, Any]:
    """Make the `_meta` by which clients find those of an agent's methods that other agents have, too."""
    return {key: value for method in methods for key, value in META.get(method, {}).items()}


def can_steer(meta: Any) -> bool:
    """Find out from the `_meta` of the answer to `initialize` whether an agent takes words for a running turn."""
    match meta:
        case {"steering": {"supported": True}}:
            return True
        case _:
            return False


def can_rewind(meta: Any) -> bool:
    """Find out from the `_meta` of the answer to `initialize` whether an agent goes back with files and words."""
    match meta:
        case {"rewindSession": {"modes": [*modes]}}:
            return "both" in modes
        case _:
            return False


def get_own_meta(capabilities: AgentCapabilities) -> Mapping[str, Any]:
    """Return `_meta.crow` of an agent's capabilities; empty if it has none."""
    match capabilities.meta:
        case {"crow": {**own}}:
            return own
        case _:
            return {}


def has_background(own: Mapping[str, Any]) -> bool:
    """Find out from `agentCapabilities._meta.crow` whether an agent sends what runs to the background."""
    methods = own.get("methods")
    return isinstance(methods, list) and BACKGROUND_METHOD in methods


def make_steering_params(session_id: str, prompt: Sequence[ContentBlock]) -> dict[str, Any]:
    """Make the params of `_session/steering` for a client that sends as a prompt what joins no turn."""
    meta = {"steering": {"idleBehavior": "promptRequired"}}
    return {"sessionId": session_id, "prompt": [*prompt], "_meta": meta}


def is_taken(answer: Any) -> bool:
    """Find out from the answer to `_session/steering` whether the agent has the words. If not, they are still to be
    sent; an outcome that nobody knows counts as taken, so that no words are sent twice."""
    match answer:
        case {"outcome": str(outcome)}:
            return outcome not in ("promptRequired", "failed")
        case _:
            return False
