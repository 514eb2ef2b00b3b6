"""The settings of other agents, which the configuration reads without importing the extension that starts them."""

from typing import Annotated

from msgspec import Meta, Struct, field


class AgentSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of another agent: `[agents.NAME]`. Its command speaks the Agent Client Protocol."""

    command: str
    """The program to start."""
    args: list[str] = field(default_factory=list[str])
    """The command's arguments."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Variables in addition to those that commands of the model get."""
    cwd: str = ""
    """The command's working directory, relative to the session's folder, which is the default."""
    description: str = ""
    """For the model: the tasks that the agent is good for."""
    timeout: Annotated[float, Meta(gt=0)] = 3600
    """Seconds that a task may take; then it is cancelled."""
    disabled: bool = False
    """True if crow leaves the agent out."""
