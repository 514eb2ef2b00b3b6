"""The requirements on an ACP agent, version 1, with the ids of the protocol's test kit.

Each is checked in the conversation of one scenario. For some, a flaw in any other conversation counts as well.
"""

from crow_acp_tools.check import (
    capability_requirements,
    robustness_requirements,
    session_requirements,
    wire_requirements,
)
from crow_acp_tools.check.requirement import Requirement

ANSWERED_BY = {"initialize": "INIT-001", "session/new": "SESSION-001", "session/prompt": "PROMPT-001"}
"""The requirement that the method of a basic scenario succeeds, by the method."""

REQUIREMENTS: dict[str, Requirement] = {
    **wire_requirements.requirement.requirements,
    **session_requirements.requirement.requirements,
    **capability_requirements.requirement.requirements,
    **robustness_requirements.requirement.requirements,
}
"""The requirements by their ids, in the order of the report."""
