"""The sentences for turns that stop before their end."""

from crow_core.acp.schema import PromptResponse

STOPS = {
    "cancelled": "Cancelled.",
    "max_tokens": "The answer was cut: the model reached its limit of tokens.",
    "max_turn_requests": "Stopped at the limit of requests. Say “go on” to go on.",
    "refusal": "The model refused to answer.",
}
"""The sentences by the stop reason."""


def describe_stop(response: PromptResponse) -> str:
    """Return why a turn stopped, in words; empty if it came to its end."""
    match response.meta:
        case {"crow": {"stopped": {"by": "repeated_calls" | "budget"}}}:
            return "Say “go on” to go on."  # a notice has said why it stopped
        case {"crow": {"stopped": {"by": "goal"}}}:
            return ""  # the notice says how to go on
        case _:
            return STOPS.get(response.stop_reason, "")
