"""The requirements on an ACP agent, with the ids of the protocol's test kit; those of version 2 begin with `V2-`.

Each is checked in the conversation of one scenario. For some, a flaw in any other conversation counts as well.
"""

from dataclasses import replace

from crow_acp_tools.check import (
    capability_requirements,
    robustness_requirements,
    session_requirements,
    version_2_requirements,
    wire_requirements,
)
from crow_acp_tools.check.requirement import Requirement
from crow_acp_tools.check.versions import VERSION_2

ANSWERED_BY = {"initialize": "INIT-001", "session/new": "SESSION-001", "session/prompt": "PROMPT-001"}
"""The requirement that the method of a basic scenario succeeds, by the method."""

ONLY_VERSION_1 = {
    *("INIT-002", "INIT-003", "INIT-004"),  # the agent's name is a part of INIT-001
    *("PROMPT-001", "LOAD-001", "LOAD-002", "LOAD-003", "LOAD-004", "MODES-001", "MODES-002"),
    *("CONFIG-003", "CLIENTCAP-001", "CLIENTCAP-002"),  # clients have switches, and neither files nor terminals
}
"""The requirements of version 1 that version 2 does not have, or has in another way."""

CAPABILITIES = {
    "sessionCapabilities.list": "session",
    "sessionCapabilities.resume": "session",
    "sessionCapabilities.close": "session",
    "sessionCapabilities.delete": "session.delete",
    "sessionCapabilities.additionalDirectories": "session.additionalDirectories",
    "promptCapabilities.image": "session.prompt.image",
    "promptCapabilities.audio": "session.prompt.audio",
    "promptCapabilities.embeddedContext": "session.prompt.embeddedContext",
    "auth.logout": "",
    "": "",
}
"""The capabilities of version 2, by those of version 1."""

FIRST: dict[str, Requirement] = {
    **wire_requirements.requirement.requirements,
    **session_requirements.requirement.requirements,
    **capability_requirements.requirement.requirements,
    **robustness_requirements.requirement.requirements,
}


def to_version_2(requirement: Requirement) -> Requirement:
    """Make the requirement of version 2 from one that both versions have."""
    id, capability = VERSION_2.prefix + requirement.id, CAPABILITIES[requirement.capability]
    return replace(requirement, id=id, capability=capability, version=VERSION_2)


REQUIREMENTS: dict[str, Requirement] = {
    **FIRST,
    **{
        VERSION_2.prefix + id: to_version_2(requirement)
        for id, requirement in FIRST.items()
        if id not in ONLY_VERSION_1
    },
    **version_2_requirements.requirement.requirements,
}
"""The requirements by their ids, in the order of the report."""
